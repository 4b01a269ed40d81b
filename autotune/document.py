"""YAML that people wrote, read with the line and column of everything in it, so that errors can point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import yaml

from autotune.errors import BadInput

KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A YAML file's content and where each part of it stands."""

    path: Path
    content: Mapping[str, object]
    places: Mapping[KeyPath, tuple[int, int]]
    """Line and column, both from 1, of every key and list item, by its path from the top."""

    def where(self, path: KeyPath = ()) -> str:
        """`file.yaml, line 3, column 5` for the closest part that has a place."""
        while path and path not in self.places:
            path = path[:-1]
        line, column = self.places.get(path, (1, 1))
        return f"{self.path}, line {line}, column {column}"

    def error(self, path: KeyPath, what: str, *, way_out: str = "") -> BadInput:
        return BadInput(f"{self.where(path)}: {what}", way_out=way_out)


def read_document(path: Path) -> Document:
    """A YAML file that holds one mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadInput(f"There is no file {str(path)!r}.", way_out="Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{str(path)!r} cannot be read: {error}.", way_out="It must be a readable UTF-8 text file.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{path}, {_place_of(error)}: broken YAML: {_problem_of(error)}.", way_out="Mend that line.") from error
    if not isinstance(content, dict) or root is None:
        raise BadInput(f"{path}, line 1, column 1: not a YAML mapping.", way_out="Write lines of `name: value`.")
    places: dict[KeyPath, tuple[int, int]] = {}
    _note_places(root, (), places, path)
    return Document(path=path, content=content, places=places)


def _note_places(node: yaml.Node, at: KeyPath, places: dict[KeyPath, tuple[int, int]], file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*at, str(key.value))
            place = (key.start_mark.line + 1, key.start_mark.column + 1)
            if name in places:
                # PyYAML keeps the last of two equal keys without a word.
                raise BadInput(
                    f"{file}, line {place[0]}, column {place[1]}: {key.value!r} is given twice, first on line {places[name][0]}.",
                    way_out="Keep one of the two.",
                )
            places[name] = place
            _note_places(value, name, places, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*at, index)] = (item.start_mark.line + 1, item.start_mark.column + 1)
            _note_places(item, (*at, index), places, file)


def _place_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return "line 1, column 1" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"


def _problem_of(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).splitlines()[0]
