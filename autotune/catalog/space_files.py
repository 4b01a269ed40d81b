"""Loader of search spaces (search_spaces/*.yaml) with validation.

A wheel contains the files inside the package; a clone has them next to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
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
    return shipped if shipped.is_dir() else _PACKAGE.parent / "search_spaces"


def names() -> tuple[str, ...]:
    """Return the names of the shipped spaces."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def load_space(name_or_path: str) -> SearchSpace:
    """Load a shipped space by name, or a file by path."""
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    if not is_path and name_or_path not in names():
        raise UnknownName("search space", name_or_path, names(), listing="autotune show spaces")
    return read_space(Path(name_or_path) if is_path else folder() / f"{name_or_path}.yaml")


def read_space(path: Path) -> SearchSpace:
    """Read and validate a space file."""
    document = read_document(path)
    content = {"name": path.stem, **document.content}
    _refuse_unknown_keys(document, content, SearchSpace, ())
    for part in ("knobs", "remedies"):
        listed = content.get(part)
        for index, knob in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(knob, Mapping):
                _refuse_unknown_keys(document, knob, Knob, (part, index))
    try:
        space = msgspec.convert(content, SearchSpace)
    except msgspec.ValidationError as error:
        # msgspec's `$.knobs[2].effect` is ("knobs", 2, "effect").
        match = _PATH.search(str(error))
        parts = re.findall(r"\.?([A-Za-z_]\w*)|\[(\d+)\]", match["path"] if match else "")
        at = tuple(int(index) if index else name for name, index in parts)
        what = _PATH.sub("", str(error)).rstrip(".") + "."
        raise document.error(
            at, what, way_out="Compare it with search_spaces/grpo.yaml."
        ) from error
    _check(document, space)
    return space


def _refuse_unknown_keys(
    document: Document, content: Mapping[str, object], kind: type, at: KeyPath
) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in content:
        if key not in known:
            unknown = UnknownName("key", str(key), known)
            raise document.error((*at, str(key)), unknown.what, way_out=unknown.way_out)


def _check(document: Document, space: SearchSpace) -> None:
    """Check rules beyond the types."""
    if not space.knobs:
        raise document.error(
            ("knobs",),
            "the space has no knobs.",
            way_out="List at least one knob with its choices.",
        )
    known = [knob.name for knob in space.knobs]
    for index, knob in enumerate(space.knobs):
        _check_knob(document, space, knob, ("knobs", index))
        if known.index(knob.name) != index:
            raise document.error(
                ("knobs", index),
                f"knob {knob.name!r} is listed twice.",
                way_out="Keep one of the two.",
            )
    for index, name in enumerate(space.relax):
        described = {knob.name: knob for knob in (*space.remedies, *space.knobs)}
        if name not in described:
            unknown = UnknownName("knob", name, described)
            raise document.error(("relax", index), unknown.what, way_out=unknown.way_out)
        if described[name].effect != "learning":
            raise document.error(
                ("relax", index),
                f"{name!r} is neutral, so it is never relaxed.",
                way_out="Leave it out.",
            )


def _check_knob(document: Document, space: SearchSpace, knob: Knob, at: KeyPath) -> None:
    if not knob.choices:
        raise document.error(
            (*at, "choices"),
            f"knob {knob.name!r} has no choices.",
            way_out="Give it at least one value.",
        )
    # True == 1 in Python, but not in YAML.
    typed = [(type(choice), choice) for choice in knob.choices]
    if len(set(typed)) != len(typed):
        raise document.error(
            (*at, "choices"),
            f"knob {knob.name!r} has a choice twice.",
            way_out="List each value once.",
        )
    for other, values in knob.when.items():
        if other not in space:
            unknown = UnknownName("knob", other, [each.name for each in space.knobs])
            raise document.error((*at, "when", other), unknown.what, way_out=unknown.way_out)
        if not set(values) & set(space[other].choices):
            what = f"knob {knob.name!r} can never apply: {other!r} is never one of {list(values)}."
            raise document.error(
                (*at, "when", other), what, way_out=f"Its choices are {list(space[other].choices)}."
            )
