"""Table of predicted against emulated, its summary, and the bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emulated_setups import SETUPS, Setup
from machine import versions_text

from autotune.catalog.model_lookup import find_model
from autotune.estimate import model_shape
from autotune.estimate.engine_passes import outside_torch_bytes

GIB = 1 << 30
ALLOCATED = {"median": 0.003, "share": 0.95, "within": 0.01}
RESERVED, DEVICE, KV_BLOCKS = 0.02, 0.02, 0.005
"""Distances up to which reserved memory beside its bracket, device memory, and blocks count as
equal.
"""

BLOCK_TOKENS = 16

DRIVER_PHASES = {
    "rollout": "rollout",
    "weight sync": "sync",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""Phases that the emulated driver sees as the probe does. Its figures are exact under sleep
mode, where torch's mislead.
"""

BESIDE_SLEEPING = ("sync", "reward", "score", "forward", "backward", "optimizer")
"""Phases beside an engine without a cache, where it has sleep mode."""

REASONS = (Path(__file__).parent / "texts/emulated_reasons.md").read_text().splitlines()

Row = dict[str, Any]


def row(
    setup: Setup,
    lines: Mapping[str, Mapping[str, Any]],
    predicted: Mapping[str, Any],
) -> Row:
    """Return one line of the table. A setup that gave no figure states the reason."""
    figures: Row = {
        "setup": setup.name,
        "model": setup.model,
        "gpus": setup.gpus,
        "method": setup.method,
        "tuning": setup.tuning,
        "batch": f"{setup.micro_batch} x {setup.accumulation}",
        "tokens": f"{setup.prompt} + {setup.completion}",
        "holds": list(setup.holds),
    }
    for kind, line in (("emulated", lines["emulated"]), ("predicted", predicted)):
        if "error" in line:
            return {**figures, "error": f"not {kind}: {line['error']}"}
    measurement, prediction = lines["emulated"]["measurement"], predicted["prediction"]
    figures |= {
        "outcome": measurement["outcome"],
        "fits": prediction["fits"],
        "seconds": lines["emulated"]["seconds"],
        "commit": lines["emulated"]["commit"],
        "doubts": lines["emulated"]["emulator"]["doubts"],
    }
    if measurement["outcome"] != "ok":
        failure = measurement.get("failure") or {}
        return {**figures, "evidence": failure.get("evidence"), "failure": prediction["failure"]}
    return {**figures, **_compared(setup, lines, measurement["memory"], prediction)}


def failed_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """Return rows that have an error instead of figures, by setup."""
    return {row["setup"]: row for row in rows if "error" in row}


def lines_of(row: Row) -> list[Row]:
    """Return the emulated runs of a row, with the figures that a row is made of."""
    if "outcome" not in row:
        return []
    blocks = row.get("kv_blocks")
    effective = (
        {}
        if blocks is None
        else {
            "kv_cache_tokens": blocks["emulated"] * BLOCK_TOKENS,
            "vllm_max_model_length": blocks["max_model_length"],
        }
    )
    figures = {}
    for name in ("allocated", "reserved", "device"):
        figures[name] = (row.get(name) or {}).get("emulated")
    phases = {name: pair["emulated"] for name, pair in row.get("phases", {}).items()}

    def line(kind: str, peaks: Mapping[str, int | None]) -> Row:
        memory = {
            "torch_allocated_bytes": peaks["allocated"],
            "torch_reserved_bytes": peaks["reserved"],
            "phase_peak_bytes": phases,
        }
        return {
            "setup": row["setup"],
            "kind": kind,
            "commit": row["commit"],
            "seconds": row["seconds"],
            "measurement": {
                "outcome": row["outcome"],
                "memory": memory,
                "effective": effective,
                "failure": {"evidence": row.get("evidence")},
            },
            "emulator": {
                "peak_bytes": peaks["device"],
                "phase_peak_bytes": {},
                "doubts": row["doubts"],
            },
        }

    late = {name: (row.get(name) or {}).get("late") for name in figures}
    return [line("emulated", figures), *([line("late", late)] if late["reserved"] else [])]


def _compared(
    setup: Setup,
    lines: Mapping[str, Mapping[str, Any]],
    memory: Mapping[str, Any],
    prediction: Mapping[str, Any],
) -> Row:
    outside = outside_torch_bytes(setup.tensor_parallel, beside_trainer=True).value
    late = lines.get("late", {}).get("measurement", {}).get("memory", {})
    driver, late_peak = (
        lines["emulated"]["emulator"],
        lines.get("late", {}).get("emulator", {}).get("peak_bytes"),
    )
    return {
        "allocated": _beside(
            _with_larger_cache(prediction, "allocated", outside),
            memory["torch_allocated_bytes"],
            late.get("torch_allocated_bytes"),
        ),
        "reserved": _beside(
            _with_larger_cache(prediction, "reserved", outside),
            memory["torch_reserved_bytes"],
            late.get("torch_reserved_bytes"),
        ),
        "device": _beside(
            prediction["peak_memory_bytes"],
            _of_trainer(setup, memory) or driver["peak_bytes"],
            late_peak,
        ),
        "kv_blocks": _kv_blocks(
            setup, lines["emulated"]["measurement"]["effective"], prediction["engine"], outside
        ),
        "phases": _phases(setup, memory, driver, prediction, outside),
    }


def _of_trainer(setup: Setup, memory: Mapping[str, Any]) -> int | None:
    """Return the peak of the first card where the last one has the server's processes; None
    without a server.
    """
    devices = memory.get("devices")
    return devices[0]["peak_bytes"] if devices and setup.has_server else None


def _with_larger_cache(
    prediction: Mapping[str, Any],
    kind: str,
    outside: float,
) -> Mapping[str, float]:
    """Return torch's peak of this kind. An engine's cache takes what vLLM holds outside torch on
    a real card.
    """
    engine_is_charged = prediction["engine"] is not None and any(
        "kv_cache" in phase["parts"] for phase in prediction["phases"]
    )
    peaks = {}
    for end in ("value", "low", "high"):
        peaks[end] = prediction[f"torch_peak_{kind}_bytes"][end] + outside * engine_is_charged
    return peaks


def _beside(
    predicted: Mapping[str, float],
    emulated: float | None,
    upper: float | None = None,
) -> Row | None:
    if not emulated:
        return None
    value = predicted["value"]
    return {
        "predicted": round(value),
        "low": round(predicted["low"]),
        "high": round(predicted["high"]),
        "emulated": round(emulated),
        "late": upper and round(upper),
        "error": round(_error(value, emulated, upper or emulated), 6),
    }


def _kv_blocks(
    setup: Setup,
    effective: Mapping[str, Any],
    engine: Mapping[str, Any] | None,
    outside: float,
) -> Row | None:
    """Return the blocks of the engine's cache, where all layers have one kind of cache."""
    tokens = effective.get("kv_cache_tokens")
    windows = {layer.window for layer in model_shape.shape(find_model(setup.model).config).layers}
    if engine is None or tokens is None or len(windows) > 1:
        return None
    longest = effective["vllm_max_model_length"]
    cache = engine["kv_cache_bytes"]["value"]
    charged = (cache + outside) / cache  # the emulated driver has nothing outside torch
    predicted = round(engine["concurrency"] * charged * math.ceil(longest / BLOCK_TOKENS))
    emulated = tokens // BLOCK_TOKENS
    error = round(predicted / emulated - 1, 6)
    return {
        "predicted": predicted,
        "emulated": emulated,
        "max_model_length": longest,
        "error": error,
    }


def _error(
    value: float,
    low: float,
    high: float,
) -> float:
    """Return the distance to the bracket, as a share of its nearer end; 0 inside."""
    low, high = min(low, high), max(low, high)
    nearest = min(max(value, low), high)
    return value / nearest - 1


def _phases(
    setup: Setup,
    memory: Mapping[str, Any],
    driver: Mapping[str, Any],
    prediction: Mapping[str, Any],
    outside: float,
) -> dict[str, Row]:
    """Return the device memory of each phase that both have."""
    emulated = dict(
        memory["devices"][0]["phase_peak_bytes"]
        if setup.has_server and memory.get("devices")
        else memory["phase_peak_bytes"]
    )
    for driver_phase, phase in () if setup.has_server else DRIVER_PHASES.items():
        if driver_phase in driver["phase_peak_bytes"] and phase in emulated:
            emulated[phase] = driver["phase_peak_bytes"][driver_phase]
    predicted = {phase["name"]: _charged(phase, outside) for phase in prediction["phases"]}
    comparisons = {}
    for name in predicted:
        if emulated.get(name):
            comparisons[name] = _beside(predicted[name], emulated[name])
    return {name: comparison for name, comparison in comparisons.items() if comparison is not None}


def _charged(phase: Mapping[str, Any], outside: float) -> Mapping[str, float]:
    """Return the peak of a phase without vLLM's memory outside torch, which the emulated driver
    does not have.

    An awake engine has it in its share.
    """
    parts, peak = phase["parts"], phase["peak_bytes"]
    is_beside_sleeping = (
        phase["name"] in BESIDE_SLEEPING and "engine" in parts and "kv_cache" not in parts
    )
    return {end: peak[end] - outside * is_beside_sleeping for end in ("value", "low", "high")}


def document(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    compared = [row for row in rows if "allocated" in row]
    return {
        "schema": 1,
        "ran_on": dict(facts),
        "counts": _counts(rows, compared),
        "bars": _bars(compared),
        "rows": list(rows),
    }


def _counts(rows: Sequence[Row], compared: Sequence[Row]) -> dict[str, int]:
    ended = [row for row in rows if row.get("outcome", "ok") != "ok"]
    return {
        "setups": len(rows),
        "compared": len(compared),
        "out_of_memory_or_refused": len(ended),
        "not_run": sum("error" in row for row in rows),
        "verdicts_wrong": (
            sum(row["fits"] is True for row in ended if row["outcome"].startswith("oom"))
            + sum(row["fits"] is False for row in compared)
        ),
    }


def _bars(rows: Sequence[Row]) -> dict[str, Any]:
    phases = []
    for row in rows:
        if _has_engine(row):
            phases.extend(row["phases"].values())
    return {
        "allocated": _bar(_column(rows, "allocated"), ALLOCATED["within"]),
        "reserved": _bar(_column(rows, "reserved"), RESERVED),
        "device": _bar(_column(rows, "device"), DEVICE),
        "device by phase, vLLM colocated": _bar(phases, DEVICE),
        "KV blocks": _bar(_column(rows, "kv_blocks"), KV_BLOCKS),
    }


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _has_engine(row: Row) -> bool:
    return "use_vllm=true" in row["holds"]


def _bar(pairs: Sequence[Row | None], within: float) -> dict[str, Any]:
    errors = sorted(abs(pair["error"]) for pair in pairs if pair)
    if not errors:
        return {"rows": 0, "within": within}
    return {
        "rows": len(errors),
        "within": within,
        "median": round(statistics.median(errors), 6),
        "share": sum(error <= within for error in errors) / len(errors),
        "worst": errors[-1],
    }


def readable(document: Mapping[str, Any]) -> str:
    rows = document["rows"]
    parts = (_head(document), _summary(document["bars"]), REASONS, _table(rows), _by_phase(rows))
    return "\n\n".join(map("\n".join, parts)) + "\n"


def _head(document: Mapping[str, Any]) -> list[str]:
    ran, counts = document["ran_on"], document["counts"]
    return [
        "# Predicted against emulated",
        "",
        (
            f"`make bench-emulated` on {ran['date']}, {ran['cores']} cores ({ran['cpu']}), no GPU;"
            f" commit {ran['commit']}."
        ),
        "Environment: " + versions_text(ran["versions"], "; ") + ".",
        "",
        (
            f"{counts['setups']} of {len(SETUPS)} setups were run, {counts['compared']} compared,"
            f" {counts['out_of_memory_or_refused']} failed on the emulated cards,"
            f" {counts['not_run']} could not be run or predicted. Wrong verdicts:"
            f" {counts['verdicts_wrong']}."
        ),
        "",
        (
            "Emulated figures come from the framework's real code on emulated cards"
            " ([how](../../docs/emulated-gpus.md)). They are"
        ),
        (
            "no measurements: context, kernels and NCCL's buffers are the same figures of the"
            " catalogue on both sides, so that"
        ),
        (
            "device memory compares everything but these. Two figures are a bracket: work that is"
            " done at once, and as late as a"
        ),
        "card's queue allows. A difference is the distance to the bracket.",
    ]


def _summary(bars: Mapping[str, Any]) -> list[str]:
    lines = ["| figure | rows | median | within | share | worst |", "|---|---|---|---|---|---|"]
    for name, bar in bars.items():
        if bar["rows"]:
            shares = [
                f"{bar['median']:.2%}",
                f"{bar['within']:.1%}",
                f"{bar['share']:.1%}",
                f"{bar['worst']:.2%}",
            ]
            lines.append(f"| {name} | {bar['rows']} | " + " | ".join(shares) + " |")
    return lines


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Each figure: predicted and emulated GiB, and the difference.",
        "",
        (
            "| model | GPUs | method | batch | tokens | settings | allocated | reserved | device |"
            " KV blocks | emulated at | |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [_figure(row.get(kind)) for kind in ("allocated", "reserved", "device")]
        blocks = row.get("kv_blocks")
        cells = [
            row["model"],
            row["gpus"],
            f"{row['method']} {row['tuning']}",
            row["batch"],
            row["tokens"],
            ", ".join(row["holds"]),
            *figures,
            (
                f"{blocks['predicted']}, {blocks['emulated']}, {blocks['error']:+.2%}"
                if blocks
                else ""
            ),
            row.get("commit", ""),
            _said(row),
        ]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return lines


def _figure(pair: Row | None) -> str:
    if not pair:
        return ""
    emulated = f"{pair['emulated'] / GIB:.3f}" + (
        f" to {pair['late'] / GIB:.3f}" if pair.get("late") else ""
    )
    return f"{pair['predicted'] / GIB:.3f}, {emulated}, {pair['error']:+.2%}"


def _said(row: Row) -> str:
    if "error" in row:
        return str(row["error"])[:200]
    if "allocated" not in row:
        verdict = {True: "fits", False: "does not fit", None: "open"}[row["fits"]]
        return f"emulated: {row['outcome']} ({str(row['evidence'])[:160]}); predicted: {verdict}"
    return "doubts: " + " ".join(row["doubts"])[:200] if row["doubts"] else ""


def _cell(value: object) -> str:
    return str(value).replace("\n", " ").replace("|", "/")


def _by_phase(rows: Sequence[Row]) -> list[str]:
    lines = [
        (
            "Device memory by phase, where both have it: predicted and emulated GiB, and the"
            " difference."
        ),
        "",
    ]
    names = list(dict.fromkeys(name for row in rows for name in row.get("phases", {})))
    lines += ["| setup | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in rows:
        if row.get("phases"):
            lines.append(
                f"| {row['setup']} | "
                + " | ".join(_figure(row["phases"].get(name)) for name in names)
                + " |"
            )
    return lines
