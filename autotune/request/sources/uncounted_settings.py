"""Settings of a launch that decide memory, and that no prediction counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from autotune.core.user_script import LaunchScript
from autotune.frameworks.base import Field
from autotune.frameworks.launch_kinds import LaunchKind

UNCOUNTED = re.compile(
    r"(?:^|[._])(?:freeze\w*|trainable_parameters\w*|target_modules|exclude_modules|target_regex"
    r"|modules_to_save|use_dora|fsdp|optimizer|optim|galore\w*|use_galore|lisa_\w+"
    r"|context_parallel\w*|pipeline_parallel\w*|fp8\w*)$"
)
"""Settings of any framework that decide memory: of those that are not read, none counts."""

DIVIDES_GPUS = re.compile(r"(?:^|[._])n(?:um)?_(?:\w+_)?gpus(?:_per_node)?$")
"""Settings of a project's own that give GPUs to a part of the training."""

NEVER_COUNTED = re.compile(r"(?:(?:target|exclude)_modules|optim\.optimizer)$")
"""An adapter is predicted at all linear layers, though tables have these settings."""

WITHOUT_EFFECT = frozenset(
    "null none false 0 1 all-linear all [all-linear] [] adamw adamw_torch adamw_torch_fused".split()
)
"""Texts of such settings in small letters with which nothing is missing."""


def uncounted(
    launch: LaunchScript,
    fields: Mapping[str, Field],
    kind: LaunchKind,
) -> Iterator[str]:
    """Yield the settings that decide memory, and that no prediction counts: those of the
    framework's row, and those whose names say it.
    """
    model = launch.stated.get(kind.model)
    for name, stated in launch.stated.items():
        text = stated.text or "null"
        if stated.text is None:  # a switch
            text = "true"
        if name in kind.uncounted:
            texts = [*kind.uncounted[name]]
            if model is not None and model.text:
                texts.append(model.text.lower())
        elif _is_uncounted(name, fields):
            texts = [*WITHOUT_EFFECT]
        else:
            continue
        if text.lower() not in texts:
            yield f"{name}={text} (line {stated.line}) is not counted, and may change the memory"


def _is_uncounted(
    name: str,
    fields: Mapping[str, Field],
) -> bool:
    """Return True for a name that says a part of memory, and that no table has."""
    if not UNCOUNTED.search(name):
        return False
    return name not in fields or NEVER_COUNTED.search(name) is not None
