"""Positions of calls in the user's files, found on the stack while the script runs."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WORKER_FOLDER = str(Path(__file__).parents[1])
OWN_FILES = (__file__, str(Path(__file__).with_name("script_capture.py")))


@dataclass(frozen=True)
class CapturedCall:
    """Position of a call in a source file."""

    file: str
    line: int
    # first line, last line, first column, column after the last; None below Python 3.11
    span: tuple[int, int, int, int] | None = None
    maker: str | None = None  # class or module of the call if it is not in the user's own file


def caller(*further_files: str) -> CapturedCall:
    """Return the call by the nearest frame outside these files and the capture's."""
    frame: Any = sys._getframe()
    while frame.f_code.co_filename in (*OWN_FILES, *further_files):
        frame = frame.f_back
    return _call_of(frame)


def _call_of(frame: Any) -> CapturedCall:
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return CapturedCall(code.co_filename, frame.f_lineno)
    positions = list(code.co_positions())
    instruction = frame.f_lasti // 2  # an instruction takes two bytes
    span = positions[instruction]
    return CapturedCall(code.co_filename, frame.f_lineno, None if None in span else span)


def config_caller() -> tuple[CapturedCall | None, tuple[str, ...]]:
    """Return the user's call that made the configuration, and its `**mapping` names."""
    frame: Any = sys._getframe(1)
    while frame is not None and _constructs_config(frame.f_code):
        frame = frame.f_back
    # A library, such as a parser of flags, may have made it for the user.
    maker = None
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(WORKER_FOLDER):
            frame = frame.f_back
            continue
        owner = frame.f_locals.get("self")
        name = frame.f_globals.get("__name__") if owner is None else type(owner).__name__
        maker = f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        return None, ()
    place = replace(_call_of(frame), maker=maker)
    return place, () if maker else _expanded(frame, place)


def _constructs_config(code: types.CodeType) -> bool:
    """Return True for this file, and for constructors, generated ones included."""
    is_ours = code.co_filename in (*OWN_FILES, "<string>") or code.co_name == "translating"
    return is_ours or code.co_name in (
        "__post_init__",
        "__init__",
    )


def is_library(file: str) -> bool:
    """Return True for files of installed packages, of Python, and of this one."""
    return (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((sys.base_prefix + "/lib/python", "<frozen", WORKER_FOLDER))
    )


def _expanded(frame: Any, place: CapturedCall) -> tuple[str, ...]:
    """Return the keys of each `**name` in the call; `*` for expressions with unknown keys."""
    try:
        source = Path(place.file).read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError):
        return ("*",)
    names: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        last_line = node.end_lineno or node.lineno
        if node.lineno <= place.line <= last_line:
            for keyword in node.keywords:
                if keyword.arg is None:
                    names += _keys_of(keyword.value, frame)
    return tuple(names)


def _keys_of(expression: ast.expr, frame: Any) -> list[str]:
    """Return the keys of a mapping in this frame; `*` if they are unknown."""
    mapping = None
    if isinstance(expression, ast.Name):
        name = expression.id
        global_value = frame.f_globals.get(name)
        mapping = frame.f_locals.get(name, global_value)
    if not isinstance(mapping, Mapping):
        return ["*"]
    return [str(key) for key in mapping]
