"""`autotune predict --check`: a prediction beside the same configuration on emulated cards."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import constant
from autotune.core.measurement import Failure, Outcome
from autotune.core.units import GIB
from autotune.report.check_text import check_document
from tests.cli.command import autotune, shape_only
from tests.report.answers import answered
from tests.report.test_forecast import PREDICTION


def test_both_figures_and_their_difference() -> None:
    trial = answered(900).answer.trials[0].measurement
    memory = replace(
        trial.memory,
        peak_bytes=round(PREDICTION.peak_memory_bytes.value * 0.8),
        torch_allocated_bytes=None,
    )
    check = check_document(
        PREDICTION,
        replace(
            trial,
            memory=memory,
            emulated=True,
            caveats=("for a test",),
        ),
    )
    rows = {row["name"]: row for row in check["rows"]}
    assert rows["peak"]["difference"] == pytest.approx(0.25, abs=0.001)
    assert "torch allocated" not in rows  # unknown there
    assert (
        check["basis"] == "emulated"
        and check["outcome"] == "ok"
        and check["caveats"] == ["for a test"]
    )


def test_an_emulated_error_is_part_of_the_document() -> None:
    trial = answered(900).answer.trials[0].measurement
    failed = replace(
        trial,
        outcome=Outcome.OOM_BACKWARD,
        failure=Failure(evidence="CUDA out of memory", phase="backward"),
    )
    check = check_document(PREDICTION, failed)
    assert (check["outcome"], check["evidence"]) == (failed.outcome.value, "CUDA out of memory")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--gpus", "2xZ9000"), 2, "Unknown GPU 'Z9000'"),
        (("--gpus", "cpu"), 2, "names no card that could be emulated"),
        (
            ("--gpus", "A100-40G", "--unknown", "num_generations=4,8"),
            2,
            "--check emulates one configuration",
        ),
        (("--gpus", "A100-40G", "--python", sys.executable), 4, "no CUDA build"),
        (("--gpus", "A100-40G", "--python", "/nowhere/python"), 4, "is no program"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_traced(
    arguments: tuple[str, ...],
    code: int,
    reason: str,
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda and "no CUDA build" in reason:
        pytest.skip("this environment has a CUDA build")
    model = shape_only(tmp_path / "model", hidden_size=64, num_hidden_layers=2)
    done = autotune("predict", "--model", str(model), "--check", *arguments, cwd=tmp_path)
    assert (
        (done.code, done.out) == (code, "") and reason in done.err and "Traceback" not in done.err
    )


@pytest.mark.slow
def test_one_configuration_on_emulated_cards(python: str, tmp_path: Path) -> None:
    model = shape_only(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        vocab_size=32000,
    )
    lengths = (
        "--max-prompt-length",
        "64",
        "--max-completion-length",
        "16",
        "--global-batch",
        "8",
        "--num-generations",
        "4",
    )
    done = autotune(
        "predict",
        "--model",
        str(model),
        "--gpus",
        "A100-40G",
        "--python",
        python,
        "--check",
        "--json",
        *lengths,
        cwd=tmp_path,
        timeout=300,
    )
    check = json.loads(done.out)["check"]
    rows = {row["name"]: row for row in check["rows"]}
    assert check["outcome"] == "ok" and rows["peak"]["emulated_bytes"] < GIB * 4
    assert abs(rows["torch allocated"]["difference"]) < 0.02


@pytest.mark.slow
def test_asynchronous_grpo_on_emulated_cards(python: str, tmp_path: Path) -> None:
    """TRL's own trainer and torch's allocator; the attention kernel, which the hub has, is one
    that allocates alone.
    """
    model = shape_only(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        vocab_size=32000,
    )
    lengths = (
        "--max-prompt-length",
        "64",
        "--max-completion-length",
        "192",
        "--num-generations",
        "4",
    )
    rows = ("--set", "token_budget=2048", "--set", "gradient_accumulation_steps=2")
    kernels = Path(__file__).with_name("hub_kernels")
    done = autotune(
        "predict",
        "--model",
        str(model),
        "--method",
        "async-grpo",
        "--gpus",
        "2xH100",
        "--python",
        python,
        "--check",
        "--json",
        *lengths,
        *rows,
        cwd=tmp_path,
        timeout=400,
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), str(kernels)]),
    )
    check = json.loads(done.out)["check"]
    parts = {row["name"]: row for row in check["rows"]}
    assert check["outcome"] == "ok", check
    assert abs(parts["torch allocated"]["difference"]) < 0.03
    # The probe's weights go nowhere: it has no communicator with a server.
    peak = parts["peak"]["predicted_bytes"] - constant("nccl_mib_two_nvlink").value * 2**20
    assert abs(peak / parts["peak"]["emulated_bytes"] - 1) < 0.06
