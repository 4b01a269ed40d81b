"""Figures of bench-speed: errors by class, order of two settings, intervals, one calibration
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

Row = Mapping[str, Any]

DISTINCT = 1.02
"""Smallest ratio of two measured speeds whose order counts: repeated rows differ by 1.1 % in the
median.
"""

LARGEST_DIFFERENCE = 1.04
"""Ratio of two measured speeds that no repeated row reaches (3.8 %)."""

SAME_JOB = ("model", "gpus", "tuning")
"""Facts that all candidates of one job share, and so a probe and the candidates that it
corrects.
"""

REPEATED = ("model", "gpus", "tuning", "framework_config", "micro_batch", "length")
"""Facts of a row that was measured in both environments."""

BARS = {"median": 0.06, "within_20_percent": 0.95, "order": 0.97, "inside": 0.80, "calibrated": 0.5}


def document(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    known = [row for row in rows if "predicted" in row]
    development = [row for row in known if not row["held_back"]]
    held_back = [row for row in known if row["held_back"]]
    figures = {
        "all": summary(known),
        "development": summary(development),
        "held_back": summary(held_back),
    }
    calibrating = development or held_back
    calibrated = one_row_calibration(held_back, calibrating, SAME_JOB)
    found = figures["held_back"]
    met = {
        "median": found["median"] <= BARS["median"],
        "within_20_percent": found["within_20_percent"] >= BARS["within_20_percent"],
        "order": found["order"]["right"] >= BARS["order"] * found["order"]["pairs"],
        "inside": found["inside"] >= BARS["inside"],
        "calibrated": calibrated["median"] <= BARS["calibrated"] * calibrated["median_before"],
    }
    return {
        "schema": 1,
        "ran_on": dict(facts),
        "source": (
            "fms-acceleration, scripts/benchmarks/refs: 100 steps of sft_trainer on A100-80G,"
            " packed rows"
        ),
        "figures": figures,
        "calibrated_by_one_row": calibrated,
        "calibrated_by_one_row_of_the_model": one_row_calibration(
            held_back, calibrating, ("model",)
        ),
        "repeated_rows": repeated(known),
        "bars": {**BARS, "met": met},
        "bars_met": all(met.values()) and len(known) == len(rows),
        "classes": {name: summary(several) for name, several in grouped(known, "class").items()},
        "models_and_gpus": {
            name: summary(several) for name, several in grouped(known, "model", "gpus").items()
        },
        "rows": list(rows),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    errors = sorted(abs(row["error"]) for row in rows)
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(rows),
        "median": round(median(errors), 4),
        "median_ratio": round(median(1 + row["error"] for row in rows), 4),
        "within_20_percent": round(sum(error <= 0.2 for error in errors) / len(errors), 4),
        "worst": errors[-1],
        "inside": round(
            sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows), 4
        ),
        "interval": round(median(row["high"] / row["low"] for row in rows), 2),
        "order": order(rows),
        "order_beyond_noise": order(rows, distinct=LARGEST_DIFFERENCE),
        "order_in_a_job": order(rows, facts=(*SAME_JOB, "environment")),
    }


def order(
    rows: Sequence[Row],
    distinct: float = DISTINCT,
    facts: Sequence[str] = ("model", "environment"),
) -> dict[str, int]:
    """Pairs of rows that share the facts and whose measured speeds differ, and those ordered
    right.
    """
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if all(one[fact] == other[fact] for fact in facts)
        and max(one["measured"], other["measured"])
        >= distinct * min(one["measured"], other["measured"])
    ]
    right = sum(
        (one["measured"] < other["measured"]) == (one["predicted"] < other["predicted"])
        for one, other in pairs
    )
    return {"pairs": len(pairs), "right": right}


def one_row_calibration(
    rows: Sequence[Row],
    calibrating: Sequence[Row],
    facts: Sequence[str],
) -> dict[str, Any]:
    """Errors of `rows`, each corrected by the ratio of every other calibrating row that shares
    the given facts.
    """
    before, after = [], []
    for row in rows:
        for other in calibrating:
            if other is not row and all(other[fact] == row[fact] for fact in facts):
                corrected = row["predicted"] * other["measured"] / other["predicted"]
                before.append(abs(row["error"]))
                after.append(abs(corrected / row["measured"] - 1))
    if not after:
        return {"pairs": 0, "median": None, "median_before": None}
    return {
        "pairs": len(after),
        "median": round(median(after), 4),
        "median_before": round(median(before), 4),
    }


def repeated(rows: Sequence[Row]) -> dict[str, Any]:
    """Differences of rows measured twice, half a year apart, with other releases."""
    groups = [several for several in grouped(rows, *REPEATED).values() if len(several) > 1]
    apart = [
        max(one["measured"] for one in several) / min(one["measured"] for one in several) - 1
        for several in groups
    ]
    return (
        {"pairs": len(apart), "median": round(median(apart), 4), "worst": round(max(apart), 4)}
        if apart
        else {"pairs": 0}
    )


def grouped(rows: Iterable[Row], *facts: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(", ".join(str(row[fact]) for fact in facts), []).append(row)
    return dict(sorted(found.items()))


def readable(document: Mapping[str, Any]) -> str:
    held, ran = document["figures"]["held_back"], document["ran_on"]
    versions = ", ".join(f"{name} {version}" for name, version in ran.get("versions", {}).items())
    lines = [
        "# Predicted and measured training speed",
        "",
        f"Measured: {document['source']} (each row's link). ",
        (
            f"Predicted: traces without a GPU, {ran.get('date')}, commit {ran.get('commit')},"
            f" {ran.get('cpu')}; {versions}."
        ),
        (
            f"{held['rows']} of {len(document['rows'])} rows were held back during development."
            " Error: predicted / measured - 1."
        ),
        "",
        (
            "| rows | count | median error | within 20 % | worst | order of two right | inside the"
            " interval | interval, high/low |"
        ),
        "|---|---|---|---|---|---|---|---|",
        *(
            _summary_line(name.replace("_", " "), found)
            for name, found in document["figures"].items()
        ),
        *(_summary_line(name, found) for name, found in document["classes"].items()),
        *(
            _summary_line(f"{name} GPUs", found)
            for name, found in document["models_and_gpus"].items()
        ),
        "",
        *_calibration_lines(document),
        "",
        f"Bars, on the {held['rows']} rows held back: "
        + ", ".join(
            f"{name.replace('_', ' ')} {'met' if met else 'missed'}"
            for name, met in document["bars"]["met"].items()
        )
        + ".",
        "",
        (
            "| row | model | GPUs | method | micro-batch | held back | predicted tokens/s per GPU |"
            " measured | error |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
        *(_row_line(row) for row in document["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _calibration_lines(document: Mapping[str, Any]) -> list[str]:
    job, model = (
        document[name] for name in ("calibrated_by_one_row", "calibrated_by_one_row_of_the_model")
    )
    if not job["pairs"]:
        return ["No row could calibrate another."]
    after, before = (f"{job[name]:.1%}" for name in ("median", "median_before"))
    kind = "development" if document["figures"]["development"]["rows"] else "other"
    return [
        (
            f"Calibrated by one {kind} row of the same model, number of GPUs and method, which all"
            " candidates of a job share,"
        ),
        (
            f"the median error of the rows held back is {after} ({before} before; {job['pairs']}"
            " pairs)."
        ),
        (
            f"A row of the same model alone does not help: {model['median']:.1%},"
            f" {model['median_before']:.1%} before."
        ),
        *_order_lines(document["figures"]["held_back"]),
        *_repeated_lines(document["repeated_rows"]),
    ]


def _repeated_lines(twice: Mapping[str, Any]) -> list[str]:
    if not twice["pairs"]:
        return []
    return [
        (
            f"{twice['pairs']} rows were measured twice, with other releases, and differ by"
            f" {twice['median']:.1%} in the median and"
        ),
        f"{twice['worst']:.1%} at most.",
    ]


def _order_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the order of pairs that differ by more than repeated rows do, and of those that one
    search compares.
    """
    beyond, job = (
        f"{figures[name]['right']} of {figures[name]['pairs']}"
        for name in ("order_beyond_noise", "order_in_a_job")
    )
    least = f"{LARGEST_DIFFERENCE - 1:.0%}"
    return [
        (
            f"Of rows held back whose speeds differ by {least} and more, {beyond} pairs are in the"
            " right order; of those"
        ),
        f"with the same model, number of GPUs and method, which one search compares, {job}.",
    ]


def _summary_line(name: str, found: Mapping[str, Any]) -> str:
    if not found["rows"]:
        return f"| {name} | 0 | | | | | | |"
    pairs = found["order"]
    ordered = f"{pairs['right']} of {pairs['pairs']}"
    return (
        f"| {name} | {found['rows']} | {found['median']:.1%} | {found['within_20_percent']:.0%} |"
        f" {found['worst']:.1%} | {ordered} | {found['inside']:.0%} | {found['interval']} |"
    )


def _row_line(row: Row) -> str:
    head = f"| [{row['id']}]({row['url']}) | {row['model'].rpartition('/')[2]} | {row['gpus']} "
    head += (
        f"| {row['tuning']}, {row['framework_config']} | {row['micro_batch']} |"
        f" {'yes' if row['held_back'] else 'no'} "
    )
    if "predicted" not in row:
        return head + f"| {row['error']} | | |"
    interval = f"{row['low']:,.0f} to {row['high']:,.0f}"
    return (
        head
        + f"| {row['predicted']:,.0f} ({interval}) | {row['measured']:,.0f} | {row['error']:+.1%} |"
    )
