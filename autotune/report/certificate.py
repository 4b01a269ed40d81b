"""The certificate: what the recommended candidate went through before it was recommended, item by item.

Computed from what the probe's ranks counted while it ran. An item that was not done says why; nothing is taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autotune.candidate import KnobValue
from autotune.measurement import Exercised, Measurement, Watched
from autotune.question import Question
from autotune.recommendation import Trial
from autotune.units import format_bytes

FEWEST_STEPS = 3
"""Optimizer steps: Adam's state appears after the first, and the second is the first to run beside it whole."""

State = Literal["done", "not applicable", "not done"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that a real run does, and whether the probe did it."""

    name: str
    state: State
    says: str


def items_of(question: Question, proof: Trial) -> tuple[Item, ...]:
    """Every item of the certificate, in a fixed order."""
    ran = proof.measurement.exercised
    if ran is None:
        said = "the probe did not report what it went through"
        return tuple(Item(name=name, state="not done", says=said) for name, _ in _ITEMS["online"])
    return tuple(judged(question, proof, ran) for _, judged in _ITEMS[ran.watched])


def is_complete(items: tuple[Item, ...]) -> bool:
    return all(item.state != "not done" for item in items)


def _lengths(question: Question, proof: Trial, ran: Exercised) -> Item:
    settings = proof.candidate.settings
    prompt, completion = settings.get("max_prompt_length"), settings.get("max_completion_length")
    seen = f"prompts of {_range(ran.shortest_prompt, ran.longest_prompt)}"
    seen += f", completions of {_range(ran.shortest_completion, ran.longest_completion)} tokens"
    reached = ran.shortest_completion == completion and (prompt is None or ran.shortest_prompt == prompt)
    asked = f"asked for {prompt} and {completion}" + (", forced" if question.job.workload.weights == "random" else "")
    return Item(name="longest lengths", state="done" if reached else "not done", says=f"{seen}; {asked}")


def _records(question: Question, proof: Trial, ran: Exercised) -> Item:
    state: State = "done" if ran.optimizer_steps >= FEWEST_STEPS else "not done"
    says = f"{ran.optimizer_steps} of its own speed, at least {FEWEST_STEPS} wanted; how long its rows are, it alone knows"
    return Item(name="records", state=state, says=says)


def _settings(question: Question, proof: Trial, ran: Exercised) -> Item:
    """Frameworks change settings without an error, and then it is another candidate that was measured."""
    name, taken = "settings as asked", proof.measurement.effective
    if not taken:
        return Item(name=name, state="not applicable", says="it says nowhere what it took its settings to be")
    changed = rewritten(proof)
    if changed:
        words = [f"{name}={taken} instead of {asked}" for name, (asked, taken) in changed.items()]
        return Item(name=name, state="not done", says=f"it trained with {', '.join(words)}")
    asked = sum(value is not None for value in proof.candidate.settings.values())
    return Item(name=name, state="done", says=f"{len(taken)} of {asked} read back from the run itself, none of them changed")


def rewritten(proof: Trial) -> Mapping[str, tuple[KnobValue, object]]:
    """Settings that were asked for and that the run says it took otherwise: each as asked and as taken."""
    asked, taken = proof.candidate.settings, proof.measurement.effective
    return {
        name: (asked[name], value)
        for name, value in taken.items()
        if asked.get(name) is not None and not _is_the_same(asked[name], value)
    }


def _is_the_same(asked: KnobValue, taken: object) -> bool:
    """A name may stand for a file's whole content (`zero3`), which can't be held against it."""
    if isinstance(taken, dict | list):
        return True
    if isinstance(asked, int | float) and isinstance(taken, int | float):
        return float(asked) == float(taken)
    return str(asked).lower() == str(taken).lower().removeprefix("torch.")  # `torch.bfloat16`


def _rows(question: Question, proof: Trial, ran: Exercised) -> Item:
    settings = proof.candidate.settings
    parts = [settings.get(name) for name in ("max_prompt_length", "max_completion_length")]
    longest = sum(part for part in parts if isinstance(part, int)) or settings.get("max_length")
    state: State = "done" if ran.shortest_prompt == longest else "not done"
    return Item(
        name="longest rows", state=state, says=f"of {_range(ran.shortest_prompt, ran.longest_prompt)}; asked for {longest}"
    )


def _steps(question: Question, proof: Trial, ran: Exercised) -> Item:
    state: State = "done" if ran.optimizer_steps >= FEWEST_STEPS else "not done"
    return Item(name="optimizer steps", state=state, says=f"{ran.optimizer_steps}, at least {FEWEST_STEPS} wanted")


def _rollouts(question: Question, proof: Trial, ran: Exercised) -> Item:
    state: State = "done" if ran.generations >= 2 and not ran.borrowed_generations else "not done"
    return Item(name="rollouts", state=state, says=f"{ran.generations} run, {ran.borrowed_generations} taken over")


def _sync(question: Question, proof: Trial, ran: Exercised) -> Item:
    if ran.weight_syncs is None:
        return Item(name="weight sync", state="not applicable", says="there is no engine: the trained model itself generates")
    return _count("weight sync", ran.weight_syncs, "into the engine")


def _sleep(question: Question, proof: Trial, ran: Exercised) -> Item:
    if ran.sleeps is None or ran.wakes is None:
        return Item(name="sleep and wake", state="not applicable", says="there is no engine that sleeps")
    return _count("sleep and wake", min(ran.sleeps, ran.wakes), f"cycles ({ran.sleeps} sleeps, {ran.wakes} wakes)")


def _save(question: Question, proof: Trial, ran: Exercised) -> Item:
    return _count("checkpoint save", ran.checkpoint_saves, "into scratch, with the optimizer's state")


def _evaluation(question: Question, proof: Trial, ran: Exercised) -> Item:
    if ran.evaluations is None:
        return Item(name="evaluation", state="not applicable", says="the configuration never evaluates")
    return _count("evaluation", ran.evaluations, "batch at the longest lengths")


def _count(name: str, count: int, what: str) -> Item:
    return Item(name=name, state="done" if count else "not done", says=f"{count} {what}")


def _range(low: int | None, high: int | None) -> str:
    return "unknown length" if high is None else str(high) if low == high else f"{low} to {high}"


_Judge = Callable[[Question, Trial, Exercised], Item]
_AFTER: tuple[tuple[str, _Judge], ...] = (("checkpoint save", _save), ("evaluation", _evaluation))
_ITEMS: Mapping[Watched, tuple[tuple[str, _Judge], ...]] = {
    "online": (
        ("longest lengths", _lengths),
        ("optimizer steps", _steps),
        ("rollouts", _rollouts),
        ("weight sync", _sync),
        ("sleep and wake", _sleep),
        *_AFTER,
    ),
    "offline": (("longest rows", _rows), ("optimizer steps", _steps), *_AFTER),
    "outside": (("records", _records), ("settings as asked", _settings)),
}


def certificate_row(question: Question, proof: Trial | None) -> dict[str, Any] | None:
    """The certificate as JSON; null where the budget ran out before the winner could be confirmed."""
    if proof is None:
        return None
    measured, items = proof.measurement, items_of(question, proof)
    return {
        "trial": proof.number,
        "outcome": str(measured.outcome),
        "complete": is_complete(items) and proof.verdict.fits,
        "items": [{"name": item.name, "state": item.state, "says": item.says} for item in items],
        "why": proof.verdict.why,
        "peak_bytes": measured.memory.peak_bytes,
        "limit_bytes": measured.memory.limit_bytes,
        "margin_bytes": proof.verdict.margin_bytes,
        "peak_by": peak_by(measured),
        "devices": _devices(measured),
        "models": [{"rank": one.rank, "bytes": dict(one.bytes)} for one in measured.memory.models],
        "bound_by": measured.memory.bound_by,
        "verified_on_several_gpus": _on_several(question),
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


def _on_several(question: Question) -> bool | None:
    """False: runs of several GPUs have not been held against real ones yet; None where there is only one device."""
    hardware = question.job.hardware
    return False if hardware.kind == "cuda" and hardware.count > 1 else None


def peak_by(measured: Measurement) -> str:
    """Where the peak was read, in words."""
    known = [device for device in measured.memory.devices if device.peak_bytes is not None]
    if not known:
        return "the process tree's anonymous and shared memory" if measured.memory.peak_bytes is not None else "unknown"
    worst = max(known, key=lambda device: device.peak_bytes or 0)
    return f"{worst.measured_by} on device {worst.index}, the worst of {len(measured.memory.devices)}"


def _devices(measured: Measurement) -> list[Mapping[str, Any]]:
    return [
        {"index": device.index, "name": device.name, "peak_bytes": device.peak_bytes, "measured_by": device.measured_by,
         "why": device.why}
        for device in measured.memory.devices
    ]  # fmt: skip


def certificate_lines(question: Question, proof: Trial | None) -> list[str]:
    """For the head of the recommended file and the terminal; empty without a certificate."""
    if proof is None:
        return ["Not certified: the budget ran out before the longer worst-case probe."]
    items, memory = items_of(question, proof), proof.measurement.memory
    peak = "unknown" if memory.peak_bytes is None else format_bytes(memory.peak_bytes)
    margin = "" if proof.verdict.margin_bytes is None else f", {format_bytes(max(0, proof.verdict.margin_bytes))} left"
    head = "Certified" if is_complete(items) and proof.verdict.fits else "Certified in part"
    lines = [f"{head}: peak {peak} of {format_bytes(memory.limit_bytes)}{margin}, by {peak_by(proof.measurement)}."]
    lines += [f"  {item.name}: {item.state} ({item.says})" for item in items]
    if _on_several(question) is False:
        lines.append("  Not verified on several GPUs: this path has run on one at most.")
    return lines


def models_in_words(measured: Measurement) -> str | None:
    """What the models of the fullest rank hold, the largest part first; None where nobody looked into a rank."""
    models = measured.memory.models
    if not models:
        return None
    fullest = max(models, key=lambda one: sum(one.bytes.values()))
    parts = sorted(fullest.bytes.items(), key=lambda part: -part[1])
    where = f"rank {fullest.rank}, which holds the most" if len(models) > 1 else "the one rank"
    said = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
    return f"Measured after an optimizer step, the models' own tensors on {where}: {said}."
