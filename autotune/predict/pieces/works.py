"""A step's counted work at any point of a space, in any number of layers: operations, moved bytes, launches by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.measurement import Phase
from autotune.predict.pieces.amounts import Amounts, Name, basis_of
from autotune.predict.pieces.blocks import Stretch
from autotune.predict.pieces.monomials import Floats, Term
from autotune.predict.pieces.points import Sample, rows_of
from autotune.trace import Inventory, Trace, Work

OTHER = ("moved_bytes", "kernels")


@dataclass(frozen=True, kw_only=True)
class Works:
    """Sums by phase, ready for any point."""

    counts: Mapping[Name, Floats]
    """By phase and what is counted: coefficients of the basis' terms."""

    amounts: Amounts
    """What was counted in the short model, inside the layers (True) and outside."""

    def at(self, points: Floats) -> list[tuple[Work, ...]]:
        values = self.amounts.basis.values(points)
        found = {name: np.maximum(0.0, values @ row) for name, row in self.counts.items()}
        phases = list(dict.fromkeys(phase for phase, _ in self.counts))
        return [tuple(_work(phase, found, row) for phase in phases) for row in range(len(points))]


def inventory_of(short: Trace, longer: Trace | None, stretch: Stretch) -> Inventory:
    """The long model's."""
    if longer is None or not stretch.copies:
        return short.inventory
    one, two, copies = short.inventory, longer.inventory, stretch.copies
    group = slice(stretch.first, stretch.first + stretch.period)

    def grown(name: str) -> int:
        before, after = getattr(one, name), getattr(two, name)
        return int(before + copies * (after - before))

    def repeated(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (*layers[: group.stop], *(layers[group] * copies), *layers[group.stop :])

    return replace(
        one,
        parameters=grown("parameters"),
        trainable_parameters=grown("trainable_parameters"),
        weight_bytes=grown("weight_bytes"),
        trainable_bytes=grown("trainable_bytes"),
        layer_bytes=repeated(one.layer_bytes),
        layer_trainable=repeated(one.layer_trainable),
        largest_parameter=max(one.largest_parameter, two.largest_parameter),
    )


def _unexplained(short: Trace, longer: Trace, name: Name, stretch: Stretch) -> float:
    """What one more group of layers adds beyond what is counted inside layers: a batch does not change it."""
    expected = _inside(short, *name) * stretch.period / stretch.layers
    return _count(longer, *name) - _count(short, *name) - expected


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Traces of a short model at several points, of a longer one at the first of them, and of the short one elsewhere."""

    samples: Sequence[Sample]
    longer: Trace | None
    check: Sample | None = None

    def works(self, stretch: Stretch, lent: Works | None, loops: Sequence[Term]) -> Works:
        """Outside the layers it stays, inside it grows with them; what grows otherwise (an optimizer's) is as in `longer`.

        `loops` are terms of sizes: those with a cap tell what is done piece by piece.
        """
        traces = [sample.trace for sample in self.samples]
        names = list(dict.fromkeys((work.phase, what) for trace in traces for work in trace.work for what in _counted(work)))
        points = rows_of([sample.point for sample in self._all])
        known = lent.amounts if lent else Amounts.none()
        basis = basis_of(points, loops, known.basis)
        more = {name: 0.0 if self.longer is None else _unexplained(traces[0], self.longer, name, stretch) for name in names}
        keys = [(inner, name) for inner in (True, False) for name in names]
        rows = {(inner, name): np.array([_part(one.trace, inner, name) for one in self._all]) for inner, name in keys}
        amounts = known.with_those(basis, points, rows)
        times = 1 + stretch.copies * stretch.period / max(1, stretch.layers)
        counts = {name: amounts.of[False, name] + times * amounts.of[True, name] for name in names}
        for name in names:
            counts[name][0] += stretch.copies * more[name]
        return Works(counts=counts, amounts=amounts)

    @property
    def _all(self) -> tuple[Sample, ...]:
        return (*self.samples, *(() if self.check is None else (self.check,)))


def _counted(work: Work) -> list[str]:
    return [*work.flops, *OTHER]


def _count(trace: Trace, phase: Phase, what: str) -> float:
    return sum(_of(work, what) for work in trace.work if work.phase == phase)


def _of(work: Work, what: str) -> float:
    if what == "moved_bytes":
        return float(work.moved_bytes)
    return float(work.kernels) if what == "kernels" else work.flops.get(what, 0.0)


def _part(trace: Trace, inner: bool, name: Name) -> float:
    """Inside the layers, or outside them."""
    return _inside(trace, *name) if inner else _count(trace, *name) - _inside(trace, *name)


def _inside(trace: Trace, phase: Phase, what: str) -> float:
    return sum(work.in_layers.get(what, 0.0) for work in trace.work if work.phase == phase)


def _work(phase: Phase, found: Mapping[tuple[Phase, str], Floats], row: int) -> Work:
    flops = {what: float(counts[row]) for (of, what), counts in found.items() if of == phase and what not in OTHER}
    return Work(
        phase=phase,
        flops=flops,
        moved_bytes=float(found[phase, "moved_bytes"][row]),
        kernels=round(float(found[phase, "kernels"][row])),
    )
