"""Certificate: the checklist of the recommended candidate's confirmation.

It is computed from the counters of the probe's ranks. An item that was not done has a reason; none
is assumed.
"""

from __future__ import annotations

from typing import Any

from autotune.core.answer import Trial, plain
from autotune.core.job import Job
from autotune.core.measurement import Measurement
from autotune.core.space import KnobValue
from autotune.core.units import format_bytes
from autotune.frameworks.shares_in_files import for_files

MIN_STEPS = 3
"""Optimizer steps: Adam's state is allocated in the first; the second is the first with all of
it.
"""

Item = dict[str, str]
"""Stage of a real run: its name, its state in the probe (`done`, `not applicable` or `not
done`), and what it says.
"""


def items_of(job: Job, proof: Trial) -> tuple[Item, ...]:
    """Return every item of the certificate, in a fixed order."""
    ran, settings = proof.measurement.exercised, proof.candidate.settings
    if ran is None:
        return tuple(_item(name, False, "the probe reported no counters") for name in _ONLINE_ITEMS)
    enough = ran.optimizer_steps >= MIN_STEPS
    if ran.watched == "outside":
        says = (
            f"{ran.optimizer_steps} of its own speed, at least {MIN_STEPS} required; the lengths of"
            " its rows are unknown"
        )
        return _item("records", enough, says), _settings(job, proof)
    # 1. Items of every loop that was observed.
    prompt, completion = settings.get("max_prompt_length"), settings.get("max_completion_length")
    prompts = _range(ran.shortest_prompt, ran.longest_prompt)
    steps = _item(
        "optimizer steps", enough, f"{ran.optimizer_steps}, at least {MIN_STEPS} required"
    )
    saves, evaluations = ran.checkpoint_saves, ran.evaluations
    after = (
        _item("checkpoint save", saves, f"{saves} into scratch, with the optimizer's state"),
        _item(
            "evaluation",
            evaluations,
            f"{evaluations} batch at the longest lengths",
            "the configuration never evaluates",
        ),
    )
    if ran.watched == "offline":
        longest = sum(
            part for part in (prompt, completion) if isinstance(part, int)
        ) or settings.get("max_length")
        return (
            _item(
                "longest rows", ran.shortest_prompt == longest, f"of {prompts}; asked for {longest}"
            ),
            steps,
            *after,
        )
    # 2. Items of a loop with rollouts.
    reached = ran.shortest_completion == completion and (
        prompt is None or ran.shortest_prompt == prompt
    )
    says = (
        f"prompts of {prompts}, completions of"
        f" {_range(ran.shortest_completion, ran.longest_completion)} tokens"
    )
    says += (
        f"; asked for {prompt} and"
        f" {completion}{', forced' if job.task.workload.weights == 'random' else ''}"
    )
    borrowed, syncs = ran.borrowed_generations, ran.weight_syncs
    cycles = None if ran.sleeps is None or ran.wakes is None else min(ran.sleeps, ran.wakes)
    slept = f"{cycles} cycles ({ran.sleeps} sleeps, {ran.wakes} wakes)"
    return (
        _item("longest lengths", reached, says),
        steps,
        _item(
            "rollouts",
            ran.generations >= 2 and not borrowed,
            f"{ran.generations} run, {borrowed} reused",
        ),
        _item(
            "weight sync",
            syncs,
            f"{syncs} into the engine",
            "there is no engine: the trained model itself generates",
        ),
        _item("sleep and wake", cycles, slept, "there is no engine with a sleep mode"),
        *after,
    )


_ONLINE_ITEMS = (
    "longest lengths",
    "optimizer steps",
    "rollouts",
    "weight sync",
    "sleep and wake",
    "checkpoint save",
    "evaluation",
)


def _item(name: str, done: int | None, says: str, why_not: str = "") -> Item:
    """Return an item; None for `done`: not applicable, for the reason `why_not`."""
    if done is None:
        return {"name": name, "state": "not applicable", "says": why_not}
    return {"name": name, "state": "done" if done else "not done", "says": says}


def _settings(job: Job, proof: Trial) -> Item:
    """Compare the effective settings: a framework may change one silently, and then another
    candidate was measured.
    """
    requested, effective = proof.candidate.settings, proof.measurement.effective
    in_command = for_files(proof.candidate, job)[0].settings  # where a command was started with it
    changed = [
        f"{name}={value} instead of {requested[name]}"
        for name, value in effective.items()
        if requested.get(name) is not None
        and not _is_equal(requested[name], value)
        and not _is_equal(in_command[name], value)
    ]
    count = sum(value is not None for value in requested.values())
    kept = f"{len(effective)} of {count} read back from the run itself, none of them changed"
    says = f"it trained with {', '.join(changed)}" if changed else kept
    return _item(
        "settings as asked",
        not changed if effective else None,
        says,
        "it does not report its settings",
    )


def _is_equal(requested: KnobValue, effective: object) -> bool:
    """Compare two values. A name that the run expanded to a file's content (`zero3`) counts as
    equal.
    """
    if isinstance(effective, dict | list):
        return True
    if isinstance(requested, int | float) and isinstance(effective, int | float):
        return float(requested) == float(effective)
    return str(requested).lower() == str(effective).lower().removeprefix(
        "torch."
    )  # `torch.bfloat16`


def _range(low: int | None, high: int | None) -> str:
    return "unknown length" if high is None else str(high) if low == high else f"{low} to {high}"


def certificate_row(job: Job, proof: Trial | None) -> dict[str, Any] | None:
    """Return the certificate as JSON; null if the budget ended before the confirmation."""
    if proof is None:
        return None
    measured, items = proof.measurement, items_of(job, proof)
    memory, worst, hardware = measured.memory, measured.worst, job.task.hardware
    return {
        "trial": proof.number,
        "outcome": str(measured.outcome),
        "complete": all(item["state"] != "not done" for item in items) and proof.verdict.fits,
        "items": list(items),
        "why": proof.verdict.why,
        "peak_bytes": memory.peak_bytes,
        "limit_bytes": memory.limit_bytes,
        "margin_bytes": proof.verdict.margin_bytes,
        "peak_by": _peak_by(measured),
        "devices": [
            {
                name: getattr(device, name)
                for name in ("index", "name", "peak_bytes", "measured_by", "why")
            }
            for device in memory.devices
        ],
        "models": [plain(one) for one in memory.models],
        "bound_by": memory.bound_by,
        # Several GPUs were not verified on real ones yet; null for one device.
        "verified_on_several_gpus": (
            False if hardware.kind == "cuda" and hardware.count > 1 else None
        ),
        "optimizer_steps": measured.optimizer_steps,
        "timed_cycles": len(worst.cycle_seconds) if worst else 0,
        "longest_completion_tokens": worst.completion_tokens if worst else None,
        "torch_allocated_bytes": memory.torch_allocated_bytes,
        "torch_reserved_bytes": memory.torch_reserved_bytes,
        "torch_reserved_why": memory.torch_reserved_why,
        "allocation_retries": memory.allocation_retries,
        "phase_seconds": dict(worst.phase_seconds) if worst else {},
        "user_reward_seconds": worst.user_reward_seconds if worst else None,
        "effective": dict(measured.effective),
    }


def _peak_by(measured: Measurement) -> str:
    """Return the source of the peak, as text."""
    known = [device for device in measured.memory.devices if device.peak_bytes is not None]
    if not known:
        return (
            "the process tree's anonymous and shared memory"
            if measured.memory.peak_bytes is not None
            else "unknown"
        )
    worst = max(known, key=lambda device: device.peak_bytes or 0)
    emulated = "emulated " if measured.emulated else ""
    return (
        f"{emulated}{worst.measured_by} on device {worst.index}, the worst of"
        f" {len(measured.memory.devices)}"
    )


def certificate_lines(job: Job, proof: Trial | None) -> list[str]:
    """Return the certificate as lines for the recommended file and the terminal."""
    row = certificate_row(job, proof)
    if row is None or proof is None:
        return ["Not certified: the budget ran out before the longer worst-case probe."]
    peak = "unknown" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
    margin = (
        "" if row["margin_bytes"] is None else f", {format_bytes(max(0, row['margin_bytes']))} left"
    )
    head = ("Emulated" if proof.measurement.emulated else "Certified") + (
        "" if row["complete"] else " in part"
    )
    lines = [
        f"{head}: peak {peak} of {format_bytes(row['limit_bytes'])}{margin}, by {row['peak_by']}."
    ]
    lines += [f"  {item['name']}: {item['state']} ({item['says']})" for item in row["items"]]
    if row["verified_on_several_gpus"] is False:
        lines.append("  Not verified on several GPUs: this path has run on one at most.")
    return lines


def describe_models(measured: Measurement) -> str | None:
    """Describe the model tensors of the fullest rank, the largest part first; None if no rank
    reported any.
    """
    models = measured.memory.models
    if not models:
        return None
    fullest = max(models, key=lambda one: sum(one.bytes.values()))
    parts = sorted(fullest.bytes.items(), key=lambda part: -part[1])
    where = f"rank {fullest.rank}, which holds the most" if len(models) > 1 else "the one rank"
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
    return (
        f"{measured.basis.capitalize()} after an optimizer step, the models' own tensors on"
        f" {where}: {listed}."
    )
