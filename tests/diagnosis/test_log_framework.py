"""Remedies under the names and flags of the framework whose log is read."""

from __future__ import annotations

import pytest

from autotune import frameworks
from autotune.diagnosis import diagnose
from autotune.diagnosis.log_framework import METHOD, LogFramework
from autotune.failures.remedies import BY_CAUSE, BY_ROW
from autotune.frameworks.launch_commands import LaunchKind, launch_kinds

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
    "1.2 GiB is free. "
    "Of the allocated memory 70.5 GiB is allocated by PyTorch, and 5.0 GiB is reserved by PyTorch but unallocated."
)


def log(package: str, command: str = "") -> str:
    frame = f'  File "/opt/{package}/worker.py", line 400, in update'
    return "\n".join([command, "Traceback (most recent call last):", frame, "    loss.backward()", OUT_OF_MEMORY, ""])


@pytest.mark.parametrize(
    ("package", "command", "framework", "settings"),
    [
        ("trl/trainer", "", None, ("per_device_train_batch_size", "gradient_checkpointing", "max_completion_length")),
        ("verl/workers", "", "verl", (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "actor_rollout_ref.model.enable_gradient_checkpointing", "data.max_response_length",
        )),
        ("swift/trainers", "", "swift", (
            "--per_device_train_batch_size", "--gradient_checkpointing", "--max_completion_length",
        )),
        ("openrlhf/trainer", "", "openrlhf", (
            "--train.micro_batch_size", "--actor.gradient_checkpointing_enable", "--rollout.max_new_tokens",
        )),
        ("openrlhf/trainer", "python -m openrlhf.cli.train_ppo_ray --micro_train_batch_size 8", "openrlhf", (
            "--micro_train_batch_size", "--gradient_checkpointing", "--generate_max_len",
        )),
        ("orz/ppo", "", "open-reasoner-zero", ("--packing_max_len", "--gradient_checkpointing", "--generate_max_len")),
    ],
)  # fmt: skip
def test_advice_in_the_logs_own_words(package: str, command: str, framework: str | None, settings: tuple[str, ...]) -> None:
    found = diagnose(log(package, command))
    assert (found.framework, found.cause) == (framework, "activations")
    assert tuple(name for advice in found.remedies for name in advice.change) == tuple(
        name if framework != "open-reasoner-zero" else name.removeprefix("--") for name in settings
    )


@pytest.mark.parametrize("kind", launch_kinds(), ids=lambda kind: kind.framework)
def test_every_translated_setting_is_one_of_the_frameworks(kind: LaunchKind) -> None:
    """Outputs are no settings of a candidate: they are in the row's list of what is kept."""
    known = frameworks.trainer(kind.framework, METHOD).fields()
    names = {name for name in kind.remedies.values() if name is not None and not name.startswith(kind.kept)}
    assert names <= known.keys(), names - known.keys()


def test_every_translation_belongs_to_a_remedy() -> None:
    settings = {name for table in (BY_CAUSE, BY_ROW) for found in table.values() for one in found for name in one.change}
    elsewhere = {one.elsewhere for table in (BY_CAUSE, BY_ROW) for found in table.values() for one in found}
    for kind in launch_kinds():
        named = {*kind.remedies, *kind.remedy_values, *kind.remedy_reasons}
        assert named <= settings | elsewhere, (kind.framework, named - settings - elsewhere)


@pytest.mark.parametrize("kind", [kind for kind in launch_kinds() if kind.in_logs], ids=lambda kind: kind.framework)
def test_no_cause_is_left_without_a_remedy(kind: LaunchKind) -> None:
    """Except for gathering under ZeRO, which TRL alone does for generation."""
    framework = LogFramework()
    framework.feed(kind.in_logs[0])
    without = {cause for cause, remedies in BY_CAUSE.items() if remedies and not framework.translated(remedies)}
    assert not without
