"""Number of GPUs that a launch script is written for, by its settings or by its variables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.core.user_script import LaunchScript


@dataclass(frozen=True, kw_only=True)
class ScriptGpus:
    """GPUs that train by the script."""

    count: int
    stated: str  # what makes the number: `trainer.n_gpus_per_node=8 x trainer.nnodes=2`


def gpus_of_settings(launch: LaunchScript, defaults: Mapping[str, int]) -> ScriptGpus | None:
    """Return the product of these settings, some by default; None: the script states none."""
    texts = {}
    for name in defaults:
        if name in launch.stated:
            texts[name] = launch.stated[name].text or ""
    return _product(texts, defaults)


def gpus_of_variables(launch: LaunchScript, defaults: Mapping[str, int]) -> ScriptGpus | None:
    """Return the product of variables that the script sets for its command."""
    texts = {}
    for name in defaults:
        if name in launch.environment:
            texts[name] = launch.environment[name]
    return _product(texts, defaults)


LAUNCHED_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
"""Options of torchrun, accelerate and deepspeed."""

COUNTS_OF_LAUNCHER = (*LAUNCHED_PROCESSES, "nnodes")


def gpus_of_launcher(launch: LaunchScript) -> ScriptGpus | None:
    """Return the processes that an option of the launcher states: `torchrun --nproc_per_node 4`."""
    texts: dict[str, str] = {}
    options = [*launch.launcher, ""]
    for option, following in itertools.pairwise(options):
        flag, equals, value = option.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not equals:
            value = following
        if name in COUNTS_OF_LAUNCHER:
            texts[name] = value
    if texts.keys().isdisjoint(LAUNCHED_PROCESSES):
        return None
    return _product(texts, dict.fromkeys(texts, 1))


def _product(texts: Mapping[str, str], defaults: Mapping[str, int]) -> ScriptGpus | None:
    numbers = dict(defaults)
    for name, text in texts.items():
        if not (text.isascii() and text.isdigit() and int(text)):
            return None  # only a run of the script knows it
        numbers[name] = int(text)
    if not texts:
        return None
    stated = " x ".join(f"{name}={number}" for name, number in numbers.items())
    return ScriptGpus(count=math.prod(numbers.values()), stated=stated)
