"""Loader of search spaces (search_spaces/*.yaml) with validation.

A wheel contains the files inside the package; a clone has them next to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from autotune.core.errors import UnknownName
from autotune.core.space import Knob, SearchSpace
from autotune.core.yaml_document import Document, KeyPath, read_document

_PACKAGE = Path(__file__).resolve().parents[1]
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")


def folder() -> Path:
    """Return the folder of the shipped spaces."""
    shipped = _PACKAGE / "search_spaces"
    if shipped.is_dir():
        return shipped
    return _PACKAGE.parent / "search_spaces"


def names() -> tuple[str, ...]:
    """Return the names of the shipped spaces."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def load_space(name_or_path: str) -> SearchSpace:
    """Load a shipped space by name, or a file by path."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return read_space(Path(name_or_path))
    if name_or_path not in names():
        raise UnknownName("search space", name_or_path, names(), listing="autotune show spaces")
    return _read_shipped(folder() / f"{name_or_path}.yaml")


@cache
def _read_shipped(path: Path) -> SearchSpace:
    return read_space(path)


def read_space(path: Path) -> SearchSpace:
    """Read and validate a space file."""
    document = read_document(path)
    content = {"name": path.stem, **document.content}
    _refuse_unknown_keys(document, content, SearchSpace, ())
    for part in ("knobs", "remedies"):
        entries = content.get(part)
        if not isinstance(entries, list):
            continue
        for index, knob in enumerate(entries):
            if isinstance(knob, Mapping):
                _refuse_unknown_keys(document, knob, Knob, (part, index))
    try:
        space = msgspec.convert(content, SearchSpace)
    except msgspec.ValidationError as error:
        message = _PATH.sub("", str(error)).rstrip(".")
        raise document.error(
            _key_path(str(error)),
            f"{message}.",
            way_out="Compare it with search_spaces/grpo.yaml.",
        ) from error
    _check(document, space)
    return space


def _key_path(message: str) -> KeyPath:
    """Return the place that msgspec names: `$.knobs[2].effect` is ("knobs", 2, "effect")."""
    match = _PATH.search(message)
    if match is None:
        return ()
    path: list[str | int] = []
    for name, index in re.findall(r"\.?([A-Za-z_]\w*)|\[(\d+)\]", match["path"]):
        path.append(name or int(index))
    return tuple(path)


def _refuse_unknown_keys(
    document: Document,
    content: Mapping[str, object],
    kind: type,
    at: KeyPath,
) -> None:
    fields = [field.name for field in dataclasses.fields(kind)]
    for key in content:
        if key not in fields:
            unknown = UnknownName("key", str(key), fields)
            raise document.error((*at, str(key)), unknown.what, way_out=unknown.way_out)


def _check(document: Document, space: SearchSpace) -> None:
    """Check rules beyond the types."""
    if not space.knobs:
        raise document.error(
            ("knobs",),
            "the space has no knobs.",
            way_out="List at least one knob with its choices.",
        )
    described = {knob.name: knob for knob in space.remedies}
    names_so_far: set[str] = set()
    for index, knob in enumerate(space.knobs):
        _check_knob(document, space, knob, ("knobs", index))
        described[knob.name] = knob
        if knob.name in names_so_far:
            raise document.error(
                ("knobs", index),
                f"knob {knob.name!r} is listed twice.",
                way_out="Keep one of the two.",
            )
        names_so_far.add(knob.name)
    for index, name in enumerate(space.relax):
        if name not in described:
            unknown = UnknownName("knob", name, described)
            raise document.error(("relax", index), unknown.what, way_out=unknown.way_out)
        if described[name].effect != "learning":
            raise document.error(
                ("relax", index),
                f"{name!r} is neutral, so it is never relaxed.",
                way_out="Leave it out.",
            )


def _check_knob(
    document: Document,
    space: SearchSpace,
    knob: Knob,
    at: KeyPath,
) -> None:
    if not knob.choices:
        raise document.error(
            (*at, "choices"),
            f"knob {knob.name!r} has no choices.",
            way_out="Give it at least one value.",
        )
    # True == 1 in Python, but not in YAML.
    distinct = {(type(choice), choice) for choice in knob.choices}
    if len(distinct) != len(knob.choices):
        raise document.error(
            (*at, "choices"),
            f"knob {knob.name!r} has a choice twice.",
            way_out="List each value once.",
        )
    for condition, values in knob.when.items():
        place = (*at, "when", condition)
        if condition not in space:
            unknown = UnknownName("knob", condition, [knob.name for knob in space.knobs])
            raise document.error(place, unknown.what, way_out=unknown.way_out)
        choices = space[condition].choices
        if not set(values) & set(choices):
            raise document.error(
                place,
                f"knob {knob.name!r} can never apply: {condition!r} is never one of"
                f" {list(values)}.",
                way_out=f"Its choices are {list(choices)}.",
            )
