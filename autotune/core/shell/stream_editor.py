"""What `sed` prints: `s/a/b/`, `d`, `p` and `q` for lines by number or pattern.

sed -E 's/.*-([0-9]+)b.*/\\1/'      sed -n '2p'      sed '/^#/d; 1,3d'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.core.shell.posix_patterns import compiled

MAX_EDITS = 20


@dataclass(frozen=True, kw_only=True)
class _EditOptions:
    script: str
    is_extended: bool
    is_quiet: bool


@dataclass(frozen=True, kw_only=True)
class _Command:
    """One command of a script: for which lines, and what it does."""

    name: str
    first: str = ""  # number, `$` or `/pattern/`; empty: every line
    last: str = ""
    is_negated: bool = False
    pattern: str = ""
    new: str = ""
    flags: str = ""


_ADDRESS = r"[0-9]{1,5}|\$|/(?:[^/\\\n]|\\.)+/"
_SUBSTITUTION = r"s(?P<sign>[/|#,:@!%_])(?P<pattern>.*?)(?<!\\)(?P=sign)"
_SUBSTITUTION += r"(?P<new>.*?)(?<!\\)(?P=sign)(?P<flags>[gpI0-9]*)"
_COMMAND = re.compile(
    rf"\s*(?:(?P<first>{_ADDRESS})(?:,(?P<last>{_ADDRESS}))?)?\s*(?P<not>!)?\s*"
    rf"(?:{_SUBSTITUTION}|(?P<name>[dpq]))\s*(?:;|\n|$)"
)


def edited(
    arguments: Sequence[str],
    received: str,
) -> str | None:
    """Return what `sed` prints of its input; None: its script is not read."""
    options = _options(arguments)
    if options is None:
        return None
    commands = _commands(options.script)
    if commands is None:
        return None
    lines = received.splitlines()
    try:
        printed = list(_printed(lines, commands, options))
    except ValueError:
        return None
    return "".join(f"{line}\n" for line in printed)


def _options(arguments: Sequence[str]) -> _EditOptions | None:
    scripts: list[str] = []
    letters = ""
    remaining = list(arguments)
    while remaining:
        text = remaining.pop(0)
        if text in ("-e", "--expression") and remaining:
            scripts.append(remaining.pop(0))
        elif re.fullmatch(r"-[Ernu]+", text):
            letters += text[1:]
        elif text.startswith("-") or scripts:
            return None
        else:
            scripts.append(text)
    if not scripts:
        return None
    return _EditOptions(
        script="\n".join(scripts),
        is_extended="E" in letters or "r" in letters,
        is_quiet="n" in letters,
    )


def _commands(script: str) -> list[_Command] | None:
    commands: list[_Command] = []
    place = 0
    while place < len(script):
        match = _COMMAND.match(script, place)
        if match is None or match.end() == place or len(commands) > MAX_EDITS:
            return None
        commands.append(
            _Command(
                name=match["name"] or "s",
                first=match["first"] or "",
                last=match["last"] or "",
                is_negated=bool(match["not"]),
                pattern=_without_sign(match["pattern"] or "", match["sign"] or ""),
                new=_without_sign(match["new"] or "", match["sign"] or ""),
                flags=match["flags"] or "",
            )
        )
        place = match.end()
    return commands


def _without_sign(text: str, sign: str) -> str:
    r"""Return the text without the backslash of `s/a\/b/c/`."""
    if not sign:
        return text
    return text.replace(f"\\{sign}", sign)


def _printed(
    lines: Sequence[str],
    commands: Sequence[_Command],
    options: _EditOptions,
) -> Iterator[str]:
    longest = max(map(len, lines), default=0)
    in_range = [False] * len(commands)
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        is_deleted = is_end = False
        for place, command in enumerate(commands):
            matches, in_range[place] = _matches(
                command, in_range[place], line, number, is_last, options, longest
            )
            if matches is command.is_negated:
                continue
            match command.name:
                case "s":
                    line, changed = _substituted(line, command, options, longest)
                    if changed and "p" in command.flags:
                        yield line
                case "p":
                    yield line
                case "d":
                    is_deleted = True
                    break
                case "q":
                    is_end = True
                    break
        if not is_deleted and not options.is_quiet:
            yield line
        if is_end:
            return


def _matches(
    command: _Command,
    is_inside: bool,
    line: str,
    number: int,
    is_last: bool,
    options: _EditOptions,
    longest: int,
) -> tuple[bool, bool]:
    """Return whether a line is one of the command's, and whether its range goes on behind it."""

    def is_at(address: str) -> bool:
        if address == "$":
            return is_last
        if address.isdecimal():
            return number == int(address)
        pattern = _pattern(address[1:-1].replace("\\/", "/"), options, longest)
        return pattern.search(line) is not None

    if not command.first:
        return True, False
    if not command.last:
        return is_at(command.first), False
    if is_inside:
        return True, not is_at(command.last)
    if not is_at(command.first):
        return False, False
    is_over = command.last.isdecimal() and int(command.last) <= number
    return True, not is_over


def _pattern(text: str, options: _EditOptions, longest: int) -> re.Pattern[str]:
    pattern = compiled(text, is_extended=options.is_extended, longest_text=longest)
    if pattern is None or not text:
        raise ValueError("a pattern that is not read")
    return pattern


def _substituted(
    line: str,
    command: _Command,
    options: _EditOptions,
    longest: int,
) -> tuple[str, bool]:
    pattern = _pattern(command.pattern, options, longest)
    if re.sub("[gp]", "", command.flags):
        raise ValueError("the number of a match, or matches in any letters")
    if "g" in command.flags and pattern.search("") is not None:
        raise ValueError("empty matches differ from Python's")

    def new_text(match: re.Match[str]) -> str:
        return re.sub(r"\\.|&", lambda part: _part(part[0], match), command.new, flags=re.DOTALL)

    text, count = pattern.subn(new_text, line, count="g" not in command.flags)
    return text, count > 0


def _part(part: str, match: re.Match[str]) -> str:
    if part == "&":
        return match[0]
    char = part[1]
    if char.isdecimal():
        number = int(char)
        if number > len(match.groups()):
            raise ValueError("a group that is not there")
        return match[number] or ""
    if char.isalpha():
        if char in "nt":
            return {"n": "\n", "t": "\t"}[char]
        raise ValueError("an escape that is not read")
    return char
