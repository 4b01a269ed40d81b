"""Table of predicted against emulated, its summary, and the bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from emulated_setups import SETUPS, Setup

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

REASONS = """\
What differed, and which side was wrong:

- Prediction, mended: order of addresses. Of free blocks of one size torch takes the one at the
  lowest address. The replay assumed that new segments lie above earlier ones; they lie below (a
  1.5B under full tuning: reserved 3.3% low, equal now). Public A100 rows agree: of 31 predicted
  both ways, nvidia-smi's figure is nearer in 9, five of them by 1.1 to 3.3 points, and farther in
  3, by 0.2 to 1.7 points.
- Prediction, mended: FSDP2. Blocks are counted on the stream that requests them, and TRL's
  reference is one unit, gathered whole (DPO of a 1B: allocated 1.5% low, reserved 22% low; equal
  now).
- Prediction, mended: ZeRO-1 and ZeRO-2. DeepSpeed empties the cache before it flattens each group
  of parameters, divides and updates each group by itself, and keeps the reduced gradients of all
  groups in one block until the last one's turn. The Trainer has two, with and without weight decay
  (a 1.5B: reserved 15% high; equal now). Real ranks with one and with two groups agree to 0.001%.
- Prediction, mended: ZeRO-3. A rollout of the trainer's own gathers all weights beside the rank's
  part of them, parameter by parameter; on two cards half of them were counted (reserved 6% low;
  0.3% high now).
- Prediction, mended: one card. A gradient that is a view is not summed in place; blocks inside a
  kernel are freed in the order of C++; cuBLAS's workspace is requested at its first product; what
  follows the last backward pass is no forward pass. Mixtures could not be traced under torch
  2.11.
- Prediction, mended: rollouts of the trainer's own. Prompts pass the layers in transformers' order,
  keys and values in between, and each token's scores and probabilities are tensors of their own.
  Before, a sum in equal pieces: a step found its cache in other blocks (reserved up to 8% high).
  Under FSDP each pass gathers as the step's forward pass does (7% high).
- Prediction, mended: FSDP1. Each matrix of an adapter is a unit of its own; a frozen layer is
  resharded with the gradients of its inputs, the root at the end; the root's hook gathers the last
  layer ahead; originals live until their unit is sharded; torch from 2.8 on marks no tensors of
  collectives. Public A100 rows, all 72 of FSDP1: nvidia-smi's mean distance 1.1% (2.4% before),
  median 0.7% (1.8%).
- Understood, left: FSDP1 with an adapter, 16% more reserved: one buffer of the root. Nothing waits for the device
  between two steps, so that a frozen root is gathered beside its buffer of the step before; public
  A100 rows with adapters have both. A probe waits between phases, on emulated cards too.
- Prediction, mended: vLLM. While it profiles, torch times kernels on example inputs, the embedding
  among them, unless the compiled graph is on disk (one start was: 0.3% fewer blocks predicted). Sleep
  mode gives the memory of a tied head of its own back behind torch: Llama's cache is larger by it.
  Input embeddings and two cuBLAS workspaces stay while it sleeps.
- vLLM colocated. The emulated driver charges nothing of vLLM's memory outside torch (170 MiB, and 430 for
  tensor parallelism, from logs of real cards): the engine's cache is larger by it, which blocks and allocated are compared
  with, and phases beside a sleeping engine are compared without it. Rows from commit fb01ca3 on were emulated
  with a third cycle, in which weights are pushed beside all that a step leaves.
- Prediction, mended: blocks of a colocated engine among the trainer's. The buffer of input embeddings and the
  main thread's cuBLAS workspace are requested when the engine starts, before what DDP and DeepSpeed prepare
  (a 0.5B under full tuning, reward and score: 4.3% high before; a 7B beside an engine that stays awake: 1.2%
  high). A sleeping engine's pool is on the device in whole segments (sync of a 0.5B: 3.8% low). An adapter's
  merge takes blocks of the size of the largest adapted matrix, not of the model's largest.
- Prediction, mended: ZeRO-3's order of gathers, compared gather by gather (DPO of a 1B with an adapter:
  all 1,024 large ones equal). A reference model is sharded by an engine and a coordinator of its own
  (allocated 3.9% high, reserved 4.3% low before). Of modules that return one tensor the outermost
  begins its backward pass first. Copies out of an invalidated order are on the compute stream. A module
  that ran without gradients between its forward and its backward pass keeps its weights until the end
  (reserved 6.0% low). TRL's checkpointing is reentrant beside an adapter (a 2B: allocated 1.1% low). A
  rollout gathers each parameter in a block of its own (RLOO of a 1B: 8.3% high; a 0.5B: 2.5% low).
- Releases of transformers. These rows are of 5.23. In 5.17 a checkpoint includes the hooks of its layer:
  with an adapter and ZeRO-3, DeepSpeed assigns recomputed frozen weights to the model around the layers
  and keeps all of them until the end of the backward pass. Two real ranks agree to 0.001%.
- Emulation and prediction, mended: NCCL. From 2.22 on, a communicator allocates its buffers in its first
  operation (`runtimeConn` in NCCL's init.cc); the emulated driver charged them when it was created.
  ZeRO-3 creates two and vLLM a third beside it, and only torch's default one carries anything: 0.53 GiB
  less on both sides than in earlier tables. ZeRO-1 and ZeRO-2 use two. A colocated engine under tensor
  parallelism adds two, its own and the one in which TRL gathers prompts (0.5B on two cards: 3.6% low
  before). While the engine starts beside ZeRO-3, weights are there and masters are not (22% high before).
- Prediction, mended: loading in 4 bits. transformers requests one block for all packed weights; the
  statistics of these weights come later, in blocks of their own. The prediction had room for them in the
  first block (a 7B with QLoRA under DDP: reserved 5.1% low, a 1B: 1.7% low).
- Prediction, mended: weights sent to a server. TRL from 1.11 on packs them into buffers on streams of
  their own, which torch keeps from sync to sync (reserved 37% low before; these rows have two syncs). vLLM
  from 0.21 on loads weights into blocks that are not split, so that sizes count that are no multiple of
  2 MiB (cache of a 1.5B 0.9% large before); while it quantises to 4 bits, free segments stay behind that
  sleep mode gives back (cache of a 7B 7% small before). Before, such a probe crashed.
- Prediction and probe, mended: a colocated engine in 4 bits (a 7B: sync 5% low, cache 1.3% large before; 0.7% and
  0.0% now). Packed weights are in blocks that are not split, too; captured graphs keep the segments in which
  matrices are dequantised; statistics are in the pool that sleep mode offloads. On emulated cards, and on real
  ones, merging an adapter gave a module new weights while the probe's loaded model kept the old ones. Left: the
  forward pass 3.3% low, where one block for an unpacked matrix finds no free part of the load's.
- Prediction, mended: loading in 4 bits, matrix by matrix. Each is there whole before it is packed, which divides
  the block that was requested for all (a 14B: reserved 0.5% low, a 1B under DDP 0.8% high before; equal now).
  Public A100 rows agree: torch's measured peak differs by 0.10% at most on one GPU (0.31% before).
- Prediction, mended: DDP. Without unused parameters the first step has one bucket of all gradients; the next
  forward pass replaces it by small ones in the order of the gradients (`_rebuild_buckets`). With unused ones
  (the Trainer's rule: an adapter, or no checkpointing) small ones are there from the beginning (GRPO of a 1B:
  reserved 3.2% high, DPO 1.7% high before; equal now).
- Prediction, mended: FSDP2's loading. All ranks but the first receive each parameter whole on the device and keep
  their shard of it, the next one requested before the last one is freed. The segments stay in the cache (a
  0.5B on four cards: reserved 3.2% high before; 0.1% low now). The first rank has the whole ones from its host and
  frees each before the next: of a 1.5B it reserves 0.5% more than the predicted rank.
- Prediction, mended: ranks of ZeRO-1 and ZeRO-2. A rank keeps whole parameters of which its partition holds an end;
  the rank with most of them is compared, too, and all in their context, which decides where blocks lie (a 0.5B
  on four cards: the second rank reserves one segment of 0.9 GiB more than the first; 15.2% low before, equal
  now). A partition that is one tensor is not flattened.
- Prediction, mended: FSDP2 with an adapter. Waiting for a collective makes no tensor: the trace had a second
  copy of a gathered head (a 7B: allocated 8.7% high, reserved 9%).
- Understood, left: FSDP1 (DPO of a 1B). What is allocated depends on when work is done; emulated as late as
  possible it is 14.5 GiB, at once 12.0, predicted 12.5.
- Understood, left: FSDP2 beside an engine, whose cache is 204 MiB smaller on one rank. The model is on the host
  when the engine starts, so that kernels (195 MiB) are first loaded inside its share; the prediction has 170 MiB
  there, without which blocks are compared. Rank 0 has loaded them before, because a probe draws random weights
  with them. Which rank finds the compiled graph on disk (286 MiB more cache) changes from run to run, and the
  largest process counts.
- Understood, left: GRPO of a 1.5B with an adapter, 16 rows, reserved 3% high. While prompts pass the
  layers, each adapter makes float32 copies of its input and a mask of its dropout, which the predicted
  rollout does not have: the step finds other free blocks. Parameters that FSDP2 keeps on the host
  (`fsdp_offload_params`) are refused.
- Open. Under ZeRO-2 an offloaded optimizer of a 1.5B needs 18 GB of the host beside everything
  else: this machine of 24 GB ended it, which counts as a wrong verdict above.
- `load`: a prediction counts everything until training begins (reference model, DDP's buckets), a
  probe the base model and the engine. No peak depends on it.
""".splitlines()

Row = dict[str, Any]


def row(setup: Setup, lines: Mapping[str, Mapping[str, Any]], predicted: Mapping[str, Any]) -> Row:
    """Return one line of the table. A setup that gave no figure states the reason."""
    made: Row = {
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
            return {**made, "error": f"not {kind}: {line['error']}"}
    measurement, prediction = lines["emulated"]["measurement"], predicted["prediction"]
    made |= {
        "outcome": measurement["outcome"],
        "fits": prediction["fits"],
        "seconds": lines["emulated"]["seconds"],
        "commit": lines["emulated"]["commit"],
        "doubts": lines["emulated"]["emulator"]["doubts"],
    }
    if measurement["outcome"] != "ok":
        failure = measurement.get("failure") or {}
        return {**made, "evidence": failure.get("evidence"), "failure": prediction["failure"]}
    return {**made, **_compared(setup, lines, measurement["memory"], prediction)}


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
    figures = {
        name: (row.get(name) or {}).get("emulated") for name in ("allocated", "reserved", "device")
    }
    phases = {name: pair["emulated"] for name, pair in row.get("phases", {}).items()}

    def line(kind: str, found: Mapping[str, int | None]) -> Row:
        memory = {
            "torch_allocated_bytes": found["allocated"],
            "torch_reserved_bytes": found["reserved"],
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
                "peak_bytes": found["device"],
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
    outside = outside_torch_bytes(setup.tensor_parallel).value
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
    prediction: Mapping[str, Any], kind: str, outside: float
) -> Mapping[str, float]:
    """Return torch's peak of this kind. An engine's cache takes what vLLM holds outside torch on
    a real card.
    """
    here = prediction["engine"] is not None and any(
        "kv_cache" in phase["parts"] for phase in prediction["phases"]
    )
    return {
        end: prediction[f"torch_peak_{kind}_bytes"][end] + outside * here
        for end in ("value", "low", "high")
    }


def _beside(
    predicted: Mapping[str, float], emulated: float | None, upper: float | None = None
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
    setup: Setup, effective: Mapping[str, Any], engine: Mapping[str, Any] | None, outside: float
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


def _error(value: float, low: float, high: float) -> float:
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
    for theirs, ours in () if setup.has_server else DRIVER_PHASES.items():
        if theirs in driver["phase_peak_bytes"] and ours in emulated:
            emulated[ours] = driver["phase_peak_bytes"][theirs]
    found = {phase["name"]: _charged(phase, outside) for phase in prediction["phases"]}
    both = {name: _beside(found[name], emulated[name]) for name in found if emulated.get(name)}
    return {name: one for name, one in both.items() if one is not None}


def _charged(phase: Mapping[str, Any], outside: float) -> Mapping[str, float]:
    """Return the peak of a phase without vLLM's memory outside torch, which the emulated driver
    does not have.

    An awake engine has it in its share.
    """
    parts, peak = phase["parts"], phase["peak_bytes"]
    beside = phase["name"] in BESIDE_SLEEPING and "engine" in parts and "kv_cache" not in parts
    return {end: peak[end] - outside * beside for end in ("value", "low", "high")}


def document(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    compared = [one for one in rows if "allocated" in one]
    return {
        "schema": 1,
        "ran_on": dict(facts),
        "counts": _counts(rows, compared),
        "bars": _bars(compared),
        "rows": list(rows),
    }


def _counts(rows: Sequence[Row], compared: Sequence[Row]) -> dict[str, int]:
    ended = [one for one in rows if one.get("outcome", "ok") != "ok"]
    return {
        "setups": len(rows),
        "compared": len(compared),
        "out_of_memory_or_refused": len(ended),
        "not_run": sum("error" in one for one in rows),
        "verdicts_wrong": (
            sum(one["fits"] is True for one in ended if one["outcome"].startswith("oom"))
            + sum(one["fits"] is False for one in compared)
        ),
    }


def _bars(rows: Sequence[Row]) -> dict[str, Any]:
    phases = [phase for one in rows if _has_engine(one) for phase in one["phases"].values()]
    blocks = [one["kv_blocks"] for one in rows]
    return {
        "allocated": _bar([one["allocated"] for one in rows], ALLOCATED["within"]),
        "reserved": _bar([one["reserved"] for one in rows if one["reserved"]], RESERVED),
        "device": _bar([one["device"] for one in rows], DEVICE),
        "device by phase, vLLM colocated": _bar(phases, DEVICE),
        "KV blocks": _bar(blocks, KV_BLOCKS),
    }


def _has_engine(one: Row) -> bool:
    return "use_vllm=true" in one["holds"]


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
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(document: Mapping[str, Any]) -> list[str]:
    ran, counts = document["ran_on"], document["counts"]
    return [
        "# Predicted against emulated",
        "",
        (
            f"`make bench-emulated` on {ran['date']}, {ran['cores']} cores ({ran['cpu']}), no GPU;"
            f" commit {ran['commit']}."
        ),
        "Environment: "
        + "; ".join(f"{name} {version}" for name, version in ran["versions"].items())
        + ".",
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
    for one in rows:
        figures = [_figure(one.get(kind)) for kind in ("allocated", "reserved", "device")]
        blocks = one.get("kv_blocks")
        cells = [
            one["model"],
            one["gpus"],
            f"{one['method']} {one['tuning']}",
            one["batch"],
            one["tokens"],
            ", ".join(one["holds"]),
            *figures,
            (
                f"{blocks['predicted']}, {blocks['emulated']}, {blocks['error']:+.2%}"
                if blocks
                else ""
            ),
            one.get("commit", ""),
            _said(one),
        ]
        lines.append(
            "| "
            + " | ".join(str(cell).replace("\n", " ").replace("|", "/") for cell in cells)
            + " |"
        )
    return lines


def _figure(pair: Row | None) -> str:
    if not pair:
        return ""
    emulated = f"{pair['emulated'] / GIB:.3f}" + (
        f" to {pair['late'] / GIB:.3f}" if pair.get("late") else ""
    )
    return f"{pair['predicted'] / GIB:.3f}, {emulated}, {pair['error']:+.2%}"


def _said(one: Row) -> str:
    if "error" in one:
        return str(one["error"])[:200]
    if "allocated" not in one:
        verdict = {True: "fits", False: "does not fit", None: "open"}[one["fits"]]
        return f"emulated: {one['outcome']} ({str(one['evidence'])[:160]}); predicted: {verdict}"
    return "doubts: " + " ".join(one["doubts"])[:200] if one["doubts"] else ""


def _by_phase(rows: Sequence[Row]) -> list[str]:
    lines = [
        (
            "Device memory by phase, where both have it: predicted and emulated GiB, and the"
            " difference."
        ),
        "",
    ]
    names = list(dict.fromkeys(name for one in rows for name in one.get("phases", {})))
    lines += ["| setup | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for one in rows:
        if one.get("phases"):
            lines.append(
                f"| {one['setup']} | "
                + " | ".join(_figure(one["phases"].get(name)) for name in names)
                + " |"
            )
    return lines
