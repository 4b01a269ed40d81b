"""Dependence of a failure on the candidate: an import error of the training script meets them all."""

from __future__ import annotations

import functools
import re

from autotune.core.measurement import Failure
from autotune.failures.patterns import read_table

IMPORT_CAUSE = "version"
_IMPORT_ERROR = re.compile(r"\b(?:ModuleNotFoundError|ImportError|PackageNotFoundError)\b")


def depends_on_candidate(failure: Failure) -> bool:
    """Return False for a failure that no other candidate can avoid."""
    if failure.cause != IMPORT_CAUSE or not _IMPORT_ERROR.search(failure.evidence):
        return True
    return _optional_packages().search(f"{failure.evidence}\n{failure.excerpt}") is not None


@functools.cache
def _optional_packages() -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in read_table("optional_packages", list[str]))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])")
