"""Page of `make first-light`: every point as predicted, emulated and measured, side by side, and
the constants of the catalogue that the measured results contradict.

The three words are never mixed: a column holds one kind of figure, and a dash where there is none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_light_constants import Comparison, compared
from gpu_points import PREDICTED
from gpu_record import FILE, read_lines
from machine import versions_text

from autotune.catalog import Gpu
from autotune.core.errors import AutotuneError
from autotune.core.units import GIB
from autotune.machine.hardware_detection import gpu_named

Line = Mapping[str, Any]
BASES = ("emulated", "measured")
ALLOCATED, DEVICE, KV = "torch allocated", "device", "KV cache"
BARS = {ALLOCATED: 0.01, DEVICE: 0.03, KV: 0.005}
"""Differences up to which a figure counts as predicted."""

VERDICTS = {True: "fits", False: "does not fit", None: "undecided"}
NOTHING_MEASURED = (
    "Nothing was measured on this card. An emulated one makes its memory outside torch from these"
    " constants, and has no speed: it cannot contradict them."
)

SEARCHED = (
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "use_vllm",
    "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
)


@dataclass(kw_only=True)
class Results:
    """Everything that is known about one card."""

    card: str
    predicted: dict[str, Line] = field(default_factory=dict)
    emulated: list[Line] = field(default_factory=list)
    measured: list[Line] = field(default_factory=list)

    def lines(self, basis: str) -> list[Line]:
        return self.emulated if basis == "emulated" else self.measured

    def points(self, basis: str) -> dict[str, Line]:
        """Return the points of one kind by key."""
        return self._latest(basis, "point", "key")

    def latest(self, basis: str, kind: str) -> dict[str, Line]:
        """Return the last line for each name."""
        return self._latest(basis, kind, "name")

    def _latest(
        self,
        basis: str,
        kind: str,
        field_name: str,
    ) -> dict[str, Line]:
        lines = {}
        for line in self.lines(basis):
            if line["kind"] == kind:
                lines[line[field_name]] = line
        return lines


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A predicted figure against an emulated or measured one."""

    figure: str
    basis: str
    point: str
    share: float

    @property
    def is_large(self) -> bool:
        return abs(self.share) > BARS[self.figure]


def write_page(folder: Path, same_card: Iterable[Path] = ()) -> None:
    results = read_results(folder, same_card)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "page.md").write_text(page(results))


def read_results(folder: Path, same_card: Iterable[Path] = ()) -> Results:
    """Read the folder's results, and those of the same card in other folders."""
    results = Results(card=folder.name)
    places = [path.resolve() for path in same_card]
    if folder.resolve() not in places:
        places.append(folder.resolve())
    for place in places:
        if (place / PREDICTED).exists():
            text = (place / PREDICTED).read_text()
            results.predicted.update(json.loads(text))
        for line in read_lines(place / FILE):
            results.lines(line["basis"]).append(line)
            results.card = line.get("card", results.card)
    return results


def page(results: Results) -> str:
    sections = [
        [f"# First light: {results.card}", "", *_heads(results)],
        ["## Points", "", *_points(results)],
        ["## Differences", "", *_differences(results)],
        ["## Searches", "", *_searches(results)],
        ["## Constants of the catalogue", "", *_constants(results)],
        ["## Steps", "", *_steps(results)],
    ]
    lines = []
    for section in sections:
        lines += [*section, ""]
    return "\n".join(lines)


def _heads(results: Results) -> list[str]:
    texts = []
    for basis in BASES:
        head = None
        for line in results.lines(basis):
            if line["kind"] == "start":
                head = line
        texts.append(f"- {basis}: nothing yet" if head is None else _head(head))
    return texts


def _head(line: Line) -> str:
    facts = line["machine"]
    return (
        f"- {line['basis']} on {facts['date']}: {line['driver_name']}, {line['memory_mib']} MiB,"
        f" driver {line['driver_version']}; {line['minutes']:g} minutes, times scaled by"
        f" {line['scale']:g}; host: {facts['cpu']}, {facts['cores']} cores;"
        f" {versions_text(facts['versions'])}; commit {facts['commit']}"
    )


def _points(results: Results) -> list[str]:
    """Return three tables; a point has the same number in each of them."""
    outcomes = _table("point", "predicted", *BASES, "tokens/s: predicted", "measured")
    peaks = _table("point", *_columns("torch allocated, GiB"), *_columns("device, GiB"))
    engines = _table("point", "share: requested", *BASES, *_columns("KV cache, tokens"))
    names = _point_names(results)
    for number, key in enumerate(names, start=1):
        name = names[key]
        point = Kinds.of(key, results)
        outcomes.append(_row([f"{number}. {name}", *_outcomes(point)]))
        peaks.append(_row([str(number), *_peaks(point)]))
        if point.predicted.get("kv_cache_tokens"):
            engines.append(_row([str(number), *_engine(point)]))
    return [*outcomes, "", *peaks, "", *engines]


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """One point's lines; an empty one where there is none."""

    predicted: Line
    emulated: Line
    measured: Line

    @classmethod
    def of(cls, key: str, results: Results) -> Kinds:
        return cls(
            predicted=results.predicted.get(key, {}),
            emulated=results.points("emulated").get(key, {}),
            measured=results.points("measured").get(key, {}),
        )


def _table(*columns: str) -> list[str]:
    rule = ["---"] * len(columns)
    return [_row(columns), _row(rule)]


def _columns(figure: str) -> list[str]:
    return [f"{figure}: predicted", *BASES]


def _point_names(results: Results) -> dict[str, str]:
    """Return the names by key, in the order of the predictions."""
    names: dict[str, str] = {}
    sources = [results.predicted]
    for basis in BASES:
        sources.append(results.points(basis))
    for lines in sources:
        for key, line in lines.items():
            names.setdefault(key, f"{line['setup']}: {line.get('point', 'all')}")
    return names


def _outcomes(point: Kinds) -> list[str]:
    speed = point.predicted.get("tokens_per_second") or {}
    return [
        _verdict(point.predicted),
        point.emulated.get("outcome", "-"),
        point.measured.get("outcome", "-"),
        _rounded(speed.get("value")),
        _rounded(point.measured.get("tokens_per_second")),
    ]


def _peaks(point: Kinds) -> list[str]:
    return [
        _interval(point.predicted.get("torch_peak_allocated_bytes")),
        _gib(point.emulated, "torch_allocated_bytes"),
        _gib(point.measured, "torch_allocated_bytes"),
        _interval(point.predicted.get("peak_memory_bytes")),
        _gib(point.emulated, "peak_bytes"),
        _gib(point.measured, "peak_bytes"),
    ]


def _engine(point: Kinds) -> list[str]:
    """Return the share, which is one of the limit, and the cache."""
    return [
        str(point.predicted["engine_share"]),
        str(point.emulated.get("engine_share") or "-"),
        str(point.measured.get("engine_share") or "-"),
        str(point.predicted["kv_cache_tokens"]),
        str(point.emulated.get("kv_cache_tokens") or "-"),
        str(point.measured.get("kv_cache_tokens") or "-"),
    ]


def _verdict(predicted: Line) -> str:
    if "why" in predicted:
        return "not predicted"
    if not predicted:
        return "-"
    return VERDICTS[predicted["fits"]]


def _interval(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "-"
    value = estimate["value"] / GIB
    low = estimate["low"] / GIB
    high = estimate["high"] / GIB
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _gib(line: Line, name: str) -> str:
    """Return a peak. That of a run that ended early says nothing about the whole step."""
    value = line.get(name)
    return f"{value / GIB:.2f}" if value and line["outcome"] == "ok" else "-"


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def differences(results: Results) -> list[Difference]:
    """Return the differences of every point that ended well."""
    every: list[Difference] = []
    for basis in BASES:
        for key, line in results.points(basis).items():
            predicted = results.predicted.get(key, {})
            if line["outcome"] == "ok" and "torch_peak_allocated_bytes" in predicted:
                every += _of_point(line, predicted, basis)
    return every


def _of_point(
    line: Line,
    predicted: Line,
    basis: str,
) -> Iterable[Difference]:
    for figure, share in _shares(line, predicted):
        yield Difference(
            figure=figure,
            basis=basis,
            point=f"{line['setup']}, {line.get('point')}",
            share=share,
        )


def _shares(
    line: Line,
    predicted: Line,
) -> Iterable[tuple[str, float]]:
    if line["torch_allocated_bytes"]:
        allocated = predicted["torch_peak_allocated_bytes"]["value"]
        yield ALLOCATED, allocated / line["torch_allocated_bytes"] - 1
    if line["peak_bytes"]:
        yield DEVICE, predicted["peak_memory_bytes"]["value"] / line["peak_bytes"] - 1
    if line.get("kv_cache_tokens") and predicted.get("kv_cache_tokens"):
        yield KV, predicted["kv_cache_tokens"] / line["kv_cache_tokens"] - 1


def _differences(results: Results) -> list[str]:
    columns = ("figure", "against predicted", "points", "median", "largest", "bar", "beyond it")
    rows = _table(*columns)
    every = differences(results)
    for figure, bar in BARS.items():
        for basis in BASES:
            group = []
            for difference in every:
                if (difference.figure, difference.basis) == (figure, basis):
                    group.append(difference)
            if group:
                summary = _summary(group, bar)
                rows.append(_row([figure, basis, *summary]))
    if len(rows) == 2:
        return ["No point has both a prediction and a result."]
    texts = [*rows, ""]
    for item in every:
        if item.is_large:
            texts.append(f"- {item.basis}, {item.figure}: {item.share:+.2%}: {item.point}")
    for text in disagreements(results):
        texts.append(f"- {text}")
    return texts


def _summary(group: Sequence[Difference], bar: float) -> list[str]:
    shares = []
    beyond = 0
    for difference in group:
        shares.append(abs(difference.share))
        beyond += difference.is_large
    return [
        str(len(group)),
        f"{statistics.median(shares):.2%}",
        f"{max(shares):.2%}",
        f"{bar:.1%}",
        str(beyond),
    ]


def disagreements(results: Results) -> list[str]:
    """Return the points that were predicted to fit and did not, or the reverse."""
    texts = []
    for basis in BASES:
        for key, line in results.points(basis).items():
            fits = results.predicted.get(key, {}).get("fits")
            was_run = line["outcome"] == "ok" or line["outcome"].startswith("oom_")
            if fits is None or not was_run or fits == line["fits"]:
                continue
            texts.append(
                f"{basis}, verdict: predicted that it {'fits' if fits else 'does not fit'}, and it"
                f" ended with {line['outcome']}: {line['setup']}, {line.get('point')}"
            )
    return texts


def _searches(results: Results) -> list[str]:
    texts = []
    for basis in BASES:
        for name, line in results.latest(basis, "search").items():
            texts.append(f"- {basis}, {name}: {_search(line['answer'])}")
    return texts or ["No search has run."]


def _search(answer: Line) -> str:
    if "tried" in answer:
        tried = ", ".join(f"{step['micro_batch']} {step['outcome']}" for step in answer["tried"])
        speed = _rounded(answer["tokens_per_second"])
        return f"micro-batches {tried}; {speed} tokens/s in {answer['device_seconds']:.0f} s"
    recommendation = answer.get("recommendation")
    if not recommendation:
        return str(answer.get("status"))
    knobs = recommendation["knobs"]
    settings = ", ".join(f"{name}={knobs[name]}" for name in SEARCHED if name in knobs)
    peak = (recommendation.get("peak_memory_bytes") or 0) / GIB
    probes = (answer.get("counts") or {}).get("probed")
    return f"{answer['status']}, {probes} probes; {settings}; peak {peak:.1f} GiB"


def _constants(results: Results) -> list[str]:
    gpu = _catalogue_entry(results.card)
    if not results.measured or gpu is None:
        return [NOTHING_MEASURED]
    comparisons = compared(results.measured, results.predicted, gpu)
    rows = _table("constant", "catalogue", "measured", "")
    for comparison in sorted(comparisons, key=lambda comparison: not comparison.contradicted):
        rows.append(_constant(comparison))
    return rows


def _catalogue_entry(name: str) -> Gpu | None:
    try:
        return gpu_named(name)
    except AutotuneError:
        return None


def _constant(item: Comparison) -> str:
    catalogue = f"{item.value:g} ({item.low:g} to {item.high:g}) {item.unit}"
    verdict = "**contradicted**" if item.contradicted else "inside"
    return _row([f"`{item.name}`", catalogue, f"{item.measured:.4g}", verdict])


def _steps(results: Results) -> list[str]:
    rows = _table("step", "basis", "outcome", "seconds")
    for basis in BASES:
        for name, line in results.latest(basis, "step").items():
            seconds = _rounded(line["seconds"])
            rows.append(_row([name, basis, line["outcome"], seconds]))
    return rows


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
