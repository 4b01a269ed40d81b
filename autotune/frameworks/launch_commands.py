"""The training command of a launch script: its settings under the framework's own names, and the
script with changed ones.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import yaml

from autotune.core.errors import BadInput
from autotune.core.shell_script import UNKNOWN, SimpleCommand, Word
from autotune.core.space import KnobValue
from autotune.core.user_script import LaunchScript, StatedSetting
from autotune.core.yaml_document import packaged_table
from autotune.frameworks.base import Field, as_word
from autotune.frameworks.configuration_files import FILE_SIGN, FileRules, settings_of

MODULE = re.compile(r"[\w./-]+")  # a module or a file after `python -m`, `python` and the like


class NotRead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry point of a framework that is not read, recognised by a word of its module: the
    reason, and an alternative.
    """

    words: tuple[str, ...]
    because: str
    instead: str


class LaunchKind(msgspec.Struct, frozen=True, kw_only=True):
    """Command of a framework: a row of `launch_commands.yaml`."""

    framework: str
    only_logs: bool = False  # True: its logs are read, and autotune starts no training of it
    model: str = ""  # setting with the model's name or folder
    modules: dict[str, tuple[str, ...]] = {}
    words: dict[str, tuple[str, ...]] = {}
    packages: tuple[
        str, ...
    ] = ()  # beginnings of the modules of a training, for the error about another one
    not_read: tuple[NotRead, ...] = ()
    dotted: bool = False
    chosen_by: str | None = None  # setting that names the method
    methods: dict[str, str] = {}
    method_default: str | None = None
    adapter: str | None = None  # setting of an adapter's rank
    tuner: str | None = None  # setting that names the kind of tuning
    former: dict[
        str, str
        # flag of earlier releases -> setting; of several for one setting, the first is the usual one
    ] = {}
    follows_hardware: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # prefixes of outputs, trackers and data: never part of a probe
    in_logs: tuple[str, ...] = ()  # lower-case words that only this framework's logs contain
    files: FileRules | None = None  # settings in TOML files after `@`
    methods_in_logs: dict[
        str, tuple[str, ...]
    ] = {}  # method -> lower-case words of its logs; none: one method's remedies
    past_methods: dict[str, dict[str, str | None]] = {}
    """Method that only logs of earlier releases have -> setting of a remedy -> the method's own;
    null: there is none."""

    remedies: dict[
        str, str | None
    ] = {}  # setting of a remedy -> the framework's own; null: there is none
    remedy_values: dict[
        str, str
    ] = {}  # setting of a remedy -> direction or value, where it differs
    remedy_reasons: dict[str, str] = {}  # setting of a remedy -> its reason, where it differs

    @property
    def former_flags(self) -> dict[str, str]:
        """Setting -> its flag in earlier releases."""
        return {name: flag for flag, name in reversed(self.former.items())}


@cache
def launch_kinds() -> tuple[LaunchKind, ...]:
    return packaged_table("autotune.frameworks", "launch_commands.yaml", tuple[LaunchKind, ...])


def kind_of(framework: str) -> LaunchKind:
    return next(kind for kind in launch_kinds() if kind.framework == framework)


def find_launch(path: str, text: str, commands: Sequence[SimpleCommand]) -> LaunchScript:
    """Return the one training command among these. Raises BadInput without one, and for several."""
    found = [(command, *match) for command in commands if (match := _matched(command)) is not None]
    if not found:
        raise _nothing_known(path, commands)
    for command, *_ in found:
        if not command.certain:
            raise BadInput(
                f"{path}, line {command.line}: the training command is in a loop, a function or"
                " under a condition.",
                way_out="Write the one command that you mean into a script of its own.",
            )
    if len(found) > 1:
        lines = " and ".join(str(command.line) for command, *_ in found)
        raise BadInput(
            f"{path} starts {len(found)} trainings, in lines {lines}.",
            way_out="Give each a script of its own.",
        )
    command, kind, method, start = found[0]
    if kind.framework != "trl" and (sharded := _launcher_file(command.words[:start])) is not None:
        raise BadInput(
            f"{path}, line {sharded.line}: the sharding of {sharded.text} is the launcher's, and"
            f" {kind.framework} has its own.",
            way_out=(
                f"State it in {kind.framework}'s settings, or measure the command: --framework"
                " command -- COMMAND."
            ),
        )
    arguments = command.words[start:]
    if kind.files is not None:
        stated, shared = settings_of(path, kind.files, arguments)
    else:
        stated, shared = dict(_stated(kind, command.words, start)), ()
    # With a flag of an earlier release among these, added flags must be of that release too.
    flags = {
        word.text[2:].partition("=")[0].replace("-", "_")
        for word in arguments
        if word.text.startswith("--")
    }
    return LaunchScript(
        path=path,
        text=text,
        framework=kind.framework,
        method=_method(path, kind, method, stated),
        line=command.line,
        end=command.end,
        dotted=kind.dotted,
        stated=stated,
        environment=command.environment,
        in_files=kind.files is not None,
        shared=shared,
        former=kind.former_flags if flags & kind.former.keys() else {},
    )


def _nothing_known(path: str, commands: Sequence[SimpleCommand]) -> BadInput:
    """Return the error about a script without a training that can be read: the nearest miss in
    it, if any.
    """
    way_out = (
        "For your own trainer: --script train.py; for any other program: --framework command --"
        " COMMAND."
    )
    kinds = [kind for kind in launch_kinds() if kind.modules or kind.words]
    for word in (word for command in commands for word in command.words):
        for kind in kinds:
            known = [
                *itertools.chain(*kind.modules.values()),
                *itertools.chain(*kind.words.values()),
            ]
            if any(one in word.text for one in known) and " " in word.text:
                return BadInput(
                    f"{path}, line {word.line}: {kind.framework}'s training is inside a quoted"
                    " command.",
                    way_out="Write it into a script of its own, without the shell around it.",
                )
            if MODULE.fullmatch(word.text) and word.text.replace("/", ".").startswith(
                kind.packages
            ):
                other = next(
                    (one for one in kind.not_read if any(part in word.text for part in one.words)),
                    None,
                )
                if other is not None:
                    return BadInput(
                        f"{path}, line {word.line}: {word.text} {other.because}.",
                        way_out=other.instead,
                    )
                return BadInput(
                    f"{path}, line {word.line}: {word.text} is no training of {kind.framework} that"
                    " can be read.",
                    way_out=f"Known are {', '.join(known)}. {way_out}",
                )
    return BadInput(
        f"{path} starts no training of {', '.join(kind.framework for kind in kinds)}.",
        way_out=way_out,
    )


def _launcher_file(words: Sequence[Word]) -> Word | None:
    """Return the configuration file of `accelerate launch`, if these words before the training
    have one.
    """
    texts = [word.text for word in words]
    if "accelerate" not in [Path(text).name for text in texts]:
        return None
    return next(
        (after for word, after in itertools.pairwise(words) if word.text == "--config_file"), None
    )


def _matched(command: SimpleCommand) -> tuple[LaunchKind, str, int] | None:
    """Return the framework, the method (or `any`) and the number of the first argument."""
    words = [word.text for word in command.words]
    for index, word in enumerate(words):
        for kind in launch_kinds():
            for method, modules in kind.modules.items():
                if any(word == module or word.endswith(f"/{module}") for module in modules):
                    return kind, method, index + 1
            for method, pairs in kind.words.items():
                for pair in pairs:
                    program, argument = pair.split()
                    if Path(word).name == program and words[index + 1 : index + 2] == [argument]:
                        return kind, method, index + (1 if argument == FILE_SIGN else 2)
    return None


def _method(path: str, kind: LaunchKind, method: str, stated: Mapping[str, StatedSetting]) -> str:
    if method != "any":
        return method
    chosen = stated.get(kind.chosen_by or "")
    if chosen is None and kind.method_default:
        return kind.method_default
    named = chosen.text if chosen is not None and chosen.text else ""
    if named not in kind.methods:
        line = f", line {chosen.line}" if chosen is not None else ""
        alike = "reward" if named == "rm" else named  # TRL's name of the method
        known = alike in kind_of("trl").modules
        way_out = (
            f"The same training as TRL's is predicted: --method {alike} --model MODEL. "
            if known
            else ""
        )
        raise BadInput(
            f"{path}{line}: {kind.chosen_by}={named or 'not given'} of {kind.framework} is not"
            " modelled.",
            way_out=(
                f"Modelled are {', '.join(kind.methods)}. {way_out}The command itself is measured: "
                "--framework command -- COMMAND."
            ),
        )
    return kind.methods[named]


def _stated(
    kind: LaunchKind, words: Sequence[Word], start: int
) -> Iterator[tuple[str, StatedSetting]]:
    """Yield each setting; words before `start` are the launcher's."""
    if kind.framework == "trl":
        yield from _options(
            kind, words[: start - 1], values=1
        )  # without the script, which may follow an option's value
    if not kind.dotted:
        yield from _options(kind, words[start:])
        return
    for word in words[start:]:
        name, equals, value = word.text.partition("=")
        plain = name.lstrip("+")
        if equals and not plain.startswith(("~", "-", "hydra.")):
            prefix = name[: len(name) - len(plain)]
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            yield (
                plain,
                StatedSetting(
                    text=value[1:-1] if quoted else value,
                    line=word.line,
                    span=word.span,
                    prefix=prefix,
                ),
            )


def _options(
    kind: LaunchKind, words: Sequence[Word], values: int | None = None
) -> Iterator[tuple[str, StatedSetting]]:
    """Yield each option with its values, at most so many."""
    most, index = len(words) if values is None else values, 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.startswith("--") or word.text == "--":
            continue
        name, equals, value = word.text[2:].partition("=")
        name = kind.former.get(name.replace("-", "_"), name.replace("-", "_"))
        if equals:
            yield name, StatedSetting(text=value, line=word.line, span=None, option=word.span)
            continue
        found: list[Word] = []
        while index < len(words) and len(found) < most and not words[index].text.startswith("--"):
            found.append(words[index])
            index += 1
        text = " ".join(one.text for one in found) if found else None
        span = found[0].span if len(found) == 1 else None
        yield name, StatedSetting(text=text, line=word.line, span=span, option=word.span)


def is_known(setting: StatedSetting) -> bool:
    """Return False for a value that only a run of the script can yield."""
    return setting.text is None or UNKNOWN not in setting.text


def stated_value(stated: StatedSetting, field: Field) -> KnobValue:
    """Return the value as the framework's parser reads it."""
    if stated.text is None:
        return True
    try:
        value = yaml.safe_load(stated.text)
    except yaml.YAMLError:
        value = stated.text
    if isinstance(value, str) and "str" not in field.kinds:
        with contextlib.suppress(ValueError):
            value = float(value) if "float" in field.kinds or "int" in field.kinds else value
    if (
        isinstance(value, float)
        and "float" not in field.kinds
        and "int" in field.kinds
        and value == int(value)
    ):
        value = int(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and "int" not in field.kinds
        and "float" in field.kinds
    ):
        value = float(value)
    if not isinstance(value, bool | int | float | str | None):
        return stated.text
    return (
        str(stated.text)
        if "str" in field.kinds and type(value).__name__ not in field.kinds and value is not None
        else value
    )


# The changed script.

Edit = tuple[int, int, str]
"""Start, end and new text of a place in the script."""


def changed_script(
    launch: LaunchScript, changes: Mapping[str, KnobValue], more: Sequence[Edit] = ()
) -> str:
    """Return the text with each change at the place of its setting, or at the command's end."""
    edits: list[Edit] = [*more]
    added: list[str] = []
    for name, value in changes.items():
        stated = launch.stated.get(name)
        edit = None if stated is None else _edit(launch, name, stated, value)
        if edit is not None:
            edits.append(edit)
        elif word := _words(launch, name, value, stated):
            added.append(word)
    if added:
        edits.append((launch.end, launch.end, "".join(f" \\\n    {one}" for one in added)))
    text = launch.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def unified_diff(before: str, after: str, name: str) -> str:
    """Return a diff for `patch -p1`; empty without a change."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _edit(
    launch: LaunchScript, name: str, stated: StatedSetting, value: KnobValue
) -> tuple[int, int, str] | None:
    """Return (start, end, text); None where the setting is not one word of the file."""
    if launch.dotted:
        return None if stated.span is None else (*stated.span, _words(launch, name, value, stated))
    if stated.text is None and stated.option is not None and value is False:
        return (*stated.option, "")
    if stated.span is not None:
        return (*stated.span, shlex.quote(as_word(value)))
    if (
        stated.option is not None
        and stated.text is not None
        and launch.text[slice(*stated.option)].find("=") > 0
    ):
        return (*stated.option, f"--{launch.former.get(name, name)}={shlex.quote(as_word(value))}")
    return None


def _words(launch: LaunchScript, name: str, value: KnobValue, stated: StatedSetting | None) -> str:
    if launch.dotted:
        return f"{stated.prefix if stated else ''}{name}={shlex.quote(as_word(value))}"
    if launch.in_files:
        flag = name.replace("_", "-")
        return (
            f"--{flag}"
            if value is True
            else f"--no-{flag}"
            if value is False
            else f"--{flag} {shlex.quote(as_word(value))}"
        )
    name = launch.former.get(name, name)
    if launch.framework == "openrlhf" and isinstance(value, bool):
        return f"--{name}" if value else ""
    return f"--{name} {shlex.quote(as_word(value))}"


def changes_of(
    stated: Mapping[str, object],
    defaults: Mapping[str, object],
    knobs: Mapping[str, KnobValue],
    known: Mapping[str, Field],
) -> dict[str, KnobValue]:
    """Return the knobs with another value than the launch has, stated in it, in its file or by
    default.
    """
    return {
        name: value
        for name, value in knobs.items()
        if value is not None
        and name in known
        and stated.get(name, defaults.get(name, known[name].default)) != value
    }
