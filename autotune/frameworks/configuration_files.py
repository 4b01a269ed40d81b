"""Settings of a command line that names TOML files: `rl @ base.toml --trainer @ trainer.toml
--seq-len 2048` (prime-rl).

Files are merged in their order, a file after an option below it; options win. A table that stands
for an optional part counts as the settings of `parts`, and shared settings are handed down, as the
framework's own parser does it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autotune.core.errors import BadInput
from autotune.core.files import read_toml
from autotune.core.shell_script import UNKNOWN, Word
from autotune.core.space import KnobValue
from autotune.core.user_script import LaunchScript, SharedSetting, StatedSetting

ABSENT = "None"  # word for a part that is left out
FILE_SIGN = "@"


class FileRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of the files that a framework reads: a part of a row of `launch_commands.yaml`."""

    parts: dict[str, dict[str, bool | int]]  # optional table -> settings that its presence states
    shared: dict[
        str, tuple[str, ...]
    ]  # setting -> those that have its value unless they are stated
    turned_on_by: dict[str, str] = {}  # part -> another one that turns it on unless it is left out
    same: dict[str, str] = {}  # setting -> another one that has its value where it is not stated
    values: dict[str, tuple[bool | int | str, ...]] = {}  # setting -> values that can be read
    refused: tuple[str, ...] = ()  # settings and tables that can't be read, whatever their value
    strict: str = ""  # prefix below which every setting has to be known
    harmless: tuple[str, ...] = ()  # settings below it without an effect on memory


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A file or an option: nested settings, with the place that states them."""

    content: Mapping[str, Any]
    line: int
    file: Path | None = None
    below: str = ""  # option before a file
    span: tuple[int, int] | None = None  # of the file's name, or of the whole option


def settings_of(
    path: str, rules: FileRules, words: Sequence[Word]
) -> tuple[dict[str, StatedSetting], tuple[SharedSetting, ...]]:
    """Return the settings of these arguments of the script at `path` by dotted name, and the
    shared ones among them.
    """
    # 1. Files, then options.
    content: dict[str, Any] = {}
    lines: dict[str, int] = {}
    shared: list[SharedSetting] = []
    for source in sorted(
        _sources(path, rules, words), key=lambda one: (one.file is None, one.below != "")
    ):
        content = _merged(content, source.content)
        lines.update(dict.fromkeys((name for name, _ in _leaves(source.content)), source.line))
        for name in rules.shared.keys() & source.content.keys():
            shared.append(
                SharedSetting(
                    name=name, targets=rules.shared[name], file=source.file, span=source.span
                )
            )
    # 2. Optional parts are stated by their settings: present, left out, or neither.
    values = dict(_leaves(content))
    for table, settings in rules.parts.items():
        found = _below(content, table)
        if isinstance(found, Mapping):
            for name, value in settings.items():
                values.setdefault(name, _text(value))
        elif table in values:
            values.pop(table)
            if table in settings:
                values[table] = "false" if found == ABSENT else _text(found)
    for part, other in rules.turned_on_by.items():
        if values.get(part) == "false" and values.get(other) != "false":
            values[part] = "true"
    values.update(
        {name: "{}" for name in rules.refused if isinstance(_below(content, name), Mapping)}
    )
    values.update(
        {
            name: values[other]
            for name, other in rules.same.items()
            if other in values and name not in values
        }
    )
    # 3. Shared settings are handed down.
    for name, targets in rules.shared.items():
        if name not in values:
            continue
        text = values.pop(name)
        for target in targets:
            if values.setdefault(target, text) != text:
                raise BadInput(
                    f"{path}: {name}={text} and {target}={values[target]} exclude each other.",
                    way_out="State one of them: the framework refuses both.",
                )
    line = min((word.line for word in words), default=1)
    stated = {
        name: StatedSetting(
            text=text, line=lines.get(name, lines.get(name.rpartition(".")[0], line)), span=None
        )
        for name, text in values.items()
    }
    return stated, tuple(shared)


def why_unread(
    rules: FileRules, name: str, text: str | None, known: Mapping[str, object]
) -> str | None:
    """Return the reason why a setting can't be read; None if it can."""
    if text not in ("null", "false") and any(
        name == one or name.startswith(f"{one}.") for one in rules.refused
    ):
        return f"{name} is not read"
    readable = [_text(value) for value in rules.values.get(name, ())]
    if readable and text not in readable:
        return f"{name}={text} is not read, only {' or '.join(readable)}"
    if (
        rules.strict
        and name.startswith(rules.strict)
        and name not in {*known, *rules.harmless, *rules.values}
    ):
        return f"{name} is not known"
    return None


def unshare(
    launch: LaunchScript,
    changes: dict[str, KnobValue],
    settings: Mapping[str, KnobValue],
    folder: Path,
) -> tuple[list[Path], list[tuple[int, int, str]]]:
    """Take shared settings out of the launch where a change gives one of their settings another
    value.

    Return the changed files, written into the folder, and the edits of the script; the other
    settings that had the shared value are added to the changes.
    """
    files, edits = list[Path](), list[tuple[int, int, str]]()
    for shared in launch.shared:
        if not changes.keys() & set(shared.targets) or shared.span is None:
            continue
        if shared.file is None:
            edits.append((*shared.span, ""))
        else:
            file = folder / f"changed-{shared.file.name}"
            file.write_text(_without_setting(shared.file, shared.name), encoding="utf-8")
            files.append(file)
            edits.append(
                (*shared.span, f'"$(dirname -- "$0")"/{shlex.quote(file.name)}')
            )  # beside the script
        changes.update(
            {
                target: settings[target]
                for target in shared.targets
                if target in settings and target not in changes
            }
        )
    return files, edits


def _without_setting(file: Path, name: str) -> str:
    """Return a TOML file's text without a setting of its top, which has to be one line."""
    text = file.read_text(encoding="utf-8")
    wanted = {key: value for key, value in tomllib.loads(text).items() if key != name}
    changed = re.sub(
        rf"^[ \t]*{re.escape(name)}[ \t]*=.*\n?", "", text, count=1, flags=re.MULTILINE
    )
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(changed) == wanted:
            return changed
    return f"# Delete {name} here: the script states what it stood for.\n{text}"


def _sources(path: str, rules: FileRules, words: Sequence[Word]) -> Iterator[_Source]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.text == FILE_SIGN:
            yield _file(path, "", words[index : index + 1], word)
            index += 1
        elif word.text.startswith("--") and word.text != "--":
            name, equals, value = word.text[2:].partition("=")
            values = [] if equals else _values(words, index)
            index += len(values)
            if values and values[0].text.startswith(FILE_SIGN):
                glued = (
                    [Word(text=values[0].text[1:], line=word.line, span=None)]
                    if values[0].text != FILE_SIGN
                    else values[1:]
                )
                yield _file(path, name.replace("-", "_"), glued, word)
            else:
                yield _option(
                    rules,
                    name,
                    value if equals else " ".join(one.text for one in values) or None,
                    [word, *values],
                )


def _values(words: Sequence[Word], index: int) -> list[Word]:
    """Return the words of an option: a file below it, or its values."""
    if index < len(words) and words[index].text.startswith(FILE_SIGN):
        return list(words[index : index + (2 if words[index].text == FILE_SIGN else 1)])
    return list(
        itertools.takewhile(
            lambda word: word.text != FILE_SIGN and not word.text.startswith("--"), words[index:]
        )
    )


def _file(path: str, name: str, words: Sequence[Word], sign: Word) -> _Source:
    if not words or UNKNOWN in words[0].text:
        raise BadInput(
            f"{path}, line {sign.line}: {FILE_SIGN} needs the name of a file.",
            way_out="Write it out.",
        )
    file = Path(words[0].text).expanduser()
    beside = Path(path).parent / file
    file = beside if not file.is_file() and beside.is_file() else file
    if not file.exists():
        raise BadInput(
            f"{path}, line {sign.line}: there is no file {words[0].text!r}.",
            way_out="Start autotune in the folder in which the script is started.",
        )
    if file.suffix != ".toml":
        raise BadInput(
            f"{path}, line {sign.line}: {words[0].text} is not read, only TOML.",
            way_out="Write it as TOML.",
        )
    return _Source(
        content=_nested(name, read_toml(file)),
        line=sign.line,
        file=file,
        below=name,
        span=words[0].span,
    )


def _option(rules: FileRules, flag: str, text: str | None, words: Sequence[Word]) -> _Source:
    name, value = flag.replace("-", "_"), text
    if text is None and name.startswith("no_"):
        name = name[len("no_") :]
        value = ABSENT if name in rules.parts or name in rules.refused else "false"
    content = _nested(
        name, {} if value is None and name in rules.parts else "true" if value is None else value
    )
    first, last = words[0].span, words[-1].span
    return _Source(
        content=content, line=words[0].line, span=(first[0], last[1]) if first and last else None
    )


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".") if name else ()):
        value = {part: value}
    return value if isinstance(value, dict) else {}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: (
            _merged(base[name], value)
            if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
            else value
        )
        for name, value in over.items()
    }
    return {**base, **both}


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for one in value:  # an array of tables: what any of them states
                yield from _leaves(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return "null" if value == ABSENT else value
    return json.dumps(value, default=str)


def _below(content: Mapping[str, Any], name: str) -> Any:
    found: Any = content
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
