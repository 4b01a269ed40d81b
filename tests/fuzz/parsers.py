"""Everything that reads what others wrote: with good inputs to start from, and how to call it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import detect, units
from autotune.assignments import parse_holds, parse_searches
from autotune.diagnose import as_document, diagnose
from autotune.document import read_document
from autotune.inside.wire import Message
from autotune.report.page import render
from autotune.report.page.files import read_document as read_answer
from autotune.rig.assemble import (
    Kernel,
    Peaks,
    bodies_by_rank,
    bodies_of,
    exercised_of,
    failure_of,
    merge_speeds,
    models_of,
    tree_peaks,
)
from autotune.rig.conversation import Answer
from autotune.rig.device_report import torch_by_phase
from autotune.rig.heard import well_formed
from autotune.secrets import Secrets
from autotune.spaces import read_space
from autotune.study import moving
from tests.fuzz import mutate

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Parser:
    """One of them."""

    inputs: int
    """How many it gets: as many as it reads in about ten seconds, at most."""

    make: Callable[[random.Random, Path], Any]
    """A broken input, as it would arrive."""

    read: Callable[[Any], object]


def _texts(*seeds: str) -> Callable[[random.Random, Path], str]:
    return lambda dice, _: mutate.text(dice, list(seeds))


def _files(seeds: list[str], suffix: str) -> Callable[[random.Random, Path], Path]:
    def make(dice: random.Random, folder: Path) -> Path:
        file = folder / f"input{suffix}"
        file.write_bytes(mutate.text(dice, seeds).encode("utf-8", "surrogatepass"))
        return file

    return make


def _logs() -> list[str]:
    logs = sorted((ROOT / "tests" / "diagnose" / "logs").glob("*.log"))
    return [log.read_text(errors="replace")[-3000:] for log in logs]


_SPEED = {
    "completion_tokens": 8,
    "cycle_seconds": [1.0, 1.5],
    "cycle_loss_tokens": [64, 64],
    "prompt_tokens": 12,
    "cut_short": False,
    "phase_seconds": {"rollout": 1.0, "other": 1.5},
    "user_reward_seconds": 0.1,
    "borrowed_seconds": 0.0,
}
_TORCH = {"allocated_bytes": 5, "reserved_bytes": 6, "retries": 0, "out_of_memory": 0}
_BODY = {
    "worst": _SPEED,
    "typical": None,
    "optimizer_steps": 2,
    "effective": {"output_dir": "x"},
    "setup_seconds": 0.1,
    "loop_seconds": 2.5,
    "memory": {
        "peak_bytes": 9,
        "phase_peak_bytes": {"rollout": 9},
        "torch_allocated_bytes": None,
        "torch_by_phase": {"rollout": _TORCH},
        "model_bytes": {"weights": 4, "reference_weights": 4},
    },
    "exercised": {
        "optimizer_steps": 2,
        "generations": 1,
        "longest_prompt": 4,
        "seconds": 1.0,
        "cycles": [{"steps": 1, "seconds": 0.5, "peak_bytes": 9, "held_bytes": 8}],
    },
    "world_size": 1,
}
_ERROR = {
    "type": "OutOfMemoryError",
    "text": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "traceback": "Traceback ...",
    "frames": ["a.py:1 in f"],
    "chain": [{"type": "RuntimeError", "text": "x"}],
}
EVENTS: list[Message] = [
    {"event": "measured", "id": 1, "rank": 0, "base_bytes": 1, "stays": True, "result": _BODY},
    {
        "event": "failed",
        "id": 1,
        "rank": 0,
        "phase": "backward",
        "error": _ERROR,
        "base_bytes": 1,
        "stays": True,
        "partial": _BODY,
    },
    {"event": "lost", "id": 1, "rank": 0, "signal": 9, "exit": None},
    {"event": "phase", "id": 1, "rank": 0, "phase": "rollout"},
    {"event": "environment", "pid": 3, "versions": {"python": "3.11"}},
]


def _event(dice: random.Random, _: Path) -> Message:
    made = mutate.value(dice, dice.choice(EVENTS))
    # Over a socket only JSON comes.
    heard = json.loads(json.dumps(made))
    return heard if isinstance(heard, dict) else {"event": heard}


def _hear(message: Message) -> None:
    """As a conversation does it: what is believed becomes parts of a measurement."""
    answer = Answer()
    for heard in well_formed([message], Secrets({})):
        if heard["event"] in ("measured", "loaded") and heard.get("rank") is not None:
            answer.results[heard["rank"]] = heard
        elif heard["event"] in ("failed", "lost"):
            answer.failures.append(heard)
    bodies = bodies_of(answer)
    merge_speeds([body["worst"] for body in bodies if body.get("worst")])
    exercised_of(bodies)
    torch_by_phase(bodies)
    models_of(bodies_by_rank(answer))
    peaks = tree_peaks(answer, 5, {}, None)
    assert isinstance(peaks, Peaks) and (peaks.peak_bytes is None or peaks.peak_bytes >= 0)
    assert all(float(body.get("setup_seconds") or 0) >= 0 for body in bodies)
    if answer.failures:
        failure_of(answer, Kernel(out_of_memory=False, own_limit=False, full=False), "cpu", 1.0)


def _holds(text: str) -> None:
    parse_holds([text])


def _diagnose(text: str) -> None:
    json.dumps(as_document(diagnose(text)))


def _page(file: Path) -> None:
    render(read_answer(file))


_SPACES = [file.read_text() for file in sorted((ROOT / "search_spaces").glob("*.yaml"))]
_ANSWER = (ROOT / "examples" / "tiny-qwen2-on-a-cpu" / "recommendation.json").read_text()
_CONFIG = "model: x\nbeta: 0.1\nper_device_train_batch_size: 4\nreport_to: [none]\n"
_STUDY = json.dumps({"schema": 1, "name": "a", "directions": ["maximize"], "user_attrs": {}, "system_attrs": {}, "trials": []})

PARSERS: dict[str, Parser] = {
    "sizes": Parser(inputs=30_000, make=_texts("38G", "1.5 GiB", "800MB", "1024"), read=units.parse_bytes),
    "durations": Parser(inputs=20_000, make=_texts("1h30m", "90s", "20m", "90"), read=units.parse_seconds),
    "hardware": Parser(
        inputs=8_000,
        make=_texts("2xA100-40G", "local", "cpu", "4xRTX 4090", "1xH100"),
        read=lambda text: detect.hardware(text, here=()),
    ),
    "held knobs": Parser(inputs=15_000, make=_texts("beta=0.0", "optim=adamw_torch", "use_vllm=true", "x=null"), read=_holds),
    "searched knobs": Parser(
        inputs=15_000, make=_texts("beta=0.0,0.1", "optim=adamw_torch,paged_adamw_8bit"), read=lambda text: parse_searches([text])
    ),
    "events": Parser(inputs=15_000, make=_event, read=_hear),
    "logs": Parser(inputs=3_000, make=lambda dice, _: mutate.text(dice, _LOGS), read=_diagnose),
    "spaces": Parser(inputs=300, make=_files(_SPACES, ".yaml"), read=read_space),
    "configurations": Parser(
        inputs=2_000,
        make=_files([_CONFIG], ".yaml"),
        read=read_document,
    ),
    "answers": Parser(inputs=300, make=_files([_ANSWER], ".json"), read=_page),
    "studies": Parser(inputs=3_000, make=_files([_STUDY], ".json"), read=moving.read),
}
"""The formats that autotune reads, from a command line, a file, a log or a probe."""

_LOGS = _logs()
