"""Variables of the shell -> HeldSetting: the final run has them as well."""

from __future__ import annotations

import os
from collections.abc import Mapping

from autotune.frameworks.trl.settings import ALLOCATOR_VARIABLE, NEWER_ALLOCATOR_VARIABLE
from autotune.request.assignments import parse_value
from autotune.request.origins import HeldSetting, Origin, Source
from autotune.request.values import UserFile


def sets_allocator(file: UserFile | None) -> bool:
    """Return True if the user's file sets the variables itself, whatever the shell exports: TRL's
    block `env`, or an export of the launch script.
    """
    if file is None:
        return False
    variables = file.config.rest.get("env")
    names = set(variables) if isinstance(variables, Mapping) else set()
    if file.launch is not None:
        names.update(file.launch.environment)
    return bool(names & {ALLOCATOR_VARIABLE, NEWER_ALLOCATOR_VARIABLE})


def exported_allocator(variables: Mapping[str, str] = os.environ) -> HeldSetting | None:
    """Return the settings of torch's allocator, under the name that vLLM reads too.

    torch prefers the newer name of the variable. None: neither is exported.
    """
    for name in (NEWER_ALLOCATOR_VARIABLE, ALLOCATOR_VARIABLE):
        text = variables.get(name)
        if text and text.strip():
            origin = Origin(source=Source.VARIABLE, place=name)
            return HeldSetting(
                name=ALLOCATOR_VARIABLE,
                value=parse_value(text),
                origin=origin,
            )
    return None
