"""Where the code can be changed, and into what."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
EXTREMES = {"min": "max", "max": "min"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong change: the expression between two offsets of a file is replaced."""

    file: str  # relative to the repository's root
    line: int
    function: str  # qualified name, "" at module level
    at_import: bool  # executed when the module is imported, before any test begins
    kind: str
    start: int
    end: int
    before: str
    after: str
    number: int = 0  # among equal changes of one function

    @property
    def key(self) -> str:
        """Identity that stays when other lines of the file change."""
        return f"{self.file}:{self.function}: {self.before} -> {self.after} #{self.number}"

    def applied_to(self, text: str) -> str:
        encoded = text.encode()
        changed = encoded[: self.start] + self.after.encode() + encoded[self.end :]
        return changed.decode()


def mutants_of(file: Path, root: Path) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    text = file.read_text()
    collector = _Collector(str(file.relative_to(root)), text)
    collector.visit(ast.parse(text))
    in_order = sorted(
        collector.mutants,
        key=lambda mutant: (mutant.start, mutant.end, mutant.after),
    )
    equal_changes: Counter[str] = Counter()
    mutants = []
    for mutant in in_order:
        mutants.append(replace(mutant, number=equal_changes[mutant.key]))
        equal_changes[mutant.key] += 1
    return mutants


def sample(
    mutants: Sequence[Mutant],
    number: int,
    seed: int,
    former_keys: Sequence[str] = (),
) -> list[Mutant]:
    """Choose mutants by chance, no line twice: those of a former choice, then further ones.

    Whether a mutant is chosen depends on its key alone, not on how many there are: a choice stays
    nearly the same while the code changes.
    """

    def draw(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    by_key = {mutant.key: mutant for mutant in mutants}
    former = [by_key[key] for key in former_keys if key in by_key]
    chosen: dict[tuple[str, int], Mutant] = {}
    for mutant in [*former, *sorted(mutants, key=draw)]:
        if len(chosen) == number:
            break
        chosen.setdefault((mutant.file, mutant.line), mutant)
    return sorted(chosen.values(), key=lambda mutant: (mutant.file, mutant.start))


class _Collector(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.mutants: list[Mutant] = []
        self._file = file
        self._text = text.encode()
        self._line_starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._scope: list[str] = []
        self._functions = 0  # around the node that is visited

    # 1. Scopes. Annotations are never executed, defaults with the `def`.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_scope(node.name, [*node.args.defaults, *node.args.kw_defaults])
        self._functions += 1
        self._visit_scope(node.name, node.body)
        self._functions -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_scope(node.name, node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions speak to the type checker."""

    def _visit_scope(self, name: str, children: Sequence[ast.AST | None]) -> None:
        self._scope.append(name)
        for child in children:
            if child is not None:
                self.visit(child)
        self._scope.pop()

    # 2. Changes.

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            operators = list(node.ops)
            operators[place] = COMPARISONS[type(operator)]()
            changed = ast.Compare(node.left, operators, node.comparators)
            self._add("comparison", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        changed_type = OPERATORS.get(type(node.op))
        is_text = any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in ast.walk(node))
        if changed_type is not None and not is_text:
            changed = ast.BinOp(node.left, changed_type(), node.right)
            self._add("operator", node, changed)
            if isinstance(node.op, ast.Add | ast.Sub):
                self._add("dropped term", node, node.left)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        opposite = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        exchanged = ast.BoolOp(opposite, node.values)
        self._add("and, or", node, exchanged)
        shortened = ast.BoolOp(node.op, node.values[:-1])
        self._add("dropped condition", node, shortened)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("dropped not", node, node.operand)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            opposite = ast.Name(EXTREMES[node.func.id])
            changed = ast.Call(opposite, node.args, node.keywords)
            self._add("min, max", node, changed)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        changed = ast.IfExp(node.test, node.orelse, node.body)
        self._add("exchanged choice", node, changed)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            changed = ast.Constant(not value)
        elif isinstance(value, int):
            changed = ast.Constant(value + 1)
        elif isinstance(value, float):
            changed = ast.Constant(2 * value + 1)
        else:
            return
        self._add("constant", node, changed)

    def _add(
        self,
        kind: str,
        node: ast.expr,
        changed: ast.expr,
    ) -> None:
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        mutant = Mutant(
            file=self._file,
            line=node.lineno,
            function=".".join(self._scope),
            at_import=not self._functions,
            kind=kind,
            start=start,
            end=end,
            before=self._text[start:end].decode(),
            after=f"({ast.unparse(ast.fix_missing_locations(changed))})",
        )
        self.mutants.append(mutant)

    def _offset(self, line: int, column: int) -> int:
        return self._line_starts[line - 1] + column


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
