"""Output of programs that change characters and columns of a text: `tr`, `wc`, `cut`, `awk`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.core.shell.posix_patterns import compiled
from autotune.core.shell.quotes import unescaped

# Characters.

_CLASSES = {
    "[:upper:]": "A-Z",
    "[:lower:]": "a-z",
    "[:digit:]": "0-9",
    "[:alpha:]": "A-Za-z",
    "[:alnum:]": "0-9A-Za-z",
    "[:space:]": " \t\n\r\v\f",
    "[:blank:]": " \t",
}
_RANGE = re.compile(r"([!-~])-([!-~])")


def _characters(text: str) -> str:
    """Return the characters of a set of `tr`; empty for one that is not read."""
    for name, members in _CLASSES.items():
        text = text.replace(name, members)
    if "[:" in text or "[=" in text or re.search(r"\[.\*", text):
        return ""
    text = unescaped(text)

    def members_of(match: re.Match[str]) -> str:
        return "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1)))

    return _RANGE.sub(members_of, text)


def tr(
    arguments: Sequence[str],
    received: str,
) -> str | None:
    """`tr a-z A-Z`, `tr -d X`, `tr -cd X` and `tr -s X`."""
    are_options = [len(argument) > 1 and argument[0] == "-" for argument in arguments]
    options = ""
    sets: list[str] = []
    for argument, is_option in zip(arguments, are_options, strict=True):
        if is_option:
            options += argument[1:]
        else:
            sets.append(_characters(argument))
    if not set(options) <= set("cCds") or not sets or not sets[0]:
        return None
    is_complement = "c" in options.lower()
    if "d" in options and len(sets) == 1 and "s" not in options:
        return "".join(char for char in received if (char in sets[0]) is is_complement)
    if options == "s" and len(sets) == 1:
        return re.sub(f"([{re.escape(sets[0])}])\\1+", r"\1", received)
    if len(sets) != 2 or not sets[1]:
        return None
    old, new = sets
    if is_complement and options.lower() in ("c", "cs", "sc") and len(new) == 1:
        changed = re.sub(f"[^{re.escape(old)}]", lambda match: new, received)
        if "s" in options:
            changed = _squeezed(changed, new)
        return changed
    if options not in ("", "s"):
        return None
    new += new[-1] * len(old)
    table = {ord(char): new[place] for place, char in reversed(list(enumerate(old)))}
    changed = received.translate(table)
    if options:
        changed = _squeezed(changed, sets[1])
    return changed


def _squeezed(text: str, characters: str) -> str:
    return re.sub(f"([{re.escape(characters)}])\\1+", r"\1", text)


def wc(
    arguments: Sequence[str],
    received: str,
) -> str | None:
    counts = {
        "-l": received.count("\n"),
        "-w": len(received.split()),
        "-c": len(received.encode()),
        "-m": len(received),
    }
    if len(arguments) != 1 or arguments[0] not in counts:
        return None
    return f"{counts[arguments[0]]}\n"


# Columns.

_AWK = re.compile(
    r"\s*(?:NR\s*==\s*(?P<number>[0-9]+)|/(?P<pattern>[^/]+)/)?\s*"
    r"\{\s*print\s*(?P<field>NF|\$[0-9]|\$NF|)\s*;?\s*\}\s*"
)


def awk(
    arguments: Sequence[str],
    received: str,
) -> str | None:
    """`awk -F, '{print NF}'`, `{print $2}`, `NR==1 {print $1}` and `/text/ {print $NF}`."""
    # 1. The separator and the program.
    separator: str | None = None
    texts = list(arguments)
    if texts and texts[0].startswith("-F"):
        separator = texts.pop(0)[2:]
        if not separator and texts:
            separator = texts.pop(0)
        separator = {"\\t": "\t"}.get(separator, separator)
        if len(separator) != 1 or separator in " t\\":
            return None
    program = _AWK.fullmatch("\0".join(texts))
    if program is None:
        return None
    lines = received.splitlines()
    pattern = None
    if program["pattern"] is not None:
        longest = max(map(len, lines), default=0)
        pattern = compiled(program["pattern"], is_extended=True, longest_text=longest)
        if pattern is None:
            return None

    # 2. What it prints of each line.
    printed: list[str] = []
    for number, line in enumerate(lines, start=1):
        if program["number"] is not None and number != int(program["number"]):
            continue
        if pattern is not None and pattern.search(line) is None:
            continue
        fields: list[str] = []
        if line:
            fields = line.split(separator)
        printed.append(_printed_of(line, fields, program["field"]))
    return "".join(f"{line}\n" for line in printed)


def _printed_of(
    line: str,
    fields: Sequence[str],
    field: str,
) -> str:
    if field == "NF":
        return str(len(fields))
    if field in ("", "$0"):
        return line
    place = len(fields)
    if field != "$NF":
        place = int(field[1:])
    if 0 < place <= len(fields):
        return fields[place - 1]
    return ""


_PLACES = re.compile(r"(?P<first>[0-9]{1,4})?(?P<dash>-)?(?P<last>[0-9]{1,4})?")


def _places(
    text: str,
    count: int,
) -> list[int] | None:
    """Return the places, from 0, that a list such as `1,3-` of `cut` names."""
    places: set[int] = set()
    for part in text.split(","):
        match = _PLACES.fullmatch(part)
        if match is None or not part.strip("-"):
            return None
        first = int(match["first"] or 1)
        last = first
        if match["dash"]:
            last = int(match["last"] or count)
        places.update(range(first - 1, min(last, count)))
    return sorted(places)


def cut(
    arguments: Sequence[str],
    received: str,
) -> str | None:
    """`cut -d/ -f2`, `cut -f1,3-` and `cut -c1-2`."""
    command = " ".join(arguments)
    match = re.fullmatch(r"(?:-d ?(?P<sign>.) )?-(?P<kind>[fc]) ?(?P<places>[0-9,-]+)", command)
    if match is None:
        return None
    is_of_characters = match["kind"] == "c"
    sign = match["sign"] or "\t"
    if is_of_characters:
        sign = ""
    lines: list[str] = []
    for line in received.splitlines():
        fields = list(line)
        if sign:
            fields = line.split(sign)
        places = _places(match["places"], len(fields))
        if places is None:
            return None
        if not is_of_characters and len(fields) == 1:
            lines.append(line)
            continue
        parts = [fields[place] for place in places]
        lines.append(sign.join(parts))
    return "".join(f"{line}\n" for line in lines)
