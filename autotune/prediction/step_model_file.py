"""Step models as compact bytes: small enough to ship, readable without a training framework.

A file is a compressed MessagePack document: the model's scalars, and columns of whole numbers. A
column holds differences to the number before, in the narrowest type, because layers repeat: LZMA
then finds one layer in the next.

    column    its values become
    events    0 for an allocation; k for the free of the k-th latest live allocation, which is the
              same number in every layer, as a backward pass frees in reverse order
    ragged    lengths, and all values in a row

A trace of 47,000 events takes 12 kB.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Mark, ModuleUse, Parameter, Trace
from autotune.estimate.screening import Point, StepModel
from autotune.estimate.screening.formulas import Basis, KnownFormulas
from autotune.estimate.screening.loops import PieceLoop
from autotune.estimate.screening.points import Floats, Integers
from autotune.estimate.screening.size_model import ScaledAllocations, SizeModel
from autotune.estimate.screening.stretching import StretchedTrace
from autotune.estimate.screening.work_model import Count, CountShare, WorkModel

FORMAT = 1
PHASES: tuple[Phase, ...] = get_args(Phase)
NO_NUMBER = -1  # a missing layer or allocation
WIDTHS = (np.int8, np.int16, np.int32, np.int64)
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]

LOOP_COLUMNS = ("allocations", "pieces", "full_sizes", "follows_rows")

PackedColumns = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class SurveyedModel:
    """A step model with the points of its survey, which bound its range."""

    model: StepModel
    points: tuple[Point, ...]
    versions: Mapping[str, str]  # of the packages whose code was traced


@dataclass(frozen=True, kw_only=True)
class _Document:
    """Content of a file."""

    format: int
    points: tuple[Point, ...]
    versions: Mapping[str, str]
    trace: Trace  # without the columns
    residual: float
    is_exact: bool
    extra_formula: int
    scaled_groups: int
    size_basis: Basis
    known_basis: Basis
    work_basis: Basis
    counts: tuple[Count, ...]
    short_shares: tuple[CountShare, ...]
    columns: PackedColumns
    loops: int = 0


_DECODER = msgspec.msgpack.Decoder(_Document)


def packed(surveyed: SurveyedModel) -> bytes:
    """Return a step model as the content of a file."""
    return lzma.compress(encoded(surveyed), lzma.FORMAT_XZ, filters=FILTERS)


def unpacked(content: bytes) -> SurveyedModel:
    """Return the step model of a file. ValueError if it is damaged or of another format."""
    try:
        document = lzma.decompress(content)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"not a step model: {error}") from error
    return decoded(document)


def encoded(surveyed: SurveyedModel) -> bytes:
    """Return a step model as a document, not compressed."""
    model = surveyed.model
    sizes = model.sizes
    work = model.work
    trace = model.trace
    columns: PackedColumns = {
        "origin": _column(model.stretched.origin),
        "growth": _column(model.stretched.growth),
        "sizes_at_first": _column(sizes.sizes_at_first),
        "uniform": _column(sizes.uniform),
        "formula_of": _column(sizes.formula_of),
        "coefficients": _matrix(sizes.coefficients),
        "known": _matrix(sizes.known_formulas.coefficients),
        "work": _matrix(work.coefficients),
        "short_work": _matrix(work.short_coefficients),
    }
    for place, group in enumerate(sizes.scaled):
        for name in ("allocations", "parts", "bytes_at_first", "formulas"):
            columns[f"scaled {place} {name}"] = _column(getattr(group, name))
    for place, loop in enumerate(sizes.loops):
        for name in LOOP_COLUMNS:
            columns[f"loop {place} {name}"] = _column(getattr(loop, name))
        columns[f"loop {place}"] = _column([loop.full_bytes, loop.formula])
    columns |= _trace_columns(trace)
    document = _Document(
        format=FORMAT,
        points=surveyed.points,
        versions=surveyed.versions,
        trace=_without_columns(trace),
        residual=model.residual,
        is_exact=sizes.is_exact,
        extra_formula=sizes.extra_formula,
        scaled_groups=len(sizes.scaled),
        size_basis=sizes.basis,
        known_basis=sizes.known_formulas.basis,
        work_basis=work.basis,
        counts=work.counts,
        short_shares=work.short_shares,
        columns=columns,
        loops=len(sizes.loops),
    )
    return msgspec.msgpack.encode(document)


def decoded(content: bytes) -> SurveyedModel:
    """Return the step model of a document. ValueError if it is damaged or of another format."""
    try:
        document = _DECODER.decode(content)
        if document.format != FORMAT:
            raise ValueError(f"format {document.format}")
        return _surveyed(document)
    except (msgspec.DecodeError, LookupError) as error:
        raise ValueError(f"not a step model: {error}") from error


def _surveyed(document: _Document) -> SurveyedModel:
    columns = document.columns
    sizes = _size_model(document)
    origin = _numbers(columns["origin"])
    growth = _numbers(columns["growth"])
    # The trace's own sizes are those at the first point.
    stretched = StretchedTrace(
        trace=document.trace,
        origin=origin,
        growth=growth,
    )
    full_sizes = stretched.sizes_from(sizes.sizes_at_first)
    trace = _with_columns(document.trace, columns, full_sizes)
    model = StepModel(
        stretched=replace(stretched, trace=trace),
        sizes=sizes,
        work=WorkModel(
            basis=document.work_basis,
            counts=document.counts,
            coefficients=_rows(columns["work"], document.work_basis),
            short_shares=document.short_shares,
            short_coefficients=_rows(columns["short_work"], document.work_basis),
        ),
        residual=document.residual,
    )
    return SurveyedModel(
        model=model,
        points=document.points,
        versions=document.versions,
    )


def _size_model(document: _Document) -> SizeModel:
    columns = document.columns
    scaled = []
    for place in range(document.scaled_groups):
        prefix = f"scaled {place}"
        scaled.append(
            ScaledAllocations(
                allocations=_numbers(columns[f"{prefix} allocations"]),
                parts=_numbers(columns[f"{prefix} parts"]),
                bytes_at_first=_numbers(columns[f"{prefix} bytes_at_first"]),
                formulas=_numbers(columns[f"{prefix} formulas"]),
            )
        )
    loops = []
    for place in range(document.loops):
        full_bytes, formula = _numbers(columns[f"loop {place}"]).tolist()
        by_allocation = {name: _numbers(columns[f"loop {place} {name}"]) for name in LOOP_COLUMNS}
        loops.append(PieceLoop(**by_allocation, full_bytes=full_bytes, formula=formula))
    known_formulas = KnownFormulas(
        basis=document.known_basis,
        coefficients=_rows(columns["known"], document.known_basis),
    )
    return SizeModel(
        basis=document.size_basis,
        coefficients=_rows(columns["coefficients"], document.size_basis),
        sizes_at_first=_numbers(columns["sizes_at_first"]),
        uniform=_numbers(columns["uniform"]),
        formula_of=_numbers(columns["formula_of"]),
        scaled=tuple(scaled),
        loops=tuple(loops),
        extra_formula=document.extra_formula,
        is_exact=document.is_exact,
        known_formulas=known_formulas,
    )


# The trace.


def _without_columns(trace: Trace) -> Trace:
    usage = trace.usage
    if usage is not None:
        usage = replace(
            usage,
            parameters=(),
            modules=(),
            uses=(),
        )
    return replace(
        trace,
        sizes=(),
        parts=(),
        events=(),
        marks=(),
        streams={},
        returns={},
        usage=usage,
    )


def _trace_columns(trace: Trace) -> PackedColumns:
    marks = []
    for mark in trace.marks:
        phase = PHASES.index(mark.phase)
        marks.append((mark.event, phase, mark.step, _or_none(mark.layer)))
    columns = {
        "events": _column(_live_ranks(trace.events)),
        "parts": _column(trace.parts),
        **_table("marks", marks, width=4),
        **_table("streams", trace.streams.items(), width=2),
        **_table("returns", trace.returns.items(), width=2),
    }
    if trace.usage is not None:
        columns |= _usage_columns(trace.usage)
    return columns


def _usage_columns(usage: ModuleUse) -> PackedColumns:
    parameters = []
    for parameter in usage.parameters:
        number = _or_none(parameter.number)
        parameters.append(
            (
                parameter.count,
                parameter.size,
                int(parameter.trains),
                _or_none(parameter.layer),
                number,
                parameter.group,
            )
        )
    without_allocation = (NO_NUMBER - 1,)
    uses = [(*use, *without_allocation)[:4] for use in usage.uses]
    owned = [index for indices in usage.modules for index in indices]
    return {
        **_table("parameters", parameters, width=6),
        **_table("uses", uses, width=4),
        "module_lengths": _column([len(indices) for indices in usage.modules]),
        "module_parameters": _column(owned),
    }


def _with_columns(
    trace: Trace,
    columns: PackedColumns,
    sizes: Integers,
) -> Trace:
    marks = []
    for event, phase, step, layer in _tuples("marks", columns, width=4):
        marks.append(
            Mark(
                event=event,
                phase=PHASES[phase],
                step=step,
                layer=_or_missing(layer),
            )
        )
    usage = trace.usage
    if usage is not None:
        usage = _with_usage(usage, columns)
    return replace(
        trace,
        sizes=tuple(sizes.tolist()),
        parts=tuple(_numbers(columns["parts"]).tolist()),
        events=_events(_numbers(columns["events"]).tolist()),
        marks=tuple(marks),
        streams=dict(_tuples("streams", columns, width=2)),
        returns=dict(_tuples("returns", columns, width=2)),
        usage=usage,
    )


def _with_usage(usage: ModuleUse, columns: PackedColumns) -> ModuleUse:
    parameters = []
    for count, size, trains, layer, number, group in _tuples("parameters", columns, width=6):
        parameters.append(
            Parameter(
                count=count,
                size=size,
                trains=bool(trains),
                layer=_or_missing(layer),
                number=_or_missing(number),
                group=group,
            )
        )
    uses = []
    for use in _tuples("uses", columns, width=4):
        uses.append(use if use[3] >= NO_NUMBER else use[:3])
    modules = []
    begin = 0
    owned: list[int] = _numbers(columns["module_parameters"]).tolist()
    for length in _numbers(columns["module_lengths"]).tolist():
        end = begin + length
        modules.append(tuple(owned[begin:end]))
        begin = end
    return replace(
        usage,
        parameters=tuple(parameters),
        modules=tuple(modules),
        uses=tuple(uses),
    )


def _live_ranks(events: Sequence[int]) -> list[int]:
    """Return 0 for each allocation, and for a free its place among the live ones, from the end."""
    live: list[int] = []
    ranks = []
    for event in events:
        if event > 0:
            live.append(event)
            ranks.append(0)
        else:
            place = len(live) - 1
            while live[place] != -event:
                place -= 1
            ranks.append(len(live) - place)
            del live[place]
    return ranks


def _events(ranks: Sequence[int]) -> tuple[int, ...]:
    live: list[int] = []
    events = []
    allocations = 0
    for rank in ranks:
        if rank:
            freed = live.pop(-rank)
            events.append(-freed)
        else:
            allocations += 1
            live.append(allocations)
            events.append(allocations)
    return tuple(events)


def _or_none(number: int | None) -> int:
    return NO_NUMBER if number is None else number


def _or_missing(number: int) -> int | None:
    return None if number == NO_NUMBER else number


# PackedColumns.


def _table(
    name: str,
    rows: Iterable[Sequence[int]],
    width: int,
) -> PackedColumns:
    """Return a column for each place of the rows."""
    matrix = np.array(list(rows), dtype=np.int64).reshape(-1, width)
    columns = {}
    for place in range(width):
        columns[f"{name} {place}"] = _column(matrix[:, place])
    return columns


def _tuples(
    name: str,
    columns: PackedColumns,
    width: int,
) -> Iterable[Any]:
    """Return the rows of a table as tuples."""
    values = [_numbers(columns[f"{name} {place}"]).tolist() for place in range(width)]
    return zip(*values, strict=True)


def _column(values: Sequence[int] | Integers) -> bytes:
    """Return differences in the narrowest type, after a byte that names it."""
    numbers = np.asarray(values, dtype=np.int64)
    differences = np.diff(numbers, prepend=0)
    for code, width in enumerate(WIDTHS):
        narrow = differences.astype(width)
        if np.array_equal(narrow, differences):
            little_endian = narrow.dtype.newbyteorder("<")
            return bytes([code]) + narrow.astype(little_endian).tobytes()
    raise AssertionError("int64 holds every difference")


def _numbers(column: bytes) -> Integers:
    width = np.dtype(WIDTHS[column[0]]).newbyteorder("<")
    differences = np.frombuffer(column, width, offset=1)
    numbers: Integers = np.cumsum(differences, dtype=np.int64)
    return numbers


def _matrix(coefficients: Floats) -> bytes:
    return np.ascontiguousarray(coefficients.T, dtype="<f8").tobytes()


def _rows(column: bytes, basis: Basis) -> Floats:
    by_term = np.frombuffer(column, "<f8").reshape(len(basis.terms), -1)
    return np.ascontiguousarray(by_term.T, dtype=np.float64)
