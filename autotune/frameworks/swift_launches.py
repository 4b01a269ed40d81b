"""Launches of ms-swift: names of all settings, GPUs, and a DeepSpeed file in place of a stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from autotune.core.user_script import LaunchScript
from autotune.frameworks.base import Settings
from autotune.frameworks.script_gpus import ScriptGpus, gpus_of_launcher, gpus_of_variables
from autotune.frameworks.trl.user_launch_files import read_deepspeed

STAGE_NAMES = {  # (ZeRO stage, number of offloaded parts) -> ms-swift's own name
    ("zero1", 0): "zero1",
    ("zero2", 0): "zero2",
    ("zero2", 1): "zero2_offload",
    ("zero3", 0): "zero3",
    ("zero3", 2): "zero3_offload",
}


class SettingNames(msgspec.Struct, frozen=True):
    """`swift_names.json`, which `.ci/list_swift_names.py` writes."""

    version: str
    names: frozenset[str]


@cache
def all_names() -> frozenset[str]:
    listed = resources.files("autotune.frameworks").joinpath("swift_names.json").read_bytes()
    return msgspec.json.decode(listed, type=SettingNames).names


FORMER_STAGE = "default-"
"""Beginning of a stage's name in ms-swift 2: `default-zero2`."""


def with_named_stage(launch: LaunchScript) -> LaunchScript:
    """Return the launch with the name of a stage in place of a former one, or of a DeepSpeed file
    that is here.
    """
    stated = launch.stated.get("deepspeed")
    if stated is None or stated.text is None:
        return launch
    if stated.text.startswith(FORMER_STAGE):
        present = replace(stated, text=stated.text.removeprefix(FORMER_STAGE))
        return replace(launch, stated={**launch.stated, "deepspeed": present})
    if not stated.text.endswith(".json"):
        return launch
    for folder in (Path(), Path(launch.path).parent):
        file = folder / stated.text
        name = _stage_of(read_deepspeed(file).settings) if file.is_file() else None
        if name is not None:
            note = f"{stated.text} (line {stated.line}) is {name}, with DeepSpeed's own buckets"
            settings = {**launch.stated, "deepspeed": replace(stated, text=name)}
            return replace(launch, stated=settings, assumed=(*launch.assumed, note))
    return launch


def _stage_of(settings: Settings) -> str | None:
    """Return ms-swift's name of a ZeRO stage; None: it has none."""
    offloaded = [name for name in settings if name.startswith("offload_")]
    return STAGE_NAMES.get((str(settings.get("sharding")), len(offloaded)))


ONE_PROCESS = ScriptGpus(
    count=1,
    stated="NPROC_PER_NODE is not set: one process, with the model's layers on all that it sees",
)


def gpus_of_launch(launch: LaunchScript) -> ScriptGpus | None:
    """Return the processes of a launch, one for each GPU; without their number there is one."""
    processes = gpus_of_launcher(launch)
    if processes is not None:
        return processes
    if {"NPROC_PER_NODE", "NNODES"}.isdisjoint(launch.environment):
        return ONE_PROCESS
    return gpus_of_variables(launch, {"NPROC_PER_NODE": 1, "NNODES": 1})
