"""Figures of bench-speed: errors by class, order of two settings, intervals, one calibration
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from machine import versions_text

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
    predicted_rows = [row for row in rows if "predicted" in row]
    development = [row for row in predicted_rows if not row["held_back"]]
    held_back = [row for row in predicted_rows if row["held_back"]]
    figures = {
        "all": summary(predicted_rows),
        "development": summary(development),
        "held_back": summary(held_back),
    }
    calibrating = development or held_back
    calibrated = one_row_calibration(held_back, calibrating, SAME_JOB)
    held_back_figures = figures["held_back"]
    met = {
        "median": held_back_figures["median"] <= BARS["median"],
        "within_20_percent": held_back_figures["within_20_percent"] >= BARS["within_20_percent"],
        "order": held_back_figures["order"]["right"]
        >= BARS["order"] * held_back_figures["order"]["pairs"],
        "inside": held_back_figures["inside"] >= BARS["inside"],
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
        "repeated_rows": repeated(predicted_rows),
        "bars": {**BARS, "met": met},
        "bars_met": all(met.values()) and len(predicted_rows) == len(rows),
        "classes": {
            name: summary(group) for name, group in grouped(predicted_rows, "class").items()
        },
        "models_and_gpus": {
            name: summary(group) for name, group in grouped(predicted_rows, "model", "gpus").items()
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


def _same(
    first: Row,
    second: Row,
    facts: Iterable[str],
) -> bool:
    return all(first[fact] == second[fact] for fact in facts)


def order(
    rows: Sequence[Row],
    distinct: float = DISTINCT,
    facts: Sequence[str] = ("model", "environment"),
) -> dict[str, int]:
    """Pairs of rows that share the facts and whose measured speeds differ, and those ordered
    right.
    """
    pairs, right = 0, 0
    for first, second in combinations(rows, 2):
        slow, fast = sorted((first, second), key=lambda row: row["measured"])
        if _same(first, second, facts) and fast["measured"] >= distinct * slow["measured"]:
            pairs += 1
            right += (first["measured"] < second["measured"]) == (
                first["predicted"] < second["predicted"]
            )
    return {"pairs": pairs, "right": right}


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
        for calibration in calibrating:
            if calibration is not row and _same(calibration, row, facts):
                corrected = row["predicted"] * calibration["measured"] / calibration["predicted"]
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
    groups = [group for group in grouped(rows, *REPEATED).values() if len(group) > 1]
    apart = []
    for group in groups:
        apart.append(
            max(row["measured"] for row in group) / min(row["measured"] for row in group) - 1
        )
    return (
        {"pairs": len(apart), "median": round(median(apart), 4), "worst": round(max(apart), 4)}
        if apart
        else {"pairs": 0}
    )


def grouped(rows: Iterable[Row], *facts: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[fact]) for fact in facts), []).append(row)
    return dict(sorted(groups.items()))


def readable(document: Mapping[str, Any]) -> str:
    held_back, ran = document["figures"]["held_back"], document["ran_on"]
    versions = versions_text(ran.get("versions", {}))
    lines = [
        "# Predicted and measured training speed",
        "",
        f"Measured: {document['source']} (each row's link). ",
        (
            f"Predicted: traces without a GPU, {ran.get('date')}, commit {ran.get('commit')},"
            f" {ran.get('cpu')}; {versions}."
        ),
        (
            f"{held_back['rows']} of {len(document['rows'])} rows were held back during"
            " development. Error: predicted / measured - 1."
        ),
        "",
        (
            "| rows | count | median error | within 20 % | worst | order of two right | inside the"
            " interval | interval, high/low |"
        ),
        "|---|---|---|---|---|---|---|---|",
        *_summary_lines(document),
        "",
        *_calibration_lines(document),
        "",
        f"Bars, on the {held_back['rows']} rows held back: "
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
    job = document["calibrated_by_one_row"]
    model = document["calibrated_by_one_row_of_the_model"]
    if not job["pairs"]:
        return ["No row could calibrate another."]
    after, before = f"{job['median']:.1%}", f"{job['median_before']:.1%}"
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


def _right_of_pairs(order: Mapping[str, int]) -> str:
    return f"{order['right']} of {order['pairs']}"


def _order_lines(held_back: Mapping[str, Any]) -> list[str]:
    """Return the order of pairs that differ by more than repeated rows do, and of those that one
    search compares.
    """
    beyond = _right_of_pairs(held_back["order_beyond_noise"])
    job = _right_of_pairs(held_back["order_in_a_job"])
    least = f"{LARGEST_DIFFERENCE - 1:.0%}"
    return [
        (
            f"Of rows held back whose speeds differ by {least} and more, {beyond} pairs are in the"
            " right order; of those"
        ),
        f"with the same model, number of GPUs and method, which one search compares, {job}.",
    ]


def _summary_lines(document: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, figures in document["figures"].items():
        lines.append(_summary_line(name.replace("_", " "), figures))
    for name, figures in document["classes"].items():
        lines.append(_summary_line(name, figures))
    for name, figures in document["models_and_gpus"].items():
        lines.append(_summary_line(f"{name} GPUs", figures))
    return lines


def _summary_line(name: str, figures: Mapping[str, Any]) -> str:
    if not figures["rows"]:
        return f"| {name} | 0 | | | | | | |"
    pairs = figures["order"]
    ordered = _right_of_pairs(pairs)
    return (
        f"| {name} | {figures['rows']} | {figures['median']:.1%} |"
        f" {figures['within_20_percent']:.0%} | {figures['worst']:.1%} | {ordered} |"
        f" {figures['inside']:.0%} | {figures['interval']} |"
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
