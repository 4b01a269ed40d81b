"""Everything that reads what others wrote: with good inputs to start from, and how to call it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import catalog
from autotune.catalog.model_lookup import find_model
from autotune.catalog.space_files import read_space
from autotune.core import units
from autotune.core.secrets import Secrets
from autotune.core.yaml_document import read_document
from autotune.diagnosis import as_document, diagnose
from autotune.estimate.model_shape import shape
from autotune.machine import hardware_detection
from autotune.probe.assembly import Peaks, activity_of, merge_speeds, models_of, tree_peaks
from autotune.probe.command_reply import CommandReply, results_by_rank, results_of
from autotune.probe.device_report import torch_by_phase
from autotune.probe.message_validation import valid_messages
from autotune.probe.root_failure import KernelReport, failure_of
from autotune.report.html.render import read_document as read_answer
from autotune.report.html.render import render
from autotune.request.assignments import parse_holds, parse_searches
from autotune.request.sources.launch_script import read_launch_script
from autotune.request.values import FileChoice
from autotune.search import study_export
from autotune.worker.protocol import Message
from tests.fuzz import mutate

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Parser:
    """Parser under test."""

    inputs: int
    """Number of inputs: the amount that it reads in about ten seconds, at most."""

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
    logs = sorted((ROOT / "tests" / "diagnosis" / "logs").glob("*.log"))
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
    event = mutate.value(dice, dice.choice(EVENTS))
    # Over a socket only JSON comes.
    heard = json.loads(json.dumps(event))
    return heard if isinstance(heard, dict) else {"event": heard}


def _hear(message: Message) -> None:
    """Process a message like a conversation: valid parts become parts of a measurement."""
    answer = CommandReply()
    for heard in valid_messages([message], Secrets({})):
        if heard["event"] in ("measured", "loaded") and heard.get("rank") is not None:
            answer.results[heard["rank"]] = heard
        elif heard["event"] in ("failed", "lost"):
            answer.failures.append(heard)
    results = results_of(answer)
    merge_speeds([result.worst for result in results])
    activity_of(results)
    torch_by_phase(results)
    models_of(results_by_rank(answer))
    peaks = tree_peaks(answer, 5, {}, None)
    assert isinstance(peaks, Peaks) and (peaks.peak_bytes is None or peaks.peak_bytes >= 0)
    assert all((result.setup_seconds or 0) >= 0 for result in results)
    if answer.failures:
        failure_of(
            answer,
            KernelReport(
                out_of_memory=False,
                own_limit=False,
                full=False,
            ),
            "cpu",
            1.0,
        )


def _holds(text: str) -> None:
    parse_holds([text])


def _diagnose(text: str) -> None:
    json.dumps(as_document(diagnose(text)))


def chain(levels: int, style: str) -> str:
    """A small document that is huge once its aliases are replaced."""
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        again = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(
            f"a{level}: &a{level} " + (f"{{<<: [{again}]}}" if style == "merge" else f"[{again}]")
        )
    return "\n".join(lines) + "\n"


def _config(dice: random.Random, folder: Path) -> Path:
    """A model's folder."""
    config = mutate.value(dice, json.loads(dice.choice(_MODELS)))
    text = json.dumps(config) if dice.random() > 0.2 else mutate.text(dice, _MODELS)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


def _shape(folder: Path) -> None:
    shape(find_model(str(folder)).config)


def _page(file: Path) -> None:
    render(read_answer(file))


_SPACES = [file.read_text() for file in sorted((ROOT / "search_spaces").glob("*.yaml"))]
_ANSWER = (ROOT / "examples" / "tiny-qwen2-on-a-cpu" / "recommendation.json").read_text()
_MODELS = [json.dumps(known_model.config) for known_model in catalog.models()]
_CONFIG = "model: x\nbeta: 0.1\nper_device_train_batch_size: 4\nreport_to: [none]\n"
_STUDY = json.dumps(
    {
        "schema": 1,
        "name": "a",
        "directions": ["maximize"],
        "user_attrs": {},
        "system_attrs": {},
        "trials": [],
    }
)

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_LAUNCHES = [
    (
        "set -x\nTP=${1:-2}\nARGS=(\n  data.train_batch_size=$((4 * 8))  # rows\n)\n"
        'if [ -z "$N" ]; then N=8; fi\n'
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={_MODEL} \\\n"
        '  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$N "${ARGS[@]}" \\\n'
        '  actor_rollout_ref.rollout.tensor_model_parallel_size=$TP "$@"\n'
    ),
    (
        "while [[ $# -gt 0 ]]; do case $1 in --model) M=$2; shift 2;; *) shift;; esac; done\n"
        f"NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model ${{M:-{_MODEL}}} \\\r\n"
        "  --num_generations ${9..} --max_length $(echo 10 | tr -d 0) --deepspeed zero2\r\n"
    ),
    "A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 20 + "swift sft --model $A\n",
    "swift sft " + "word " * 20_000 + "\n",
    f"python -m skyrl.train.entrypoints.main_base trainer.policy.model.path={_MODEL} x=$٣\n",
]


def _launch(path: Path) -> None:
    read_launch_script(FileChoice(flag="--from-command", path=str(path)))


PARSERS: dict[str, Parser] = {
    "sizes": Parser(
        inputs=30_000,
        make=_texts("38G", "1.5 GiB", "800MB", "1024B"),
        read=units.parse_bytes,
    ),
    "durations": Parser(
        inputs=20_000,
        make=_texts("1h30m", "90s", "20m", "90"),
        read=units.parse_seconds,
    ),
    "hardware": Parser(
        inputs=8_000,
        make=_texts("2xA100-40G", "local", "cpu", "4xRTX 4090", "1xH100"),
        read=lambda text: hardware_detection.hardware(text, here=()),
    ),
    "held knobs": Parser(
        inputs=15_000,
        make=_texts("beta=0.0", "optim=adamw_torch", "use_vllm=true", "x=null"),
        read=_holds,
    ),
    "searched knobs": Parser(
        inputs=15_000,
        make=_texts("beta=0.0,0.1", "optim=adamw_torch,paged_adamw_8bit"),
        read=lambda text: parse_searches([text]),
    ),
    "events": Parser(
        inputs=15_000,
        make=_event,
        read=_hear,
    ),
    "logs": Parser(
        inputs=3_000,
        make=lambda dice, _: mutate.text(dice, _LOGS),
        read=_diagnose,
    ),
    "spaces": Parser(
        inputs=300,
        make=_files(_SPACES, ".yaml"),
        read=read_space,
    ),
    "configurations": Parser(
        inputs=2_000,
        make=_files([_CONFIG, _CONFIG, chain(12, "list"), chain(12, "merge")], ".yaml"),
        read=read_document,
    ),
    "launch scripts": Parser(
        inputs=1_000,
        make=_files(_LAUNCHES, ".sh"),
        read=_launch,
    ),
    "models": Parser(
        inputs=3_000,
        make=_config,
        read=_shape,
    ),
    "answers": Parser(
        inputs=300,
        make=_files([_ANSWER], ".json"),
        read=_page,
    ),
    "studies": Parser(
        inputs=3_000,
        make=_files([_STUDY], ".json"),
        read=study_export.read,
    ),
}
"""The formats that autotune reads, from a command line, a file, a log or a probe."""

_LOGS = _logs()
