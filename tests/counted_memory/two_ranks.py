"""The loop of `two_ranks_loop` on two real ranks, and traced for one."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from autotune.core.trace import Trace
from autotune.estimate.sharding import Sharding, apply
from tests.counted_memory import counting, two_ranks_loop

ROOT = Path(__file__).resolve().parents[2]


def on_real_ranks(case: dict[str, Any], folder: Path) -> list[dict[str, int]]:
    """Return each rank's peaks by phase and step: one process per rank, over gloo."""
    file = folder / "case.json"
    file.write_text(json.dumps({**case, "allocator": str(counting.compiled())}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_start(file, rank, port) for rank in range(2)]
    outputs = [process.communicate(timeout=280)[0] for process in ranks]
    for process, text in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, text[-3000:]
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(2)]


def _start(
    file: Path,
    rank: int,
    port: int,
) -> subprocess.Popen[str]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    quiet = {**counting.QUIET, "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.counted_memory.two_ranks_loop", str(file)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in {**place, **quiet}.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def predicted(case: dict[str, Any], rank: int) -> Trace:
    """Return the trace of one rank: traced sharded for FSDP2, rewritten from a plain trace for
    the other kinds.
    """
    sharding = {"kind": case["kind"], "ranks": 2, "rank": rank, "options": case.get("options", {})}
    return apply(followed(case, rank), Sharding.of(sharding)).trace


def followed(
    case: dict[str, Any],
    rank: int,
    device: str = "cpu",
) -> Trace:
    from autotune.worker.tracing import fake_models, fsdp2, parameter_uses
    from autotune.worker.tracing.annotators import StepAnnotator

    spec = {**two_ranks_loop.specification(case), "device": device}
    annotator = StepAnnotator(spec)
    ledger, tracker = annotator.ledger, annotator.tracker
    log, logged = (
        parameter_uses.ParameterUses(ledger, own_nodes=case["kind"] == "zero3"),
        case["kind"] in parameter_uses.SHARDING_KINDS,
    )
    two_ranks_loop.build(
        case
    )  # transformers' imports must precede the patch that treats fake tensors as real
    with fsdp2.process_group(spec, rank=rank), fake_models.real_tensor_paths():
        model = two_ranks_loop.build(case)
        with fake_models.fake_mode_with(tracker, device):
            fake_models.materialise(model)
            model = fsdp2.shard(two_ranks_loop.ready(model, case), spec, tracker)
            gc.collect()
            if logged:
                log.watch(model, tracker)

            def enter(phase: str, step: int) -> None:
                ledger.step = step
                ledger.enter(phase)

            with parameter_uses.zero3_linear(spec):
                log.note_groups(two_ranks_loop.train(model, case, enter).param_groups)
    return _trace(ledger, log if logged else None, device)


def _trace(
    ledger: Any,
    log: Any,
    device: str,
) -> Trace:
    answer = {
        **ledger.as_json(),
        "schema": 1,
        "basis": "traced",
        "versions": {},
        "device": device,
        "layers": two_ranks_loop.SHAPE["num_hidden_layers"],
        "work": [],
        "inventory": {
            "parameters": 0,
            "trainable_parameters": 0,
            "weight_bytes": 0,
            "trainable_bytes": 0,
            "layer_bytes": [],
            "layer_trainable": [],
            "largest_parameter": 0,
        },
        "usage": log.as_json() if log else None,
    }
    return msgspec.convert(answer, Trace)


def peaks(trace: Trace) -> dict[str, int]:
    """Return peaks by phase and step, like `on_real_ranks`; memory held at the start of a phase
    counts.
    """
    peak_bytes: dict[str, int] = {}
    live, key, marks = 0, "", list(trace.marks)
    for at, event in enumerate((*trace.events, 0)):
        while marks and marks[0].event <= at:
            mark = marks.pop(0)
            key = f"{mark.phase}{mark.step}"
            peak_bytes[key] = max(live, peak_bytes.get(key, 0))
        if event:
            live += trace.sizes[event - 1] if event > 0 else -trace.sizes[-event - 1]
            peak_bytes[key] = max(live, peak_bytes.get(key, 0))
    return peak_bytes
