"""Remedies under the names and flags of the framework whose log is read."""

from __future__ import annotations

import pytest

from autotune import frameworks
from autotune.diagnosis import diagnose
from autotune.diagnosis.log_framework import DEFAULT_REMEDY_METHOD, LogFramework
from autotune.failures.remedy_table import BY_CAUSE, BY_ROW
from autotune.frameworks.launch_kinds import LaunchKind, launch_kinds

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total"
    " capacity of 79.15 GiB of which 1.2 GiB is free. Of the allocated memory 70.5 GiB is allocated"
    " by PyTorch, and 1.0 GiB is reserved by PyTorch but unallocated."
)


def log(package: str, command: str = "") -> str:
    frame = f'  File "/opt/{package}/worker.py", line 400, in update'
    return "\n".join(
        [
            command,
            "Traceback (most recent call last):",
            frame,
            "    loss.backward()",
            OUT_OF_MEMORY,
            "",
        ]
    )


@pytest.mark.parametrize(
    ("package", "command", "framework", "settings"),
    [
        (
            "trl/trainer",
            "",
            None,
            ("per_device_train_batch_size", "gradient_checkpointing", "max_completion_length"),
        ),
        (
            "verl/workers",
            "",
            "verl",
            (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                "actor_rollout_ref.model.enable_gradient_checkpointing",
                "data.max_response_length",
            ),
        ),
        (
            "swift/trainers",
            "",
            "swift",
            (
                "--per_device_train_batch_size",
                "--gradient_checkpointing",
                "--max_completion_length",
            ),
        ),
        (
            "openrlhf/trainer",
            "",
            "openrlhf",
            (
                "--train.micro_batch_size",
                "--actor.gradient_checkpointing_enable",
                "--rollout.max_new_tokens",
            ),
        ),
        (
            "openrlhf/trainer",
            "python -m openrlhf.cli.train_ppo_ray --micro_train_batch_size 8",
            "openrlhf",
            (
                "--micro_train_batch_size",
                "--gradient_checkpointing",
                "--generate_max_len",
            ),
        ),
        (
            "orz/ppo",
            "",
            "open-reasoner-zero",
            ("--packing_max_len", "--gradient_checkpointing", "--generate_max_len"),
        ),
        (
            "slime/backends",
            "",
            "slime",
            ("--max_tokens_per_gpu", "--recompute_granularity", "--rollout_max_response_len"),
        ),
        (
            "nemo_rl/models",
            "",
            "nemo-rl",
            (
                "policy.train_micro_batch_size",
                "policy.dtensor_cfg.activation_checkpointing",
                "policy.generation.max_new_tokens",
            ),
        ),
    ],
)
def test_advice_in_the_logs_own_words(
    package: str,
    command: str,
    framework: str | None,
    settings: tuple[str, ...],
) -> None:
    diagnosis = diagnose(log(package, command))
    assert (diagnosis.framework, diagnosis.cause) == (framework, "activations")
    assert tuple(name for advice in diagnosis.remedies for name in advice.change) == tuple(
        name if framework != "open-reasoner-zero" else name.removeprefix("--") for name in settings
    )


@pytest.mark.parametrize(
    ("package", "command", "length"),
    [
        ("trl/trainer", "trl sft --config sft.yaml", "max_length"),
        (
            "transformers",
            '[rank0]:   File "/opt/trl/trainer/dpo_trainer.py", line 9, in compute_loss',
            "max_length",
        ),
        ("transformers", "INFO: config: SFTConfig(max_length=4096)", "max_length"),
        ("transformers", "python trl/scripts/kto.py", "max_length"),
        (
            "trl/trainer",
            '  File "/opt/trl/trainer/online_dpo_trainer.py", line 9, in training_step',
            "max_new_tokens",
        ),
        (
            "trl/trainer",
            '  File "/opt/trl/trainer/ppo_trainer.py", line 9, in train',
            "response_length",
        ),
        ("swift/trainers", "swift sft --model x", "--max_length"),
        ("swift/trainers", "swift rlhf --rlhf_type grpo", "--max_completion_length"),
        ("verl/workers", "RayPPOTrainer.fit", "data.max_response_length"),
    ],
)
def test_the_length_is_that_of_the_method(
    package: str,
    command: str,
    length: str,
) -> None:
    diagnosis = diagnose(log(package, command))
    assert diagnosis.cause == "activations"
    assert [name for advice in diagnosis.remedies for name in advice.change][2] == length


def test_a_method_without_generation_is_advised_nothing_about_an_engine() -> None:
    texts = (
        log("trl/trainer", command).replace("loss.backward()", "self.optimizer.step()")
        for command in ("", "trl sft")
    )
    with_engine, without = (
        [name for remedy in diagnose(text).remedies for name in remedy.change] for text in texts
    )
    assert (
        "vllm_gpu_memory_utilization" in with_engine
        and without
        and not any("vllm" in name for name in without)
    )


@pytest.mark.parametrize(
    "kind",
    [kind for kind in launch_kinds() if not kind.only_logs],
    ids=lambda kind: kind.framework,
)
def test_every_translated_setting_is_one_of_the_frameworks(kind: LaunchKind) -> None:
    """Outputs are no settings of a candidate: they are in the row's list of what is kept."""
    fields = frameworks.trainer(kind.framework, DEFAULT_REMEDY_METHOD).fields()
    names = {
        name
        for name in kind.remedies.values()
        if name is not None and not name.startswith(kind.kept)
    }
    assert names <= fields.keys(), names - fields.keys()


def test_every_translation_belongs_to_a_remedy() -> None:
    settings = {
        remedy.setting
        for table in (BY_CAUSE, BY_ROW)
        for remedies in table.values()
        for remedy in remedies
    }
    elsewhere = {
        remedy.elsewhere
        for table in (BY_CAUSE, BY_ROW)
        for remedies in table.values()
        for remedy in remedies
    }
    for kind in launch_kinds():
        translated = {*kind.remedies, *kind.remedy_values, *kind.remedy_reasons}
        assert translated <= settings | elsewhere, (
            kind.framework,
            translated - settings - elsewhere,
        )


@pytest.mark.parametrize(
    "kind", [kind for kind in launch_kinds() if kind.in_logs], ids=lambda kind: kind.framework
)
def test_no_cause_is_left_without_a_remedy(kind: LaunchKind) -> None:
    """Except for gathering under ZeRO, which TRL alone does for generation."""
    framework = LogFramework()
    framework.feed(kind.in_logs[0])
    without = {
        cause
        for cause, remedies in BY_CAUSE.items()
        if remedies and not framework.translated(remedies)
    }
    assert not without
