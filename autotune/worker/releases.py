"""Versions of installed packages, read from their metadata without an import."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable

LATEST = (sys.maxsize,)  # release of a package whose version is unknown


@functools.cache
def version(package: str) -> str | None:
    """Return the version of a package, which does not change under the process that imported it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        number = version(package)
        if number is not None:
            installed[package] = number
    return installed


def release(package: str) -> tuple[int, ...]:
    """Return the release numbers of an installed package; LATEST if it is not installed."""
    return release_numbers(version(package) or "")


def release_numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version: `1.16.0.dev0` as (1, 16); 1.0 equals 1."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        return LATEST
    numbers = [int(part) for part in match[0].split(".")]
    while numbers[-1:] == [0]:
        numbers.pop()
    return tuple(numbers)
