"""slime's command line and rules, against its own options and checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.core.measurement import ProbePlan
from tests.frameworks.stand_ins import asked, refusal

REPOSITORY = Path(os.environ.get("AUTOTUNE_FRAMEWORKS") or "absent") / "slime" / "repo"
ACCEPTS = Path(__file__).parent / "accepts" / "slime_arguments.py"
needs_repository = pytest.mark.skipif(
    not REPOSITORY.is_dir(), reason="needs a clone in .venvs/frameworks/slime/repo"
)


def words(plan: ProbePlan | None = None, **about: Any) -> list[str]:
    trainer, candidate, task = asked("slime", **about)
    return list(trainer.launch(candidate, task, plan).argv[2:])  # type: ignore[attr-defined]


def understood(folder: Path, given: list[str]) -> subprocess.CompletedProcess[str]:
    """Return the result of its parser and `slime_validate_args`; weights are an empty folder."""
    local = [str(folder) if word == "Qwen/Qwen2.5-7B" else word for word in given]
    command = [sys.executable, str(ACCEPTS), str(REPOSITORY), *local]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_megatron_gets_the_models_shape_again() -> None:
    """The same options as in slime's scripts/models/qwen2.5-7B.sh, but for the rounded
    vocabulary.
    """
    line = " ".join(words())
    for option in (
        "--swiglu",
        "--num-layers 28",
        "--hidden-size 3584",
        "--ffn-hidden-size 18944",
        "--num-attention-heads 28",
        "--num-query-groups 4",
        "--add-qkv-bias",
        "--normalization RMSNorm",
        "--norm-epsilon 1e-06",
        "--rotary-base 1000000",
        "--untie-embeddings-and-output-weights",
        "--hf-checkpoint Qwen/Qwen2.5-7B",
    ):
        assert option in line, option
    assert "--qk-layernorm" not in line
    assert "--qk-layernorm" in words(model="Qwen3-4B")


def test_gpus_are_shared_or_split() -> None:
    together, apart = words(settings={"colocate": True}), words()
    assert "--colocate" in together and "--rollout-num-gpus" not in together
    assert (
        apart[apart.index("--rollout-num-gpus") + 1]
        == "4"
        == apart[apart.index("--actor-num-gpus-per-node") + 1]
    )
    shared = words(settings={"tensor_model_parallel_size": 2})
    assert "--sequence-parallel" in shared and "--sequence-parallel" not in words(
        settings={"tensor_model_parallel_size": 1}
    )


def test_it_is_measured_and_not_predicted() -> None:
    trainer, candidate, task = asked("slime")
    with pytest.raises(CannotPredict, match="Megatron, whose memory is not predicted"):
        trainer.compose(candidate, task)


REFUSED = [
    ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "exclude each other"),
    ({"over_sampling_batch_size": 16}, "over_sampling_batch_size=16 is less"),
    ({"use_rollout_logprobs": True, "use_tis": True}, "exclude each other"),
    ({"update_weight_transport": "disk"}, "needs update_weight_disk_dir"),
    ({"update_weight_mode": "delta"}, "needs update_weight_transport=disk"),
    (
        {
            "update_weight_mode": "delta",
            "update_weight_transport": "disk",
            "update_weight_disk_dir": "/d",
            "colocate": True,
        },
        "with colocate",
    ),
    ({"balance_by_flops": True, "use_dynamic_batch_size": False}, "needs use_dynamic_batch_size"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_what_slime_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], text: str
) -> None:
    said = refusal("slime", settings=settings)
    assert said is not None and text in said


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"tensor_model_parallel_size": 8, "colocate": True},
            "4 of keys, are not divisible by tensor_model_parallel_size=8",
        ),
        (
            {"context_parallel_size": 3},
            "are not divisible by tensor x pipeline x context parallelism, 3",
        ),
        ({"rollout_num_gpus_per_engine": 3}, "not divisible by rollout_num_gpus_per_engine=3"),
        ({"rollout_num_gpus": 8}, "Megatron and SGLang use 9 GPUs"),
    ],
)
def test_what_megatron_and_ray_refuse_is_refused(settings: dict[str, Any], text: str) -> None:
    said = refusal("slime", settings=settings)
    assert said is not None and text in said


@needs_repository
@pytest.mark.slow
def test_its_own_parser_takes_what_is_written_and_refuses_what_is_refused(tmp_path: Path) -> None:
    for plan in (None, ProbePlan()):
        done = understood(tmp_path, words(plan))
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        assert (found["rollout_batch_size"], found["global_batch_size"], found["colocate"]) == (
            32,
            256,
            False,
        )
        assert (found["num_rollout"] is None) is (plan is None)
    for settings, _ in REFUSED:
        done = understood(tmp_path, words(settings=settings))
        assert done.returncode != 0 and (
            "AssertionError" in done.stderr or "ValueError" in done.stderr
        ), settings
