"""YAML files with the line and column of each key, for error messages.

Files are small and written by hand: their size, depth, number of values after aliases are replaced,
and length of numbers are limited before anything is built from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from autotune.core.errors import BadInput
from autotune.core.files import MAX_DEPTH, read_text

Decoded = TypeVar("Decoded")

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_YAML_BYTES = 1024 * 1024
MAX_EVENTS = 50_000
MAX_NUMBER_LENGTH = 100  # longer ones take quadratic time, and can't be printed
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C if PyYAML was built with it, which is ten times faster."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Content of a YAML file with the positions of its parts."""

    path: Path
    content: Mapping[str, object]
    places: Mapping[KeyPath, tuple[int, int]]  # path -> (line, column), from 1

    def where(self, path: KeyPath = ()) -> str:
        """Return `file.yaml, line 3, column 5` for the closest part with a position."""
        while path and path not in self.places:
            path = path[:-1]
        line, column = self.places.get(path, (1, 1))
        return f"{self.path}, line {line}, column {column}"

    def error(self, path: KeyPath, what: str, *, way_out: str = "") -> BadInput:
        return BadInput(f"{self.where(path)}: {what}", way_out=way_out)


def read_document(path: Path) -> Document:
    """Read a YAML file that contains one mapping."""
    if not path.exists():
        raise BadInput(f"There is no file {str(path)!r}.", way_out="Check the path.")
    text = read_text(
        path, largest_bytes=MAX_YAML_BYTES, way_out="It must be a readable UTF-8 text file."
    )
    try:
        root = _bounded(text)
        content = None if root is None else _constructed(text, root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = (
            "line 1, column 1"
            if mark is None
            else f"line {mark.line + 1}, column {mark.column + 1}"
        )
        problem = str(
            getattr(error, "problem", None) or getattr(error, "reason", None) or error
        ).splitlines()[0]
        raise BadInput(
            f"{path}, {place}: broken YAML: {problem}.", way_out="Mend that line."
        ) from error
    if not isinstance(content, dict) or root is None:
        raise BadInput(
            f"{path}, line 1, column 1: not a YAML mapping.",
            way_out="Write lines of `name: value`.",
        )
    places: dict[KeyPath, tuple[int, int]] = {}
    _note_places(root, (), places, path)
    return Document(path=path, content=content, places=places)


def read_scalar(text: str) -> object:
    """Return the value of a YAML scalar; the text itself if it is anything else."""
    try:
        root = _bounded(text)
        return _constructed(text, root) if isinstance(root, yaml.ScalarNode) else text
    except (yaml.YAMLError, ValueError):
        return text


class _BeyondLimits(yaml.MarkedYAMLError):
    """Valid YAML that is refused."""

    def __init__(
        self, problem: str, mark: Any
    ) -> None:  # the two parsers have classes of their own for marks
        super().__init__(problem=problem, problem_mark=mark)


def _bounded(text: str) -> yaml.Node | None:
    """Return the node of the document; a YAMLError beyond the limits. The events come first: the
    composer recurses, and its time grows with the square of the depth.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise _BeyondLimits(f"nested more than {MAX_DEPTH} levels deep", event.start_mark)
        if number > MAX_EVENTS:
            raise _BeyondLimits(f"more than {MAX_EVENTS:,} values", event.start_mark)
    root = yaml.compose(text, Loader=_Loader)
    if root is not None:
        _count(root, {}, ())
    return root


def _count(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Return the values below a node with every alias replaced; each node is visited once."""
    if id(node) in above:
        raise _BeyondLimits("an alias that contains itself", node.start_mark)
    if id(node) not in known:
        known[id(node)] = 1 + sum(
            _count(inner, known, (*above, id(node))) for inner in _inner(node)
        )
    if known[id(node)] > MAX_EVENTS:
        raise _BeyondLimits(f"more than {MAX_EVENTS:,} values", node.start_mark)
    return known[id(node)]


def _inner(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (key, value)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif (
        isinstance(node, yaml.ScalarNode)
        and len(node.value) > MAX_NUMBER_LENGTH
        and node.tag in _NUMBERS
    ):
        raise _BeyondLimits(f"a number of {len(node.value)} characters", node.start_mark)


def _constructed(text: str, root: yaml.Node) -> object:
    """Return the value of the text, whose node is `root`."""
    try:
        return yaml.load(text, Loader=_Loader)  # the safe loader
    except ValueError as error:  # dates like 2001-99-99
        raise _BeyondLimits(str(error), root.start_mark) from error


def _note_places(
    node: yaml.Node, at: KeyPath, places: dict[KeyPath, tuple[int, int]], file: Path
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*at, str(key.value))
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            if name in places:
                # PyYAML silently keeps the last of two equal keys.
                raise BadInput(
                    f"{file}, line {place[0]}, column {place[1]}: {key.value!r} is given twice,"
                    f" first on line {places[name][0]}.",
                    way_out="Keep one of the two.",
                )
            places[name] = place
            _note_places(value, name, places, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*at, index)] = (item.start_mark.line + 1, item.start_mark.column + 1)
            _note_places(item, (*at, index), places, file)


def packaged_table(package: str, file: str, kind: type[Decoded]) -> Decoded:
    """Return a YAML file of the package, checked against the type."""
    import msgspec.yaml

    return msgspec.yaml.decode(resources.files(package).joinpath(file).read_bytes(), type=kind)
