"""Settings that the user's shell exports: held like those of --hold, since the final run has them too."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from autotune.core.hardware import Hardware
from autotune.core.space import SearchSpace
from autotune.frameworks.trl.topology import ALLOCATOR, OTHER_ALLOCATOR
from autotune.request.flags import Flags


def with_exported(
    flags: Flags, space: SearchSpace, settings: Collection[str], hardware: Hardware, ours: Mapping[str, str] = os.environ
) -> tuple[Flags, list[str]]:
    """Return the flags with the exported allocator settings held, and a note; flags that name them win.

    Only for GPUs of this machine: elsewhere another shell starts the run.
    """
    value = ours.get(OTHER_ALLOCATOR) or ours.get(ALLOCATOR)
    known = ALLOCATOR in space or ALLOCATOR in settings
    named = any(text.partition("=")[0].strip() == ALLOCATOR for text in (*flags.hold, *flags.search, *flags.set, *flags.unknown))
    if not value or not known or named or hardware.kind != "cuda" or not hardware.here:
        return flags, []
    note = f"{ALLOCATOR}={value} is exported here, and so held: --hold {ALLOCATOR}=null leaves it out"
    return flags.replace(hold=(*flags.hold, f"{ALLOCATOR}={value}")), [note]
