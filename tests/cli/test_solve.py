"""`autotune solve` from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Done, autotune, shape_only
from tests.cli.pseudo_terminal import terminal_output

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


pytestmark = pytest.mark.usefixtures("light_environment")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_only(tmp_path_factory.mktemp("shape") / "model", **SMALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(model: Path, cache: Path, *arguments: str) -> Done:
    flags = ["solve", *arguments, "--model", str(model), *LENGTHS]
    return autotune(
        *flags,
        cwd=cache,
        timeout=400,
        XDG_CACHE_HOME=str(cache),
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
    return next(entry for entry in document["tried"] if entry["value"] == value)


@pytest.mark.slow
def test_the_answer_agrees_with_predict(cache: Path) -> None:
    """The model's steps come with the package; the test below traces a model of its own."""
    model = Path("Qwen2.5-0.5B")
    unlimited = run(model, cache, "max_completion_length", "--gpus", "A100-40G", "--json")
    assert unlimited.code == 0 and unlimited.document["next"] is None, unlimited.err
    least, largest = (unlimited.document["tried"][index]["peak_memory_bytes"] for index in (0, -1))
    assert least["high"] < largest["low"]
    limit = ["--gpus", "A100-40G", "--memory-limit", f"{(least['high'] + largest['low']) // 2}B"]
    done = run(model, cache, "max_completion_length", *limit, "--json")
    assert done.code == 0, done.err
    document = done.document
    surely, after = document["surely_fits"], document["next"]["value"]
    assert row(document, surely)["margin_bytes"]["low"] >= 0
    limits = {
        value: code
        for value, code in ((surely, 0), (document["may_fit"], 5), (after, 3))
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
            cwd=cache,
            timeout=240,
            XDG_CACHE_HOME=str(cache),
        )
        assert predicted.code == code, (value, predicted.err)
        assert predicted.document["peak_memory_bytes"] == row(document, value)["peak_memory_bytes"]


@pytest.mark.slow
def test_no_value_fits_and_no_value_has_an_effect(model: Path, cache: Path) -> None:
    done = run(
        model,
        cache,
        "max_completion_length",
        "--gpus",
        "A100-40G",
        "--memory-limit",
        "100M",
        "--json",
    )
    assert done.code == 3 and done.document["surely_fits"] is None, done.err
    refused = run(model, cache, "gradient_accumulation_steps", "--gpus", "A100-40G")
    assert refused.code == 2 and "takes less memory" in refused.err


@pytest.mark.slow
def test_the_cheapest_hardware(
    model: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "prices.yaml").write_text("currency: USD\nH100: 2.5\nA100-40G: 1.1\nL4: 0.5\n")
    flags = ["solve", "gpus", "--price", "prices.yaml", "--model", str(model), *LENGTHS, "--json"]
    done = autotune(
        *flags,
        cwd=tmp_path,
        timeout=400,
        XDG_CACHE_HOME=str(cache),
    )
    assert done.code == 0, done.err
    document = done.document
    assert document["cheapest_per_hour"] == "L4" and [
        offer["gpus"] for offer in document["offers"]
    ] == [
        "L4",
        "A100-40G",
        "H100",
    ]
    for offer in document["offers"]:
        assert offer["fits"] is True and offer["change"] == {}
        cost = offer["seconds_per_step"]["value"] * offer["price_per_hour"] / 3600
        assert offer["cost_per_step"]["value"] == pytest.approx(cost, rel=0.02)
    # The speed of an L4 was never compared with a measured run, so it is not ranked by it.
    compared = [offer for offer in document["offers"] if offer["gpus"] != "L4"]
    cheapest = min(compared, key=lambda offer: offer["cost_per_step"]["value"])
    assert document["cheapest_per_step"] == cheapest["gpus"]


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_only(model: Path, cache: Path) -> None:
    flags = ["predict", "--model", str(model), *LENGTHS, "--gpus", "A100-40G"]
    terminal = terminal_output(
        *flags,
        cwd=cache,
        columns=120,
        XDG_CACHE_HOME=str(cache),
    )
    assert "tracing the training step" in terminal
    piped = autotune(
        *flags,
        cwd=cache,
        timeout=240,
        XDG_CACHE_HOME=str(cache),
    )
    assert "tracing" not in piped.out and piped.code == 0


@pytest.mark.slow
def test_the_global_batch_follows_from_its_parts(model: Path, cache: Path) -> None:
    parts = ["--set", "per_device_train_batch_size=4", "--set", "gradient_accumulation_steps=3"]
    flags = ["predict", "--model", str(model), *LENGTHS[:-2], "--gpus", "2xA100-40G", *parts]
    done = autotune(
        *flags,
        cwd=cache,
        timeout=240,
        XDG_CACHE_HOME=str(cache),
    )
    assert done.code == 0 and "global batch 24" in done.out, done.err
    contradiction = autotune(*flags, "--global-batch", "64", cwd=cache, timeout=60)
    assert contradiction.code == 2 and "64" in contradiction.err
