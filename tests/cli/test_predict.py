"""`autotune predict` and `run --mode predict` from the command line: no GPU, no weights, the
installed TRL is traced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.measurement import PHASES
from autotune.core.units import GIB
from tests.cli.command import Done, autotune, shape_only

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 32000}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
"""Large enough that activations and not the CUDA context decide."""

LENGTHS = (
    "--max-prompt-length",
    "128",
    "--max-completion-length",
    "128",
    "--num-generations",
    "4",
    "--global-batch",
    "8",
)


pytestmark = pytest.mark.usefixtures("light_environment")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_only(tmp_path_factory.mktemp("shape") / "model", **SMALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace cache shared by the tests of this module."""
    return tmp_path_factory.mktemp("cache")


def predict(
    model: Path,
    cache: Path,
    cwd: Path,
    *arguments: str,
    command: str = "predict",
) -> Done:
    flags = [command, "--model", str(model), *LENGTHS, *arguments]
    return autotune(
        *flags,
        cwd=cwd,
        timeout=240,
        XDG_CACHE_HOME=str(cache),
    )


def assert_contract(document: dict[str, Any]) -> None:
    """Check that figures are intervals, the breakdown sums up, and the phases are known."""
    assert document["schema"] == 1 and document["basis"] in ("traced", "generic")
    for name in (
        "peak_memory_bytes",
        "margin_bytes",
        "torch_peak_allocated_bytes",
        "torch_peak_reserved_bytes",
    ):
        assert document[name]["low"] <= document[name]["value"] <= document[name]["high"]
    peak = document["peak_memory_bytes"]["value"]
    assert sum(part["bytes"] for part in document["breakdown"]) == peak
    usable_bytes = document["usable_bytes"]["value"]
    assert usable_bytes <= document["limit_bytes"]
    assert document["margin_bytes"]["value"] == usable_bytes - peak
    assert {phase["name"] for phase in document["phases"]} <= set(PHASES)
    assert max(phase["peak_bytes"]["value"] for phase in document["phases"]) == peak
    assert (
        document["torch_peak_allocated_bytes"]["value"]
        <= document["torch_peak_reserved_bytes"]["value"]
        <= peak
    )


@pytest.mark.slow
def test_unknown_facts_are_undecided_and_named(cache: Path, tmp_path: Path) -> None:
    """The model's steps come with the package, so nothing is traced."""
    model = Path("Qwen2.5-0.5B")
    flags = [
        "--gpus",
        "A100-40G",
        "--global-batch",
        "64",
        "--unknown",
        "per_device_train_batch_size=8,64",
        "--json",
    ]
    unlimited = predict(model, cache, tmp_path, *flags)
    assert unlimited.code == 0, unlimited.err
    assert_contract(unlimited.document)
    small, large = (way["peak_memory_bytes"] for way in unlimited.document["unknown"])
    assert unlimited.document["peak_memory_bytes"] == {**large, "low": small["low"]}
    assert small["high"] < large["low"], (small, large)
    limit = f"{(small['high'] + large['low']) // 2}B"
    between = predict(model, cache, tmp_path, *flags, "--memory-limit", limit)
    assert between.code == 5 and between.document["fits"] is None
    assert between.document["depends_on"] == [
        "per_device_train_batch_size, which is not given: fits with 8, does not fit with 64"
    ]


@pytest.mark.slow
def test_fits_does_not_fit_and_can_not_be_decided(cache: Path, tmp_path: Path) -> None:
    """The model's steps come with the package; the tests below trace a model of their own."""
    model = Path("Qwen2.5-0.5B")
    fits = predict(model, cache, tmp_path, "--gpus", "A100-40G", "--json")
    assert fits.code == 0, fits.err
    assert_contract(fits.document)
    assert fits.document["fits"] is True and fits.document["limit_bytes"] == 40 * GIB
    assert "predicted, nothing was measured" in fits.err

    peak = fits.document["peak_memory_bytes"]
    between = predict(
        model,
        cache,
        tmp_path,
        "--gpus",
        "A100-40G",
        "--memory-limit",
        f"{peak['value']}B",
        "--json",
    )
    assert between.code == 5, between.err
    assert between.document["fits"] is None and between.document["depends_on"]

    over = predict(
        model,
        cache,
        tmp_path,
        "--gpus",
        "A100-40G",
        "--memory-limit",
        f"{peak['low'] // 2}B",
        "--json",
    )
    assert over.code == 3, over.err
    assert_contract(over.document)
    assert over.document["fits"] is False


@pytest.mark.slow
def test_advice_makes_it_fit(cache: Path, tmp_path: Path) -> None:
    """A reported change makes the configuration fit when it is applied."""
    model = shape_only(tmp_path / "large", **LARGE)
    arguments = [
        "--gpus",
        "A100-40G",
        "--memory-limit",
        "4G",
        "--set",
        "gradient_checkpointing=false",
        "--json",
    ]
    over = predict(model, cache, tmp_path, *arguments, "--set", "per_device_train_batch_size=8")
    assert over.code == 3, over.err
    ways = over.document["ways_to_fit"]
    assert ways, over.err
    change = ways[0]["change"]
    assert "--set" in over.err and ways[0]["margin_bytes"]["low"] >= 0
    settings = {"gradient_checkpointing": False, "per_device_train_batch_size": 8, **change}
    typed = [
        word
        for name, value in settings.items()
        for word in ("--set", f"{name}={json.dumps(value)}")
    ]
    again = predict(
        model, cache, tmp_path, "--gpus", "A100-40G", "--memory-limit", "4G", "--json", *typed
    )
    assert again.code == 0, again.err


@pytest.mark.slow
def test_a_second_question_starts_no_framework(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    first = predict(model, cache, tmp_path, "--gpus", "A100-80G", "--json")
    second = predict(model, cache, tmp_path, "--gpus", "A100-80G", "--json")
    assert first.code == second.code == 0
    assert first.document == second.document


@pytest.mark.slow
def test_run_where_the_hardware_is_not_here(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    done = predict(
        model, cache, tmp_path, "--gpus", "A100-40G", "--out", "there", "--json", command="run"
    )
    assert done.code == 0, done.err
    document = done.document
    assert document["basis"] == "predicted" and document["status"] == "ok"
    assert (
        document["recommendation"]["basis"] == "predicted"
        and document["recommendation"]["certificate"] is None
    )
    assert document["counts"]["probed"] == 0 and document["gpu_seconds"] is None
    assert (
        document["confirm_with"].startswith("autotune run")
        and "--mode probe" in document["confirm_with"]
    )
    assert "not on this machine" in done.err and "Predicted, nothing was measured." in done.err
    assert json.loads((tmp_path / "there" / "recommendation.json").read_text()) == document
    assert (tmp_path / "there" / "recommended.yaml").is_file()
    assert not (tmp_path / "there" / "study.db").exists(), (
        "nothing was measured, so there is no study"
    )


@pytest.mark.slow
def test_run_reports_that_nothing_fits(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    flags = ("--gpus", "A100-40G", "--memory-limit", "300M", "--out", "there", "--json")
    done = predict(model, cache, tmp_path, *flags, command="run")
    assert done.code == 3, done.err
    assert done.document["status"] == "nothing_fits" and done.document["recommendation"] is None
    assert done.document["nearest_miss"]["prediction"]["peak_memory_bytes"]["low"] > 300 * 2**20


@pytest.mark.slow
@pytest.mark.long  # the same advice as above, by `run`; its screening takes a minute
def test_run_advises_a_change_where_nothing_fits(cache: Path, tmp_path: Path) -> None:
    """Full tuning does not fit; the predicted change does, if it is held."""
    model = shape_only(tmp_path / "large", **LARGE)
    flags = [
        "--gpus",
        "A100-40G",
        "--memory-limit",
        "6G",
        "--tuning",
        "full",
        "--max-completion-length",
        "16",
        "--out",
        "there",
        "--json",
    ]
    over = predict(model, cache, tmp_path, *flags, "--mode", "predict", command="run")
    assert over.code == 3, over.err
    (change,) = [
        way["change"] for way in over.document["ways_to_fit"] if "use_peft" in way["change"]
    ]
    holds = [
        word for name, value in change.items() for word in ("--hold", f"{name}={json.dumps(value)}")
    ]
    assert (
        " ".join(holds) in over.err and "Predicted changes that make the baseline fit" in over.err
    )
    again = predict(model, cache, tmp_path, *flags, *holds, "--mode", "predict", command="run")
    assert again.code == 0, again.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("sft", []),
        ("dpo", []),
        ("online-dpo", []),
        # Each method is traced and counted in tests/counted_memory as well.
        pytest.param("kto", [], marks=pytest.mark.long),
        pytest.param("reward", [], marks=pytest.mark.long),
        pytest.param("rloo", ["--num-generations", "2"], marks=pytest.mark.long),
    ],
)
def test_trls_other_methods(
    model: Path,
    cache: Path,
    tmp_path: Path,
    method: str,
    arguments: list[str],
) -> None:
    flags = [
        "predict",
        "--model",
        str(model),
        "--method",
        method,
        "--gpus",
        "A100-40G",
        "--json",
        *arguments,
    ]
    done = autotune(
        *flags,
        cwd=tmp_path,
        timeout=240,
        XDG_CACHE_HOME=str(cache),
    )
    assert done.code == 0, done.err
    assert_contract(done.document)


@pytest.mark.slow
def test_trls_asynchronous_trainer(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    """Rows decide the batch: a number of micro-steps is taken as it is, without a batch that is
    held.
    """
    flags = [
        "predict",
        "--model",
        str(model),
        "--method",
        "async-grpo",
        "--gpus",
        "3xH100",
        "--json",
    ]
    done = autotune(
        *flags,
        "--set",
        "gradient_accumulation_steps=5",
        cwd=tmp_path,
        timeout=240,
        XDG_CACHE_HOME=str(cache),
    )
    assert done.code == 0, done.err
    assert_contract(done.document)
    assert done.document["fits"] and done.document["tokens_per_second"]["value"] > 0
    settings = done.document["settings"]
    assert (
        settings["gradient_accumulation_steps"],
        settings["dtype"],
        settings["server_gpus"],
    ) == (5, "float32", 1)


def test_bad_input_is_answered_before_anything_starts(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    def refused(*arguments: str) -> str:
        done = predict(model, cache, tmp_path, "--gpus", "A100-40G", *arguments)
        assert done.code == 2, done.err
        assert done.out == "" and done.err.startswith("Error: ") and done.err.count("\n") == 1
        return done.err

    assert "'num_generations'" in refused("--set", "num_generation=8")
    assert "--set num_generations=8" in refused("--set", "num_generations")
    assert "given twice" in refused("--set", "beta=0.1", "--set", "beta=0.2")
    assert "illegal" not in refused("--set", "per_device_train_batch_size=3")
    assert "above the memory" in refused("--memory-limit", "80G")


@pytest.mark.slow
def test_a_model_that_can_not_be_followed(cache: Path, tmp_path: Path) -> None:
    strange = shape_only(tmp_path / "strange", model_type="no_such_architecture")
    done = predict(strange, cache, tmp_path, "--gpus", "A100-40G", "--json")
    assert done.code == 2, done.err
    assert "no_such_architecture" in done.err and "Traceback" not in done.err
