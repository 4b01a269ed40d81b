"""Density of the code, counted room by room: how much each line holds, and names that say nothing.

    python -m tests.density           prints the counts
    python -m tests.density --renew   lowers the limits of tests/density.json to them

The counts are signals, not aims: code that passes and still needs a second reading is not done.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS_FILE = ROOT / "tests" / "density.json"
MAX_COLUMNS = 100

VAGUE_NAMES = frozenset(
    """
    alone asked beside both each fit found given held here kept known left made mine more most
    named one ones other others ours own rest said seen several taken theirs there told wanted
    what where whole words
    """.split()
)
"""Names that fit anything: a reader has to look up what they hold."""

LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, kw_only=True)
class Count:
    """Raw counts of some files; docstrings, comments and layout are left out."""

    code_lines: int = 0
    tokens: int = 0
    wide_lines: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    vague_names: int = 0

    def __add__(self, addend: Count) -> Count:
        counts, added = dataclasses.asdict(self), dataclasses.asdict(addend)
        return Count(**{name: counts[name] + added[name] for name in counts})

    def rates(self) -> dict[str, float]:
        """Return the figures that the limits are about."""
        lines = max(1, self.code_lines)
        return {
            "tokens per code line": round(self.tokens / lines, 1),
            "comprehensions per 100": round(100 * self.comprehensions / lines, 1),
            "conditionals per 100": round(100 * self.conditionals / lines, 1),
            "vague names per 1,000": round(1000 * self.vague_names / lines, 1),
            f"lines over {MAX_COLUMNS} columns": float(self.wide_lines),
        }


def count_file(file: Path) -> Count:
    text = file.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    docstring_lines = _docstring_lines(nodes)

    tokens = 0
    code_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        is_docstring = token.type == tokenize.STRING and line in docstring_lines
        if token.type in LAYOUT_TOKENS or is_docstring:
            continue
        tokens += 1
        code_lines.add(line)

    comprehensions, conditionals, vague_names = 0, 0, 0
    for node in nodes:
        comprehensions += isinstance(node, COMPREHENSIONS)
        conditionals += isinstance(node, ast.IfExp)
        vague_names += _name(node) in VAGUE_NAMES
    return Count(
        code_lines=len(code_lines),
        tokens=tokens,
        wide_lines=sum(len(line) > MAX_COLUMNS for line in text.splitlines()),
        comprehensions=comprehensions,
        conditionals=conditionals,
        vague_names=vague_names,
    )


def _docstring_lines(nodes: list[ast.AST]) -> set[int]:
    lines: set[int] = set()
    for node in nodes:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _name(node: ast.AST) -> str | None:
    """Return the name that this node reads, binds or declares as a parameter."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return None


def count_rooms() -> dict[str, Count]:
    """Return the counts of each folder of autotune/, and of tests/ and benchmarks/ as a whole."""
    rooms: defaultdict[str, Count] = defaultdict(Count)
    for file in sorted((ROOT / "autotune").rglob("*.py")):
        inside = file.relative_to(ROOT / "autotune").parts
        room = f"autotune/{inside[0]}" if len(inside) > 1 else "autotune"
        rooms[room] += count_file(file)
    for room in ("tests", "benchmarks"):
        for file in sorted((ROOT / room).rglob("*.py")):
            rooms[room] += count_file(file)
    return dict(rooms)


def read_limits() -> dict[str, dict[str, float]]:
    limits: dict[str, dict[str, float]] = json.loads(LIMITS_FILE.read_text())
    return limits


def renew() -> None:
    """Lower each limit to today's count. A room's limit never rises; a new room gets one."""
    limits = read_limits() if LIMITS_FILE.exists() else {}
    renewed = {}
    for room, count in count_rooms().items():
        rates = count.rates()
        before = limits.get(room, rates)
        renewed[room] = {name: min(rate, before[name]) for name, rate in rates.items()}
    LIMITS_FILE.write_text(json.dumps(renewed, indent=2) + "\n")


if __name__ == "__main__":
    if "--renew" in sys.argv:
        renew()
    for room, count in count_rooms().items():
        print(room, *(f"{rate:g} {name}" for name, rate in count.rates().items()), sep="\n  ")
