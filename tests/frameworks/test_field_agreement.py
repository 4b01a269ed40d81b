"""The written file trains as the user's own does: TRL's parser reads both, and every difference
is listed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.errors import IllegalConfiguration
from autotune.core.job import Task
from autotune.frameworks import trainer
from autotune.frameworks.trl.class_names import CLASS_PREFIXES
from autotune.frameworks.trl.field_list import fields, installed_defaults
from autotune.frameworks.trl.output_data import DATASET_SETTINGS
from autotune.frameworks.trl.written_settings import written_settings
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request

METHODS = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
NOT_TRAINED = {
    "use_cpu",
    "output_dir",
    "logging_dir",
    "run_name",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "accelerator_config",
    "env",
}
"""Fields that name places, those that TRL's parser turns into objects, and the one that this
test sets.
"""


def parsed(path: Path, method: str) -> dict[str, Any]:
    """Return every field as TRL's own parser yields it, on a CPU."""
    import trl
    from trl.scripts.utils import DatasetMixtureConfig

    prefix = CLASS_PREFIXES[method]
    script = trl.ScriptArguments
    if method in ("grpo", "rloo"):
        module = __import__(f"trl.scripts.{method}", fromlist=["x"])
        script = getattr(module, f"{prefix}ScriptArguments")
    kinds = (script, getattr(trl, f"{prefix}Config"), trl.ModelConfig, DatasetMixtureConfig)
    arguments = ["--config", str(path), "--use_cpu", "true", "--output_dir", "unused"]
    *read, _ = trl.TrlParser(kinds).parse_args_and_config(arguments, return_remaining_strings=True)
    return {
        field.name: getattr(part, field.name)
        for part in read
        for field in dataclasses.fields(part)
        if field.init
    }


def job_of(path: Path, method: str, **options: Any) -> tuple[Task, Any]:
    flags = Flags(
        config=str(path),
        method=method,
        gpus="H100",
        mode="predict",
        model="Qwen2.5-0.5B",
        **options,
    )
    request = parse_request(flags)
    return request.job.task, candidate_of_job(request)


def compared(
    path: Path,
    method: str,
    out: Path,
) -> tuple[dict[str, tuple[Any, Any]], dict[str, str]]:
    """Return the fields in which the two files differ for TRL, and the listed kind of each
    setting.
    """
    task, candidate = job_of(path, method)
    trainer("trl", method).write_files(candidate, task, out)
    written = out / "recommended.yaml"
    listed = {setting.name: setting.kind for setting in written_settings(task, written)}
    stated = yaml.safe_load(path.read_text()) or {}
    assert set(yaml.safe_load(written.read_text())) <= {
        *stated,
        *listed,
    }, "a written setting is not listed"
    before, after = parsed(path, method), parsed(written, method)
    return {
        name: (before[name], after[name])
        for name in before
        if name not in NOT_TRAINED and before[name] != after[name]
    }, listed


@pytest.mark.parametrize("method", METHODS)
def test_a_file_without_dtype_trains_in_trls_default(method: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nlearning_rate: 1e-6\n")
    task, candidate = job_of(path, method)
    assert (
        candidate.settings["dtype"]
        == installed_defaults(task.workload.python, method)["dtype"]
        == "float32"
    )
    differing, listed = compared(path, method, tmp_path / "out")
    assert differing.keys() <= {name for name, kind in listed.items() if kind == "changed"}
    assert not differing.keys() & {
        "dtype",
        "num_generations",
        "max_completion_length",
        "beta",
        "loss_type",
        "max_length",
    }


def test_auto_stays_and_is_predicted_in_the_checkpoints_precision(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\ndtype: auto\n")
    task, candidate = job_of(path, "grpo")
    assert candidate.settings["dtype"] == "bfloat16"
    trainer("trl").write_files(candidate, task, tmp_path / "out")
    assert yaml.safe_load((tmp_path / "out" / "recommended.yaml").read_text())["dtype"] == "auto"


def test_defaults_are_those_of_the_installed_release() -> None:
    """The source is parsed; TRL's own classes are the reference."""
    import sys

    import trl

    defaults = installed_defaults(Path(sys.executable), "grpo")
    for kind in (trl.GRPOConfig, trl.ModelConfig):
        for field in dataclasses.fields(kind):
            if field.name in defaults and isinstance(field.default, bool | int | float | str):
                assert defaults[field.name] == getattr(field.default, "value", field.default), (
                    field.name
                )


def another(name: str, facts: Any) -> object:
    """Return a value of the field that is not its default; None if the field's type has none."""
    if facts.choices:
        return next((choice for choice in facts.choices if choice != facts.default), None)
    if "bool" in facts.kinds:
        return not facts.default
    if "int" in facts.kinds:
        return (facts.default if isinstance(facts.default, int) else 3) + 1
    if "float" in facts.kinds:
        return (facts.default if isinstance(facts.default, float | int) else 0.25) / 2 or 0.125
    return None


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_field_arrives_as_it_was_given(method: str, tmp_path: Path) -> None:
    """One file per field, with a value other than the default. TRL itself refuses some of them
    alone.
    """
    tried, wrong = 0, dict[str, Any]()
    for name, facts in sorted(fields(method).items()):
        value = another(name, facts)
        if value is None or name in NOT_TRAINED or facts.owner == "mixture":
            continue
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"model_name_or_path": "Qwen/Qwen2.5-0.5B", name: value}))
        if not _accepted(path, method):
            continue
        try:
            differing, listed = compared(path, method, tmp_path / f"out-{name}")
        except IllegalConfiguration:  # it needs others beside it
            continue
        tried += 1
        unlisted = {
            field_name: values
            for field_name, values in differing.items()
            if listed.get(field_name) != "changed"
        }
        lost = (
            {name: differing[name]} if name in differing and name not in ALLOWED_TO_CHANGE else {}
        )
        if unlisted or lost:
            wrong[name] = {**unlisted, **lost}
    assert not wrong, wrong
    assert tried > 60


ALLOWED_TO_CHANGE = DATASET_SETTINGS
"""Settings of the dataset go with it: the written file names a filtered one, or a placeholder."""


def _accepted(path: Path, method: str) -> bool:
    try:
        parsed(path, method)
    except BaseException:  # argparse exits
        return False
    return True
