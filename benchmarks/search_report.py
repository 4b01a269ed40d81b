"""Tables and bars of the search benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from machine import versions_text
from search_studies import ABLATIONS, AFTER, OURS, SECOND, Result

NEVER = float("inf")
MEDIAN_AFTER_10, WORST_TENTH_AFTER_10 = 0.97, 0.92
OOMS, FASTER, LATE, OWN_MS = 1, 0.5, 3, 100
BEHIND_GP, MISLED, NOTICED_WITHIN, MOST_STUDIES = 0.95, 0.9, 3, 0.9
SECOND_PROBES = 5
PREDICTED_ORDER, LEVEL = "predicted order", 1.1
MOST_BELOW, MOST_BELOW_WORSE = 0.05, 0.15
ENOUGH = 9
"""Studies that a median takes."""


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Searcher's studies in figures; what it recommends where anything fits."""
    shares = [result.share for result in results if result.feasible] or [0.0]
    return {
        "studies": len(results),
        **{f"share_after_{count}": _middle(_shares_after(results, count)) for count in AFTER},
        "worst_tenth_after_10": _tenth(_shares_after(results, 10)),
        "share_recommended": _middle(_column(results, "share")),
        "out_of_memory": _middle(_column(results, "out_of_memory")),
        "seconds": _middle(_column(results, "seconds")),
        "seconds_to_95": _finite(_middle(map(_or_never, _column(results, "seconds_to_95")))),
        "reached_95": _rate(result.seconds_to_95 is not None for result in results),
        "reached_97": _rate(result.probes_to_97 is not None for result in results),
        "probes": _middle(_column(results, "probes")),
        "confirmations": _middle(_column(results, "confirmations")),
        "probes_beyond_97": _finite(_middle(map(_probes_beyond_97, results))),
        "loads": _middle(_column(results, "loads")),
        "mean_recommended": _mean(shares),
        "mean_lasting": _mean(_lasting_shares(results)),
        "worst_tenth_recommended": _tenth(shares),
        "recommended_below_95": _rate(share < 0.95 for share in shares),
        "runs_out_later": _share(
            sum(result.runs_out_later is True for result in results),
            sum(result.runs_out_later is not None for result in results),
        ),
        "nothing_fits": _needlessly_empty(results),
        "falsely_refused": _share(
            sum(_column(results, "falsely_refused")), sum(_column(results, "fitting"))
        ),
        "optimum_refused": _rate(_column(results, "refused_better")),
        "own_milliseconds": 1000 * _middle(_column(results, "ask_tell_seconds")),
    }


def _column(results: Sequence[Result], name: str) -> list[Any]:
    return [getattr(result, name) for result in results]


def _shares_after(results: Sequence[Result], count: int) -> list[float]:
    return [result.share_after[count] for result in results]


def _lasting_shares(results: Iterable[Result]) -> list[float]:
    """Return the shares recommended; 0 where a long training of it runs out of memory."""
    shares = []
    for result in results:
        if result.feasible:
            shares.append(0.0 if result.runs_out_later else result.share)
    return shares or [0.0]


def _probes_beyond_97(result: Result) -> float:
    return result.probes - result.probes_to_97 if result.probes_to_97 else NEVER


def _needlessly_empty(results: Sequence[Result]) -> int:
    """Return how many studies of a feasible space said that nothing fits."""
    return sum(result.nothing_fits and result.feasible for result in results)


def bars(
    results: Sequence[Result],
    five_thousand: Mapping[str, float] | None = None,
    everything: Sequence[Result] = (),
) -> list[dict[str, Any]]:
    """Return the bars over these studies, and whether each is met; events that must never
    happen, over `everything`.
    """
    autotunes = [result for result in results if result.searcher == OURS]
    simulated = []
    for result in everything or results:
        if result.searcher == OURS and not result.setup.startswith("table_"):
            simulated.append(result)
    figures, best, rival = summary(autotunes), *_best_rival(results)
    beyond = [_probes_beyond_97(result) for result in autotunes if result.probes_to_97]
    ours_to_95 = NEVER if figures["seconds_to_95"] is None else figures["seconds_to_95"]
    rows = [
        _bar(
            "share of the optimum after 10 probes, median",
            figures["share_after_10"],
            ">=",
            MEDIAN_AFTER_10,
        ),
        _bar(
            "share of the optimum after 10 probes, worst tenth",
            figures["worst_tenth_after_10"],
            ">=",
            WORST_TENTH_AFTER_10,
        ),
        _bar("out-of-memory errors per study, median", figures["out_of_memory"], "<=", OOMS),
        _bar(
            f"seconds to 95%, over those of the best rival ({rival})",
            _ratio(ours_to_95, best),
            "<=",
            FASTER,
        ),
        _bar(
            "probes after 97% was reached until it stopped, median of those that reached it",
            _middle(beyond),
            "<=",
            LATE,
        ),
        _bar(
            f"feasible spaces called nothing_fits, of {len(simulated)} simulated studies",
            _needlessly_empty(simulated),
            "<=",
            0,
        ),
        _bar(
            "largest share of the optimum in any study",
            max(_column(results, "share")),
            "<=",
            1.0,
        ),
    ]
    if five_thousand is not None:
        milliseconds = five_thousand["median_ms"]
        rows.append(
            _bar(
                "milliseconds of the search's own per probe with 5,000 candidates, median",
                milliseconds,
                "<=",
                OWN_MS,
            )
        )
    return rows


def bars_of_worse(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the bars where the truth contradicts the prediction: against GP, and how soon the
    search notices.
    """
    by_name = grouped(
        [result for result in results if result.feasible], lambda result: result.searcher
    )
    autotunes = by_name.get(OURS, [])
    rows, of_gp = [], by_name.get("GP", [])
    for count in AFTER if of_gp else ():
        ratio = _mean(_shares_after(autotunes, count)) / _mean(_shares_after(of_gp, count))
        rows.append(
            _bar(f"mean share after {count} probes, over that of GP", ratio, ">=", BEHIND_GP)
        )
    if of_gp:
        ratio = _mean(_column(autotunes, "share")) / _mean(_column(of_gp, "share"))
        rows.append(
            _bar("mean share recommended, over that of GP after 30 probes", ratio, ">=", BEHIND_GP)
        )
    if again := by_name.get(SECOND):
        within = _rate(result.probes <= SECOND_PROBES for result in again)
        rows.append(
            _bar(f"second studies with at most {SECOND_PROBES} probes", within, ">=", MOST_STUDIES)
        )
    misled = []
    for result in autotunes:
        if result.first_choice is not None and result.first_choice < MISLED:
            misled.append(result)
    if misled:
        soon = _rate(
            result.noticed_after is not None and result.noticed_after <= NOTICED_WITHIN
            for result in misled
        )
        name = f"studies that noticed within {NOTICED_WITHIN} probes, of {len(misled)} misled"
        rows.append(_bar(name, soon, ">=", MOST_STUDIES))
    return rows


def bars_of_rivals(
    results: Sequence[Result],
    most_below: float,
    *,
    in_seconds: bool,
) -> list[dict[str, Any]]:
    """Return the bars against rivals: share recommended, and seconds to 95 % of the optimum. Each
    is compared on the simulated studies that both have.
    """
    by_name: dict[str, dict[tuple[str, int], Result]] = {}
    for result in results:
        if result.feasible and not result.setup.startswith("table_"):
            by_name.setdefault(result.searcher, {})[result.setup, result.seed] = result
    autotunes = by_name.get(OURS, {})
    ratios = {}
    for name, studies in by_name.items():
        shared = autotunes.keys() & studies.keys()
        if name not in (OURS, SECOND, *ABLATIONS) and len(shared) >= ENOUGH:
            mean = _mean(autotunes[key].share for key in shared)
            ratios[name] = mean / _mean(studies[key].share for key in shared)
    if not ratios:
        return []
    best = min(ratios, key=lambda name: ratios[name])
    lasting = {}
    for name in ratios:
        shared = autotunes.keys() & by_name[name].keys()
        of_ours = _lasting_shares(autotunes[key] for key in shared)
        of_rival = _lasting_shares(by_name[name][key] for key in shared)
        lasting[name] = _ratio_of_means(of_ours, of_rival)
    best_lasting = min(lasting, key=lambda name: lasting[name])
    rows = [
        _bar(f"mean share recommended, over that of {best}", ratios[best], ">=", 1.0),
        _bar(
            "the same, 0 where memory runs out in a long training of it, over that of"
            f" {best_lasting}",
            lasting[best_lasting],
            ">=",
            1.0,
        ),
        _bar(
            "studies that recommend less than 95% of the optimum",
            _rate(result.share < 0.95 for result in autotunes.values()),
            "<=",
            most_below,
        ),
    ]
    in_order = by_name.get(PREDICTED_ORDER)
    if in_seconds and in_order:
        ratio = _ratio(_seconds_to_95(autotunes.values()), _seconds_to_95(in_order.values()))
        rows.append(_bar("seconds to 95%, over those in predicted order", ratio, "<=", LEVEL))
    return rows


def _ratio_of_means(shares: Sequence[float], of_rival: Sequence[float]) -> float:
    rival_mean = _mean(of_rival)
    return _mean(shares) / rival_mean if rival_mean else NEVER


def _seconds_to_95(results: Iterable[Result]) -> float:
    return _middle(_or_never(result.seconds_to_95) for result in results)


def _ratio(autotunes: float, rivals: float) -> float:
    """Return the ratio of seconds; a case that nobody solves counts as equal."""
    return NEVER if autotunes == NEVER else 0.0 if rivals == NEVER else autotunes / rivals


def _best_rival(results: Sequence[Result]) -> tuple[float, str]:
    """The competitor with the fewest seconds to 95 % in the median; parts of ours are none, nor
    are medians of a few studies.
    """
    seconds_by_rival: dict[str, float] = {}
    for name, its in sorted(grouped(results, lambda result: result.searcher).items()):
        if name not in (OURS, *ABLATIONS) and len(its) >= ENOUGH:
            seconds_by_rival[name] = _middle(map(_or_never, _column(its, "seconds_to_95")))
    best = min(
        seconds_by_rival, key=lambda name: seconds_by_rival[name], default="nobody else was run"
    )
    return seconds_by_rival.get(best, NEVER), best


def _bar(
    name: str,
    value: float,
    relation: str,
    limit: float,
) -> dict[str, Any]:
    passed = value >= limit if relation == ">=" else value <= limit
    return {
        "bar": name,
        "value": _finite(value),
        "relation": relation,
        "limit": limit,
        "passed": passed,
    }


def markdown(document: Mapping[str, Any]) -> str:
    """The same for readers."""
    machine = document["machine"]
    versions = versions_text(machine["versions"])
    lines = [
        "# The search, compared with known optima",
        "",
        document["about"],
        "",
        (
            f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores; {versions}; commit"
            f" {machine['commit']}."
        ),
        f"Seeds {document['seeds']}, {document['studies']} studies: the last column counts each"
        " searcher's." + _not_run(document["not_run"]),
        "",
        "## Bars",
        "",
        "| bar | value | must be | |",
        "|---|---|---|---|",
    ]
    for b in document["bars"]:
        lines.append(
            f"| {b['bar']} | {_text(b['value'])} | {b['relation']} {b['limit']} |"
            f" {'pass' if b['passed'] else 'FAIL'} |"
        )
    lines += ["", "## All together", "", *_table(document["overall"])]
    for name, rows in document["by_setup"].items():
        lines += [
            "",
            f"## {name}",
            "",
            _distance(document, name),
            "",
            _met(document["bars_by_setup"][name]),
            "",
            *_table(rows),
        ]
    return "\n".join(lines) + "\n"


def _not_run(names: Sequence[str]) -> str:
    return f" Not run: {', '.join(names)}." if names else ""


def _met(some: Sequence[Mapping[str, Any]]) -> str:
    """The bars of one setup in a sentence."""
    missed = []
    for b in some:
        if not b["passed"]:
            missed.append(f"{b['bar']}: {_text(b['value'])}, must be {b['relation']} {b['limit']}")
    return (
        f"{len(some) - len(missed)} of {len(some)} bars"
        f" met{'; missed: ' if missed else ''}{'; '.join(missed)}."
    )


COLUMNS: tuple[tuple[str, str], ...] = (
    ("share_after_5", "after 5"),
    ("share_after_10", "after 10"),
    ("worst_tenth_after_10", "worst tenth"),
    ("share_after_20", "after 20"),
    ("share_recommended", "in the end"),
    ("mean_recommended", "mean in the end"),
    ("mean_lasting", "mean that lasts"),
    ("worst_tenth_recommended", "worst tenth in the end"),
    ("recommended_below_95", "below 95%"),
    ("runs_out_later", "out of memory later"),
    ("out_of_memory", "OOMs"),
    ("probes", "probes"),
    ("seconds", "seconds"),
    ("seconds_to_95", "seconds to 95%"),
    ("reached_95", "reached 95%"),
    ("falsely_refused", "falsely refused"),
    ("nothing_fits", "nothing fits"),
    ("studies", "studies"),
)


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "| searcher | " + " | ".join(title for _, title in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, row in rows.items():
        cells = [_text(row[key]) for key, _ in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _distance(document: Mapping[str, Any], name: str) -> str:
    off = document["off_the_prediction"].get(name)
    if off is None:
        return "Really measured; no predictions on a CPU."
    if not off:
        return (
            "In the first seed's truth no candidate fits: its distance from the prediction is not"
            " stated."
        )
    return "Truth off the prediction, median and worst tenth: " + ", ".join(
        f"{key.replace('_', ' ')} {value:.0%}" for key, value in off.items()
    )


def _text(value: Any) -> str:
    if value is None:
        return "never"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:,.0f}"
    return str(value)


def _middle(values: Iterable[float]) -> float:
    numbers = list(values)
    return statistics.median(numbers) if numbers else NEVER


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _tenth(values: Iterable[float]) -> float:
    """The value that a tenth of the studies stays below or at."""
    numbers = sorted(values)
    return numbers[max(0, int(0.1 * len(numbers)) - 1)] if numbers else NEVER


def _rate(flags: Iterable[bool]) -> float:
    outcomes = list(flags)
    return sum(outcomes) / len(outcomes)


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _or_never(value: float | None) -> float:
    return NEVER if value is None else value


def _finite(value: float) -> float | None:
    """JSON knows no infinity: None is never."""
    return None if value == NEVER else value


def grouped(results: Sequence[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups
