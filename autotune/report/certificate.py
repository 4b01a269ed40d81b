"""Certificate: the checklist of the recommended candidate's confirmation.

It is computed from the counters of the probe's ranks. An item that was not done has a reason; none
is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.core.answer import Trial, plain
from autotune.core.candidate import KnobValue
from autotune.core.job import Job
from autotune.core.measurement import LoopActivity, Measurement, Watched
from autotune.core.units import format_bytes

MIN_STEPS = 3
"""Optimizer steps: Adam's state is allocated in the first; the second is the first with all of
it."""

State = Literal["done", "not applicable", "not done"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """Stage of a real run, and its state in the probe."""

    name: str
    state: State
    says: str


def items_of(job: Job, proof: Trial) -> tuple[Item, ...]:
    """Return every item of the certificate, in a fixed order."""
    ran = proof.measurement.exercised
    checks = _CHECKS["online" if ran is None else ran.watched]
    unknown: Check = ("not done", "the probe reported no counters")
    found = {name: unknown if ran is None else check(job, proof, ran) for name, check in checks.items()}
    return tuple(Item(name=name, state=state, says=says) for name, (state, says) in found.items())


def is_complete(items: tuple[Item, ...]) -> bool:
    return all(item.state != "not done" for item in items)


def _lengths(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    settings = proof.candidate.settings
    prompt, completion = settings.get("max_prompt_length"), settings.get("max_completion_length")
    reached = ran.shortest_completion == completion and (prompt is None or ran.shortest_prompt == prompt)
    seen = f"prompts of {_range(ran.shortest_prompt, ran.longest_prompt)}"
    seen += f", completions of {_range(ran.shortest_completion, ran.longest_completion)} tokens"
    forced = ", forced" if job.task.workload.weights == "random" else ""
    return _done(reached), f"{seen}; asked for {prompt} and {completion}{forced}"


def _records(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    says = f"{ran.optimizer_steps} of its own speed, at least {MIN_STEPS} required; the lengths of its rows are unknown"
    return _done(ran.optimizer_steps >= MIN_STEPS), says


def _settings(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    """Compare the effective settings: a framework may change one silently, and then another
    candidate was measured."""
    effective, changed = proof.measurement.effective, rewritten(proof)
    if not effective:
        return "not applicable", "it does not report its settings"
    if changed:
        words = [f"{name}={actual} instead of {requested}" for name, (requested, actual) in changed.items()]
        return "not done", f"it trained with {', '.join(words)}"
    requested = sum(value is not None for value in proof.candidate.settings.values())
    return "done", f"{len(effective)} of {requested} read back from the run itself, none of them changed"


def rewritten(proof: Trial) -> Mapping[str, tuple[KnobValue, object]]:
    """Return the settings that the run changed: name -> (requested, effective)."""
    requested, effective = proof.candidate.settings, proof.measurement.effective
    return {
        name: (requested[name], value)
        for name, value in effective.items()
        if requested.get(name) is not None and not _is_equal(requested[name], value)
    }


def _is_equal(requested: KnobValue, effective: object) -> bool:
    """Compare two values. A name that the run expanded to a file's content (`zero3`) counts as
    equal."""
    if isinstance(effective, dict | list):
        return True
    if isinstance(requested, int | float) and isinstance(effective, int | float):
        return float(requested) == float(effective)
    return str(requested).lower() == str(effective).lower().removeprefix("torch.")  # `torch.bfloat16`


def _rows(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    settings = proof.candidate.settings
    parts = [settings.get(name) for name in ("max_prompt_length", "max_completion_length")]
    longest = sum(part for part in parts if isinstance(part, int)) or settings.get("max_length")
    says = f"of {_range(ran.shortest_prompt, ran.longest_prompt)}; asked for {longest}"
    return _done(ran.shortest_prompt == longest), says


def _steps(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    return _done(ran.optimizer_steps >= MIN_STEPS), f"{ran.optimizer_steps}, at least {MIN_STEPS} required"


def _rollouts(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    says = f"{ran.generations} run, {ran.borrowed_generations} reused"
    return _done(ran.generations >= 2 and not ran.borrowed_generations), says


def _sync(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    if ran.weight_syncs is None:
        return "not applicable", "there is no engine: the trained model itself generates"
    return _done(ran.weight_syncs), f"{ran.weight_syncs} into the engine"


def _sleep(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    if ran.sleeps is None or ran.wakes is None:
        return "not applicable", "there is no engine with a sleep mode"
    cycles = min(ran.sleeps, ran.wakes)
    return _done(cycles), f"{cycles} cycles ({ran.sleeps} sleeps, {ran.wakes} wakes)"


def _save(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    return _done(ran.checkpoint_saves), f"{ran.checkpoint_saves} into scratch, with the optimizer's state"


def _evaluation(job: Job, proof: Trial, ran: LoopActivity) -> Check:
    if ran.evaluations is None:
        return "not applicable", "the configuration never evaluates"
    return _done(ran.evaluations), f"{ran.evaluations} batch at the longest lengths"


def _done(condition: object) -> State:
    return "done" if condition else "not done"


def _range(low: int | None, high: int | None) -> str:
    return "unknown length" if high is None else str(high) if low == high else f"{low} to {high}"


Check = tuple[State, str]
_Checks = Mapping[str, Callable[[Job, Trial, LoopActivity], Check]]
_AFTER: _Checks = {"checkpoint save": _save, "evaluation": _evaluation}
_CHECKS: Mapping[Watched, _Checks] = {
    "online": {
        "longest lengths": _lengths,
        "optimizer steps": _steps,
        "rollouts": _rollouts,
        "weight sync": _sync,
        "sleep and wake": _sleep,
        **_AFTER,
    },
    "offline": {"longest rows": _rows, "optimizer steps": _steps, **_AFTER},
    "outside": {"records": _records, "settings as asked": _settings},
}


def certificate_row(job: Job, proof: Trial | None) -> dict[str, Any] | None:
    """Return the certificate as JSON; null if the budget ended before the confirmation."""
    if proof is None:
        return None
    measured, items = proof.measurement, items_of(job, proof)
    return {
        "trial": proof.number,
        "outcome": str(measured.outcome),
        "complete": is_complete(items) and proof.verdict.fits,
        "items": [plain(item) for item in items],
        "why": proof.verdict.why,
        "peak_bytes": measured.memory.peak_bytes,
        "limit_bytes": measured.memory.limit_bytes,
        "margin_bytes": proof.verdict.margin_bytes,
        "peak_by": peak_by(measured),
        "devices": _devices(measured),
        "models": [plain(one) for one in measured.memory.models],
        "bound_by": measured.memory.bound_by,
        "verified_on_several_gpus": _on_several(job),
        "optimizer_steps": measured.optimizer_steps,
        "timed_cycles": len(measured.worst.cycle_seconds) if measured.worst else 0,
        "longest_completion_tokens": measured.worst.completion_tokens if measured.worst else None,
        "torch_allocated_bytes": measured.memory.torch_allocated_bytes,
        "torch_reserved_bytes": measured.memory.torch_reserved_bytes,
        "torch_reserved_why": measured.memory.torch_reserved_why,
        "allocation_retries": measured.memory.allocation_retries,
        "phase_seconds": dict(measured.worst.phase_seconds) if measured.worst else {},
        "user_reward_seconds": measured.worst.user_reward_seconds if measured.worst else None,
        "effective": dict(measured.effective),
    }


def _on_several(job: Job) -> bool | None:
    """Return False for several GPUs, which were not verified on real ones yet; None for one
    device."""
    hardware = job.task.hardware
    return False if hardware.kind == "cuda" and hardware.count > 1 else None


def peak_by(measured: Measurement) -> str:
    """Return the source of the peak, as text."""
    known = [device for device in measured.memory.devices if device.peak_bytes is not None]
    if not known:
        return "the process tree's anonymous and shared memory" if measured.memory.peak_bytes is not None else "unknown"
    worst = max(known, key=lambda device: device.peak_bytes or 0)
    emulated = "emulated " if measured.emulated else ""
    return f"{emulated}{worst.measured_by} on device {worst.index}, the worst of {len(measured.memory.devices)}"


def _devices(measured: Measurement) -> list[Mapping[str, Any]]:
    return [
        {"index": device.index, "name": device.name, "peak_bytes": device.peak_bytes, "measured_by": device.measured_by,
         "why": device.why}
        for device in measured.memory.devices
    ]  # fmt: skip


def certificate_lines(job: Job, proof: Trial | None) -> list[str]:
    """Return the certificate as lines for the recommended file and the terminal."""
    if proof is None:
        return ["Not certified: the budget ran out before the longer worst-case probe."]
    items, memory = items_of(job, proof), proof.measurement.memory
    peak = "unknown" if memory.peak_bytes is None else format_bytes(memory.peak_bytes)
    margin = "" if proof.verdict.margin_bytes is None else f", {format_bytes(max(0, proof.verdict.margin_bytes))} left"
    head = "Emulated" if proof.measurement.emulated else "Certified"
    head += "" if is_complete(items) and proof.verdict.fits else " in part"
    lines = [f"{head}: peak {peak} of {format_bytes(memory.limit_bytes)}{margin}, by {peak_by(proof.measurement)}."]
    lines += [f"  {item.name}: {item.state} ({item.says})" for item in items]
    if _on_several(job) is False:
        lines.append("  Not verified on several GPUs: this path has run on one at most.")
    return lines


def describe_models(measured: Measurement) -> str | None:
    """Describe the model tensors of the fullest rank, the largest part first; None if no rank
    reported any."""
    models = measured.memory.models
    if not models:
        return None
    fullest = max(models, key=lambda one: sum(one.bytes.values()))
    parts = sorted(fullest.bytes.items(), key=lambda part: -part[1])
    where = f"rank {fullest.rank}, which holds the most" if len(models) > 1 else "the one rank"
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
    return f"{measured.basis.capitalize()} after an optimizer step, the models' own tensors on {where}: {listed}."
