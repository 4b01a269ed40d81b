"""`autotune solve` from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Done, autotune, shape_only
from tests.cli.pseudo_terminal import seen

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 32000}
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_only(tmp_path_factory.mktemp("shape") / "model", **SMALL)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(model: Path, kept: Path, *arguments: str) -> Done:
    asked = ["solve", *arguments, "--model", str(model), *LENGTHS]
    return autotune(
        *asked,
        cwd=kept,
        timeout=400,
        XDG_CACHE_HOME=str(kept),
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["max_completion_lenght"],
            "Unknown setting 'max_completion_lenght'. Did you mean 'max_completion_length'",
        ),
        (["loss_type"], "loss_type is 'dapo', not a number above zero"),
        (["use_vllm"], "use_vllm is False, not a number"),
        (["learning_rate", "--set", "learning_rate=2.5"], "neither a whole number nor a share"),
        (["max_completion_length", "--price", "prices.yaml"], "--price belongs to"),
        (["gpus"], "--price was not given"),
        (["gpus", "--price", "prices.yaml", "--gpus", "L4"], "--gpus is what is solved for"),
        (["gpus", "--price", "none.yaml"], "There is no file 'none.yaml'"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path,
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    hardware = [] if arguments[0] == "gpus" else ["--gpus", "A100-40G"]
    done = autotune("solve", *arguments, *hardware, "--model", str(model), cwd=tmp_path)
    assert (
        done.code == 2 and says in done.err and done.err.count("Error: ") == 1 and not done.out
    ), done.err


def row(document: dict[str, Any], value: int) -> dict[str, Any]:
    return next(one for one in document["tried"] if one["value"] == value)


@pytest.mark.slow
def test_the_answer_agrees_with_predict(model: Path, kept: Path) -> None:
    unlimited = run(model, kept, "max_completion_length", "--gpus", "A100-40G", "--json")
    assert unlimited.code == 0 and unlimited.document["next"] is None, unlimited.err
    least, most = (unlimited.document["tried"][index]["peak_memory_bytes"] for index in (0, -1))
    assert least["high"] < most["low"]
    limit = ["--gpus", "A100-40G", "--memory-limit", f"{(least['high'] + most['low']) // 2}B"]
    done = run(model, kept, "max_completion_length", *limit, "--json")
    assert done.code == 0, done.err
    found = done.document
    surely, after = found["surely_fits"], found["next"]["value"]
    assert row(found, surely)["margin_bytes"]["low"] >= 0
    limits = {
        value: code
        for value, code in ((surely, 0), (found["may_fit"], 5), (after, 3))
        if value is not None
    }
    for value, code in limits.items():
        predicted = autotune(
            "predict",
            "--model",
            str(model),
            *LENGTHS,
            "--max-completion-length",
            str(value),
            *limit,
            "--json",
            cwd=kept,
            timeout=240,
            XDG_CACHE_HOME=str(kept),
        )
        assert predicted.code == code, (value, predicted.err)
        assert predicted.document["peak_memory_bytes"] == row(found, value)["peak_memory_bytes"]


@pytest.mark.slow
def test_no_value_fits_and_no_value_has_an_effect(model: Path, kept: Path) -> None:
    done = run(
        model,
        kept,
        "max_completion_length",
        "--gpus",
        "A100-40G",
        "--memory-limit",
        "100M",
        "--json",
    )
    assert done.code == 3 and done.document["surely_fits"] is None, done.err
    refused = run(model, kept, "gradient_accumulation_steps", "--gpus", "A100-40G")
    assert refused.code == 2 and "takes less memory" in refused.err


@pytest.mark.slow
def test_the_cheapest_hardware(
    model: Path,
    kept: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "prices.yaml").write_text("currency: USD\nH100: 2.5\nA100-40G: 1.1\nL4: 0.5\n")
    asked = ["solve", "gpus", "--price", "prices.yaml", "--model", str(model), *LENGTHS, "--json"]
    done = autotune(
        *asked,
        cwd=tmp_path,
        timeout=400,
        XDG_CACHE_HOME=str(kept),
    )
    assert done.code == 0, done.err
    found = done.document
    assert found["cheapest_per_hour"] == "L4" and [one["gpus"] for one in found["offers"]] == [
        "L4",
        "A100-40G",
        "H100",
    ]
    for one in found["offers"]:
        assert one["fits"] is True and one["change"] == {}
        cost = one["seconds_per_step"]["value"] * one["price_per_hour"] / 3600
        assert one["cost_per_step"]["value"] == pytest.approx(cost, rel=0.02)
    cheapest = min(found["offers"], key=lambda one: one["cost_per_step"]["value"])
    assert found["cheapest_per_step"] == cheapest["gpus"]


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_only(model: Path, kept: Path) -> None:
    asked = ["predict", "--model", str(model), *LENGTHS, "--gpus", "A100-40G"]
    terminal = seen(
        *asked,
        cwd=kept,
        columns=120,
        XDG_CACHE_HOME=str(kept),
    )
    assert "the training step is traced" in terminal
    piped = autotune(
        *asked,
        cwd=kept,
        timeout=240,
        XDG_CACHE_HOME=str(kept),
    )
    assert "is traced" not in piped.out + piped.err and piped.code == 0


@pytest.mark.slow
def test_the_global_batch_follows_from_its_parts(model: Path, kept: Path) -> None:
    parts = ["--set", "per_device_train_batch_size=4", "--set", "gradient_accumulation_steps=3"]
    asked = ["predict", "--model", str(model), *LENGTHS[:-2], "--gpus", "2xA100-40G", *parts]
    done = autotune(
        *asked,
        cwd=kept,
        timeout=240,
        XDG_CACHE_HOME=str(kept),
    )
    assert done.code == 0 and "global batch 24" in done.out, done.err
    both = autotune(*asked, "--global-batch", "64", cwd=kept, timeout=60)
    assert both.code == 2 and "64" in both.err
