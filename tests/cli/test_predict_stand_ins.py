"""`autotune predict` for frameworks that are not installed: a stand-in step is traced and
reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import autotune, shape_only
from tests.cli.test_predict import assert_contract

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 32000}
LENGTHS = ("--max-prompt-length", "128", "--max-completion-length", "128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_only(tmp_path_factory.mktemp("shape") / "model", **SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize(
    ("framework", "method"), [("verl", "grpo"), ("openrlhf", "ppo"), ("open-reasoner-zero", "ppo")]
)
def test_a_framework_that_is_not_here_is_predicted(
    model: Path,
    tmp_path: Path,
    framework: str,
    method: str,
) -> None:
    flags = [
        "predict",
        "--framework",
        framework,
        "--method",
        method,
        "--model",
        str(model),
        "--gpus",
        "2xH100",
        *LENGTHS,
        "--json",
    ]
    done = autotune(
        *flags,
        cwd=tmp_path,
        timeout=400,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.code == 0, done.err
    document = done.document
    assert_contract(document)
    assert document["basis"] == "generic" and document["fits"] is True
    assert any("a generic step replaces" in assumption for assumption in document["assumptions"])
    assert any("process" in assumption for assumption in document["assumptions"])
    peak = document["torch_peak_allocated_bytes"]
    assert peak["high"] > peak["value"] > peak["low"]


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_a_search_by_prediction_ends_with_its_budget(model: Path, tmp_path: Path) -> None:
    flags = [
        "run",
        "--framework",
        "openrlhf",
        "--model",
        str(model),
        "--gpus",
        "2xA100-80G",
        "--budget",
        "1s",
        "--out",
        "out",
    ]
    done = autotune(
        *flags,
        "--json",
        cwd=tmp_path,
        timeout=400,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.code == 0, done.err
    counts = done.document["counts"]
    assert (
        done.document["stopped_by"] == "budget" and 0 < counts["predicted"] < counts["candidates"]
    )
    assert done.document["recommendation"]["files"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--set", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gp=4"),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        (("--set", "per_device_train_batch_size=4"), "per_device_train_batch_size"),
        (("--set", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"), "not divisible"),
        (("--set", "actor_rollout_ref.actor.use_dynamic_bsz=maybe"), "true or false"),
        (("--config", "train.yaml"), "--set"),
        (("--tuning", "qlora"), "--tuning lora or full"),
        (("--method", "dpo"), "grpo"),
        (("--gpus", "cpu"), "--gpus"),
    ],
)
def test_bad_input_contains_the_fix(
    model: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    done = autotune(
        "predict",
        "--framework",
        "verl",
        "--model",
        str(model),
        "--gpus",
        "2xH100",
        *arguments,
        cwd=tmp_path,
    )
    assert done.code == 2, done.err
    assert message in done.err
