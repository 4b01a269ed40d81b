"""Tables of this package: YAML files under tables/, checked when they are decoded.

    memory.yaml      which memory ran out, and what only resembles it
    refusals.yaml    settings and data that are refused
    others.yaml      missing, unreachable, broken or waiting parts
    checks.yaml      checks of a framework, recognised by their place instead of their words
    files.yaml       files that are absent or unreadable, and classes of exceptions
    excerpts.yaml    messages quoted without their place: read in short texts alone
    warnings.yaml    warnings of a training that continues, slower or configured otherwise
    frames.yaml      purpose of the memory and phase of the step, by the frames of a traceback
    meanings.yaml    causes, phases and figures, with their words
    remedies.yaml    remedies by cause; none states by how much it helps
    lines.yaml       lines of a log that are no message of a failure
    words.yaml       words by which most lines of a log are skipped
    fragments.yaml, argument_names.yaml    parts of the patterns

Together the first five are the closed table of failure texts. The first row that matches decides,
so that the order is part of the table. A row is searched for in the exception that was raised, at
its place in the code; and, where only a failure has such words, in every printed line.

A pattern in a table is one string or a list of alternatives. Line breaks in it are dropped,
alternatives are joined by `|`, and `${name}` stands for the fragment of that name in
fragments.yaml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal, TypeVar

import msgspec
import msgspec.yaml

from autotune.core.measurement import Phase

Pattern = str | list[str]  # pattern as a table writes it

Decoded = TypeVar("Decoded")
_Meaning = TypeVar("_Meaning", bound=str)

_REFERENCE = re.compile(r"\$\{(\w+)\}")


class _ArgumentNames(msgspec.Struct, forbid_unknown_fields=True):
    """Names of settings, separated by blanks."""

    training_arguments: str
    lora_config: str
    trainer_configs: dict[str, str]


def read_table(name: str, type_: type[Decoded]) -> Decoded:
    """Return the content of tables/<name>.yaml, checked against the type."""
    file = resources.files(__package__).joinpath("tables", f"{name}.yaml")
    content = file.read_bytes()
    return msgspec.yaml.decode(content, type=type_)


def expand(pattern: Pattern) -> str:
    """Return the regular expression of a table's pattern."""
    return _joined(pattern, _fragments())


@functools.cache
def _fragments() -> Mapping[str, str]:
    expanded = {"of_another_version": _refused_arguments()}
    table = read_table("fragments", dict[str, Pattern])
    for name, pattern in table.items():
        expanded[name] = _joined(pattern, expanded)  # a fragment may contain earlier ones
    return expanded


def _joined(pattern: Pattern, fragments: Mapping[str, str]) -> str:
    alternatives = [pattern] if isinstance(pattern, str) else pattern
    expanded = []
    for alternative in alternatives:
        one_line = alternative.replace("\n", "")
        inserted = _REFERENCE.sub(lambda match: fragments[match[1]], one_line)
        expanded.append(inserted)
    return "|".join(expanded)


def _refused_arguments() -> str:
    """Return the pattern of Python's refusal of an argument that another version of the same
    class has.
    """
    # 1. Arguments by class.
    names = read_table("argument_names", _ArgumentNames)
    arguments_of = {}
    for owner, arguments in names.trainer_configs.items():
        arguments_of[owner] = f"{arguments} {names.training_arguments}"
    arguments_of["(?:Seq2Seq)?TrainingArguments"] = names.training_arguments
    arguments_of["LoraConfig"] = names.lora_config

    # 2. Python's words about each class.
    refusals = []
    for owner, arguments in arguments_of.items():
        escaped = map(re.escape, arguments.split())
        alternatives = "|".join(escaped)
        refusals.append(
            rf"\b{owner}\.__init__\(\) got an unexpected keyword argument '(?-i:{alternatives})'"
        )

    # 3. vLLM's own words.
    sampling = r"'(?:guided_decoding|structured_outputs|best_of|use_beam_search)'"
    refusals.append(rf"\A(?:[\w.]+\.)?TypeError: Unexpected keyword argument {sampling}")
    return "|".join(refusals)


class NumberMeaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    says: str  # in a list of figures
    means: str


class _Meanings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_causes: dict[str, str]
    other_causes: dict[str, str]
    phases: dict[Phase, str]
    numbers: dict[str, NumberMeaning]


MEANINGS = read_table("meanings", _Meanings)
MEMORY_CAUSES = MEANINGS.memory_causes
CAUSES = {**MEMORY_CAUSES, **MEANINGS.other_causes}  # each with its words


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    telling: tuple[str, ...]
    of_rows: tuple[str, ...]
    of_endings: tuple[str, ...]
    of_warnings: tuple[str, ...]


class _Lines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefixes: list[Pattern]
    step: Pattern
    finished: Pattern
    ended: Pattern
    no_number: Pattern
    update_left_out: Pattern
    wrappers: Pattern
    of_another: Pattern
    harmless: Pattern
    python_warning: Pattern
    grave_warning: Pattern
    fault: Pattern


WORDS = read_table("words", _Words)
LINES = read_table("lines", _Lines)

# Tables in the order in which they are searched.
TABLES = ("memory", "refusals", "others", "checks", "files")

FailureKind = Literal["memory", "host_memory", "illegal", "transient", "other"]
"""memory: out of device memory in the current phase. host_memory: out of the machine's memory.
illegal: never tried again. transient: no verdict on the candidate, measured again. other: crash
with a known cause.
"""

ReadIn = Literal["any line", "error line", "exception"]
"""Texts in which a row counts: every printed line; a line that its logger marked as an error or
that an aborting program printed; or an exception that was raised.
"""


class FailureRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # also of its recorded samples in the tests
    pattern: str  # regular expression for `Type: text` of an exception, or for a line
    kind: FailureKind
    cause: str | None = None  # None: derived from the frames and the phase
    phase: Phase | None = None  # in which alone this text is printed; None: any phase
    secondary: bool = False  # message of a process that failed because another one had failed
    read_in: ReadIn = "exception"

    raised_at: str | None = None
    """Regular expression for `file:function statement`, where many failures share the words."""

    innermost_frames: int = 4  # in which `raised_at` is searched for

    without_place: bool = False
    """Words of a quotation that count only where the place in the code is missing."""

    decisive: bool = False
    """Names the first failure even before a traceback with less information."""

    on_host: bool = False  # a process on a GPU prints it about the machine's memory

    def search(self, text: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        """Return the match of the row in the text, None where it does not apply."""
        needs_place = self.raised_at is not None
        if needs_place and not self._is_raised_in(frames):
            return None
        return _compiled(self.pattern).search(text)

    def _is_raised_in(self, frames: Sequence[str]) -> bool:
        is_about_settings = self.kind in ("illegal", "other") and self.cause != "network"
        is_in_reward = any(map(_REWARDS.search, frames))
        if is_about_settings and is_in_reward:
            return False
        # The caller that requests a missing attribute is at fault, not the code that looks it up.
        callers = [frame for frame in frames if not _LOOKUP.search(frame)]
        place = _compiled(self.raised_at or "")
        innermost = callers[-self.innermost_frames :]
        return any(map(place.search, innermost))


# Frames that call the user's own functions: a failure behind them indicates nothing about settings,
# data or versions.
_REWARDS = re.compile(
    r"\A\S*(?::_calculate_rewards|:compute_rewards?|/reward_managers?/\S*:\w+)\b"
    r"|\A\S+ .*\b(?:\w*reward_(?:fn|func|function)\w*"
    r"|compute_score|compute_metrics|formatting_func|rollout_func)\("
)

_LOOKUP = re.compile(r"\A\S*:__getattr(?:ibute)?__\b")

_BACKTICK = re.compile(r"`(?!\?)")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression; who quotes a message may have lost its backticks."""
    expression = _BACKTICK.sub("`?", pattern)
    return re.compile(expression, re.IGNORECASE | re.DOTALL)


def _read_rows(*tables: str) -> tuple[FailureRow, ...]:
    rows: list[dict[str, Any]] = []
    for table in tables:
        rows += read_table(table, list[dict[str, Any]])
    for row in rows:
        for field in ("pattern", "raised_at"):
            if field in row:
                row[field] = expand(row[field])
    return msgspec.convert(rows, tuple[FailureRow, ...])


FAILURE_ROWS = _read_rows(*TABLES)  # whole table in its order

QUOTED_ROWS = _read_rows("excerpts")  # rows of short excerpts, behind the others


class KnownWarning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of tables/warnings.yaml."""

    name: str
    pattern: str
    says: str  # meaning for the run


KNOWN_WARNINGS = read_table("warnings", tuple[KnownWarning, ...])


def warning_in(line: str) -> str | None:
    """Return the meaning of the warning in a line, None where there is none."""
    for warning in KNOWN_WARNINGS:
        if re.search(warning.pattern, line, re.IGNORECASE):
            return warning.says
    return None


class _FrameTable(msgspec.Struct, forbid_unknown_fields=True):
    """Lists of {meaning: pattern}, searched in their order."""

    hands_over: str
    saves: str
    evaluates: str
    within: list[dict[str, str]]
    causes: list[dict[str, str]]
    in_general: list[dict[str, str]]
    phases: list[dict[Phase, str]]
    latest: list[dict[Phase, str]]
    last: list[dict[Phase, str]]


FrameTable = tuple[tuple[str, _Meaning], ...]
"""Pairs of pattern and meaning, searched in this order."""


def _pairs(rows: list[dict[_Meaning, str]]) -> FrameTable[_Meaning]:
    pairs = []
    for row in rows:
        for meaning, pattern in row.items():
            expression = expand(pattern)
            pairs.append((expression, meaning))
    return tuple(pairs)


_TABLE = read_table("frames", _FrameTable)

# Purposes of memory.
_WITHIN = _pairs(_TABLE.within)
_CAUSES = _pairs(_TABLE.causes)
_IN_GENERAL = _pairs(_TABLE.in_general)

# Phases.
_PHASES = _pairs(_TABLE.phases)
_LATEST = _pairs(_TABLE.latest)
_LAST = _pairs(_TABLE.last)

# Frames that change the meaning of others.
_HANDS_OVER = expand(_TABLE.hands_over)
_SAVES = expand(_TABLE.saves)
_EVALUATES = expand(_TABLE.evaluates)


def cause_of(frames: Sequence[str]) -> str | None:
    """Return the purpose of the memory; the last frame is the innermost.

    The innermost frame that matches decides: every training step passes through the trainer's
    log-probabilities, and what ran out there may still have been a layer's activations. Some frames
    cover everything that they call: an engine's profiling run passes through a model's layers too.
    """
    hands_over = _any(_HANDS_OVER, frames)
    cause = _first(frames, _CAUSES)
    for pattern, purpose in _WITHIN:
        # A loader may start an engine too, which has a cache.
        is_loaders_engine = purpose == "weights" and cause == "kv_cache"
        if _any(pattern, frames) and not is_loaders_engine:
            if hands_over and purpose == "weights":
                return "weight_sync"
            return purpose
    if hands_over and cause in ("zero_gather", "weights", None):
        return "weight_sync"
    is_whole_tensor = _any(r":full_tensor\b", frames)
    gathers_to_save = is_whole_tensor and _any(_SAVES, frames)
    if cause == "weight_sync" and gathers_to_save and not hands_over:
        return "zero_gather"
    return cause or _first(frames, _IN_GENERAL)


def phase_of(frames: Sequence[str]) -> Phase | None:
    """Return the phase of the step, None where no frame indicates it."""
    phase = _first(frames, _PHASES) or _first(frames, _LATEST)
    if phase is None and not _any(_EVALUATES, frames):
        phase = _first(frames, _LAST)
    return phase


def _any(pattern: str, frames: Sequence[str]) -> bool:
    return any(re.search(pattern, frame) for frame in frames)


def _first(frames: Sequence[str], table: FrameTable[_Meaning]) -> _Meaning | None:
    for frame in reversed(frames):
        for pattern, meaning in table:
            if re.search(pattern, frame):
                return meaning
    return None
