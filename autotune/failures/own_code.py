"""Place in the user's own code that raised an exception: a reward function, a collator, a callback.

A traceback begins in the user's script, goes on in installed packages, and comes back to code that
they were given. The innermost frame of the second kind is what the user can mend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autotune.failures.table import expand

_INSTALLED = re.compile(r"\A\S*(?:(?:site|dist)-packages/|/lib/python3|<frozen )")
_WORKER = re.compile(r"/autotune/(?:worker|emulator)\b")  # probes: installed or from a clone
_FRAMEWORK = re.compile(expand("${from_frameworks}"))  # from its clone
_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>\S+)', re.M)


def is_installed(file: str) -> bool:
    match = _INSTALLED.search(file) or _WORKER.search(file)
    return match is not None


def ends_in_a_package(frames: Sequence[str]) -> bool:
    """Return True if a package raised the exception, not the user's code or a function of the user
    that a package called.
    """
    if not frames or called_back(frames) is not None:
        return False
    innermost = frames[-1]
    file, _, _ = innermost.partition(":")
    return is_installed(file) or _FRAMEWORK.search(innermost) is not None


def called_back(frames: Sequence[str]) -> str | None:
    """Return the innermost function of the user that a package called; `frames` are
    `file:function source line`, innermost last.
    """
    places = []
    for frame in frames:
        file, _, call = frame.partition(":")
        function = call.partition(" ")[0]
        described = f"{function} in {file}"
        places.append((file, described))
    return _innermost_own(places)


def called_back_in(traceback: str) -> str | None:
    """Return the same of a traceback as Python prints it, with the number of the line."""
    places = []
    for frame in _FRAME.finditer(traceback):
        file, line, function = frame.group("file", "line", "function")
        described = f"{function} in {file}, line {line}"
        places.append((file, described))
    return _innermost_own(places)


def _innermost_own(places: Iterable[tuple[str, str]]) -> str | None:
    """Return the last place outside of packages that is behind one inside of them."""
    place = None
    in_package = False
    for file, described in places:
        if is_installed(file):
            in_package = True
        elif in_package:
            place = described
    return place
