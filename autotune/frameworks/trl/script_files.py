"""Winner for a user's own script: recommended.patch, or flags if the script accepts them, and
launch.sh.

The patch is exact edits of one call's keyword arguments. Values that are not literals, come through
`**mapping` or are assigned later stay unchanged, and are reported with the reason.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from autotune.core.files import comment, comments
from autotune.core.job import Task
from autotune.core.space import Candidate, KnobValue
from autotune.core.user_script import UserScript
from autotune.frameworks.base import as_word
from autotune.frameworks.launch_commands import unified_diff
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.launch_files import exports, finder_of, launch_configuration
from autotune.frameworks.trl.output_files import (
    ACCELERATE_NAME,
    LAUNCH_NAME,
    SHIM_NAME,
    YAML_NAME,
    write,
    write_shim,
)
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.settings import GENERATION_SHAPE, OWN_SETTINGS, nested, ranks_of

PATCH_NAME = "recommended.patch"
IN_OBJECTS = frozenset(
    {
        "dtype",
        "attn_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "use_peft",
        "lora_r",
        "lora_alpha",
    }
)
"""Settings in objects of the script: `model_init_kwargs`, `from_pretrained`, `peft_config`."""

CLASS_PREFIXES: Mapping[str, str] = {"reward": "Reward", "async-grpo": "AsyncGRPO"}
"""Method -> beginning of its classes' names; the default is the method in capitals."""


@dataclass(frozen=True, kw_only=True)
class ScriptAdvice:
    """Changes of a script, and how to make them."""

    changes: Mapping[str, KnobValue]  # keyword arguments of the configuration -> new value
    patch: str = ""  # unified diff; empty if nothing changes, or nothing can be patched
    patched_file: str | None = None
    by_hand: Mapping[str, str] = field(
        default_factory=dict
    )  # change that the patch lacks -> reason
    flags: tuple[str, ...] = ()  # changes as command-line flags, if the script accepts them
    in_objects: Mapping[str, KnobValue] = field(
        default_factory=dict
    )  # changes in the script's own model or adapter

    @property
    def keyword_arguments(self) -> str:
        """Changes as source code."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


def advice_for(candidate: Candidate, task: Task, script: UserScript) -> ScriptAdvice:
    """Return the changes that turn the script into the measured candidate."""
    look, held = script.look, task.workload.held
    changes, place = _changes(candidate, task, script), look.config_place
    in_objects = {
        name: value
        for name, value in candidate.settings.items()
        if name in IN_OBJECTS and _differs(held.get(name), value)
    }
    # 1. Flags, as TRL's parsers read them.
    flags = (
        tuple(word for name, value in changes.items() for word in (f"--{name}", as_word(value)))
        if script.takes_flags
        else ()
    )
    if flags or not changes:
        return ScriptAdvice(changes=changes, flags=flags, in_objects=in_objects)
    # 2. No call that could be patched.
    if place is None or place.maker or not Path(place.file).is_file():
        why = (
            f"{place.maker} makes the configuration"
            if place and place.maker
            else f"the script makes no {_config_class(script)}"
        )
        return ScriptAdvice(
            changes=changes, by_hand=dict.fromkeys(changes, why), in_objects=in_objects
        )
    # 3. Patch.
    call = Call(line=place.line, span=place.span, expanded=look.expanded, changed=look.changed)
    diff, by_hand = patch_file(Path(place.file), call, changes)
    return ScriptAdvice(
        changes=changes,
        patch=diff,
        patched_file=place.file if diff else None,
        by_hand=by_hand,
        in_objects=in_objects,
    )


def _config_class(script: UserScript) -> str:
    method = script.look.method
    return f"{CLASS_PREFIXES.get(method, method.upper())}Config"


def _changes(candidate: Candidate, task: Task, script: UserScript) -> dict[str, KnobValue]:
    """Return the configuration settings that differ between candidate and script."""
    raw, known = script.look.raw, fields(script.look.method)
    changes = {
        name: value
        for name, value in candidate.settings.items()
        if _in_config(name, script)
        and name not in OWN_SETTINGS
        and name not in GENERATION_SHAPE
        and not name.startswith(SIDE_EFFECTS)
        and raw.get(name, known[name].default) != value
    }
    if raw.get("bf16") is None and not raw.get("fp16") and changes.get("bf16") is True:
        del changes["bf16"]  # the framework's own default
    return {**changes, **_generation_shape(candidate, task, raw)}


def _generation_shape(
    candidate: Candidate, task: Task, raw: Mapping[str, object]
) -> dict[str, KnobValue]:
    """Return the generation batch in the script's own setting; none if it follows from the
    others.
    """
    settings = candidate.settings
    steps, micro = settings.get("steps_per_generation"), settings.get("per_device_train_batch_size")
    if not isinstance(steps, int) or not isinstance(micro, int):
        return {}
    if raw.get("generation_batch_size") is not None:
        batch = micro * ranks_of(settings, task.hardware.count) * steps
        return {} if batch == raw["generation_batch_size"] else {"generation_batch_size": batch}
    derived = raw.get("steps_per_generation") is None and steps == settings.get(
        "gradient_accumulation_steps"
    )
    return (
        {}
        if derived or raw.get("steps_per_generation") == steps
        else {"steps_per_generation": steps}
    )


def _differs(before: object, value: KnobValue) -> bool:
    return value != before and not (before is None and value in (False, None))


def _in_config(name: str, script: UserScript) -> bool:
    known = fields(script.look.method)
    return name in known and known[name].owner == "config"


def write_files(candidate: Candidate, task: Task, folder: Path, script: UserScript) -> list[Path]:
    """Write the files of the final run besides the script itself."""
    folder.mkdir(parents=True, exist_ok=True)
    advice = advice_for(candidate, task, script)
    written = [write(folder / YAML_NAME, _yaml(candidate, task, script, advice))]
    written.append(
        write(
            folder / ACCELERATE_NAME,
            yaml.safe_dump(launch_configuration(candidate, task), sort_keys=False),
        )
    )
    if advice.patch:
        written.append(write(folder / PATCH_NAME, advice.patch))
    if shim := task.hardware.kind == "cpu" and bool(candidate.settings.get("use_vllm")):
        written += write_shim(folder)
    launch = _launch(candidate, task, script, advice, shim=SHIM_NAME if shim else None)
    return [*written, write(folder / LAUNCH_NAME, launch, executable=True)]


def how_to_apply(advice: ScriptAdvice, folder: str = ".") -> list[str]:
    """Return the instructions to apply the recommendation, one sentence each."""
    lines = []
    if advice.flags:
        lines.append(f"Give them to the script: {shlex.join(advice.flags)}")
    if advice.patched_file:
        root = shlex.quote(str(Path(advice.patched_file).parent))
        lines.append(
            f"Change the script with: patch -p1 -d {root} < {shlex.quote(f'{folder}/{PATCH_NAME}')}"
        )
    lines += [
        f"By hand: {name}={advice.changes[name]!r}, because {why}"
        for name, why in advice.by_hand.items()
    ]
    lines += [
        f"By hand: {name}={value!r}, in the script's own model or adapter"
        for name, value in advice.in_objects.items()
    ]
    return lines or ["The script is as recommended already."]


def _yaml(candidate: Candidate, task: Task, script: UserScript, advice: ScriptAdvice) -> str:
    """Return the configuration's settings, for reading and for `--config`."""
    place = script.look.config_place
    rewards = "not called" if script.rewards == "skip" else "as the script gives them"
    source = f" ({place})" if place else ""
    head = [
        (
            f"Settings of {_config_class(script)}{source}: {script.look.trainer} of {script.path}"
            f" on {task.hardware}."
        ),
        f"Measured with rewards {rewards}.",
        *how_to_apply(advice),
    ]
    tuned = {
        **advice.changes,
        **{name: value for name, value in candidate.knobs.items() if _in_config(name, script)},
    }
    whole = {**tuned, **nested(candidate.settings, {})}
    return comments(head) + yaml.safe_dump(
        {name: value for name, value in whole.items() if value is not None}, sort_keys=False
    )


def _launch(
    candidate: Candidate, task: Task, script: UserScript, advice: ScriptAdvice, *, shim: str | None
) -> str:
    """Return the launch script. It refuses to start a script without the recommended patch."""
    words = shlex.join([*script.arguments, *advice.flags])
    path = shlex.quote(str(Path(script.path).absolute()))
    further = f"Further arguments go to the script: ./{LAUNCH_NAME} --resume"
    head = comment(f"Starts {Path(script.path).name} as it was measured. {further}")
    check = ""
    if advice.patched_file:
        root = shlex.quote(str(Path(advice.patched_file).parent))
        advised = shlex.quote(f"The script is not changed yet: patch -p1 -d {root} < ")
        check = f"""if ! patch -p1 -R -s -f --dry-run -d {root} <"$here/{PATCH_NAME}" >/dev/null; then
  printf '%s%q\\n' {advised} "$here/{PATCH_NAME}" >&2
  exit 2
fi
"""
    return f"""#!/usr/bin/env bash
{head}set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{check}{finder_of("accelerate")}{exports(candidate, task, shim)}cd {shlex.quote(str(Path.cwd()))}
exec "$accelerate" launch --config_file "$here/{ACCELERATE_NAME}" {path} {words} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call to edit."""

    line: int
    span: tuple[int, int, int, int] | None
    expanded: tuple[str, ...] = ()  # names from its `**mapping`; `*` for unknown names
    changed: tuple[str, ...] = ()  # names that are assigned after the call


@dataclass(frozen=True, kw_only=True)
class Patched:
    """Source with the possible changes."""

    text: bytes
    by_hand: Mapping[str, str]  # impossible change -> reason


def patch(source: bytes, call: Call, changes: Mapping[str, KnobValue]) -> Patched:
    """Return the source with these keyword arguments in the call."""
    try:
        tree = ast.parse(source)
        source.decode("utf-8")
    except (SyntaxError, ValueError) as error:
        return Patched(
            text=source, by_hand=dict.fromkeys(changes, f"the file cannot be read: {error}")
        )
    node = _call_at(tree, call.line, call.span)
    if node is None:
        return Patched(
            text=source,
            by_hand=dict.fromkeys(changes, f"no such call was found in line {call.line}"),
        )
    by_hand = {
        name: why
        for name, value in changes.items()
        if (why := _why_not(node, name, value, call)) is not None
    }
    wanted = {name: value for name, value in changes.items() if name not in by_hand}
    text = _edited(source, node, wanted)
    if not _contains(text, node, wanted):
        return Patched(
            text=source,
            by_hand={**dict.fromkeys(changes, "the call could not be edited safely"), **by_hand},
        )
    return Patched(text=text, by_hand=by_hand)


def patch_file(
    path: Path, call: Call, changes: Mapping[str, KnobValue]
) -> tuple[str, Mapping[str, str]]:
    """Return the diff, and the changes to make by hand with their reasons."""
    source = path.read_bytes()
    patched = patch(source, call, changes)
    return (
        unified_diff(source.decode("utf-8"), patched.text.decode("utf-8"), path.name),
        patched.by_hand,
    )


def _call_at(
    tree: ast.Module, line: int, span: tuple[int, int, int, int] | None
) -> ast.Call | None:
    """Return the call with this span; without a span, the only call of a `...Config` in this
    line.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if span is not None:
        spans = {
            (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset): call
            for call in reversed(calls)
        }
        return spans.get(span)
    there = [call for call in calls if call.lineno <= line <= (call.end_lineno or call.lineno)]
    with_configs = [
        call
        for call in there
        if getattr(call.func, "attr", getattr(call.func, "id", "")).endswith("Config")
    ]
    return with_configs[0] if len(with_configs) == 1 else None


def _why_not(node: ast.Call, name: str, value: object, call: Call) -> str | None:
    """Return the reason against editing this argument; None: it can be edited."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"Python has no plain value for {value}"
    if name in call.changed:
        return "it is assigned after the call"
    keyword = next((one for one in node.keywords if one.arg == name), None)
    if keyword is not None:
        return (
            None
            if _is_literal(keyword.value)
            else f"it is given as {ast.unparse(keyword.value)}, which is no plain value"
        )
    return (
        "it may come through the ** in the call"
        if name in call.expanded or "*" in call.expanded
        else None
    )


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _edited(source: bytes, node: ast.Call, changes: Mapping[str, KnobValue]) -> bytes:
    """Applied from the end to the beginning, so that positions stay valid."""
    starts = [
        0,
        *(match.end() for match in re.finditer(rb"\r\n|\n|\r", source)),
    ]  # of Python's lines: a form feed ends none
    edits: list[tuple[int, int, bytes]] = []
    added = dict(changes)
    for keyword in node.keywords:
        if keyword.arg in added:
            begin, end = _begin(starts, keyword.value), _end(starts, keyword.value)
            edits.append((begin, end, repr(added.pop(keyword.arg)).encode()))
    if added:
        edits.append(_insertion(source, starts, node, added))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


def _insertion(
    source: bytes, starts: list[int], node: ast.Call, added: Mapping[str, KnobValue]
) -> tuple[int, int, bytes]:
    """Return an edit that appends arguments in the call's own style: inline, or one per line."""
    words = [f"{name}={value!r}".encode() for name, value in added.items()]
    close = _end(starts, node) - 1
    last = max(
        (_end(starts, one) for one in (*node.args, *(k.value for k in node.keywords))), default=None
    )
    if last is None:
        return close, close, b", ".join(words)
    place, comma = _behind(source, last, close)
    given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    begin = max(_begin(starts, one) for one in given)
    line = source.rfind(b"\n", 0, begin) + 1
    indent = source[line:begin]
    if indent.strip() or line == 0 or source.count(b"\n", _begin(starts, node), close) == 0:
        text = b", ".join(words)
        return (
            (comma, comma, b" " + text + b",")
            if comma is not None
            else (place, place, b", " + text)
        )
    newline = b"\r\n" if source[line - 2 : line] == b"\r\n" else b"\n"
    if comma is None:
        return place, place, b"," + b",".join(newline + indent + word for word in words)
    stop = _end_of_line(source, comma, close)
    return stop, stop, b"".join(newline + indent + word + b"," for word in words)


def _behind(source: bytes, last: int, close: int) -> tuple[int, int | None]:
    """Return the end of the last argument with its parentheses, and the end of its comma, if
    any.
    """
    place, comma, at = last, None, last
    while at < close:
        letter = source[at : at + 1]
        if letter == b"#":
            at = _end_of_line(source, at, close)
            continue
        if letter == b")":
            place = at + 1
        elif letter == b",":
            comma = at + 1
        at += 1
    return place, comma


def _end_of_line(source: bytes, at: int, close: int) -> int:
    """Return the position before the line break; a comment stays with its argument."""
    stop = source.find(b"\n", at, close)
    if stop < 0:
        return at
    return stop - 1 if source[stop - 1 : stop] == b"\r" else stop


def _contains(text: bytes, node: ast.Call, changes: Mapping[str, KnobValue]) -> bool:
    """Return True if the edited call has these values: a wrong edit is never returned."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
        if (call.lineno, call.col_offset, len(call.args)) == (
            node.lineno,
            node.col_offset,
            len(node.args),
        ):
            given = {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in call.keywords
                if _is_literal(keyword.value)
            }
            if all(name in given and given[name] == value for name, value in changes.items()):
                return True
    return False


def _begin(starts: list[int], node: ast.expr | ast.keyword) -> int:
    return starts[node.lineno - 1] + node.col_offset


def _end(starts: list[int], node: ast.expr) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset
