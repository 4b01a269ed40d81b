"""Certificate: the checklist of the recommended candidate's confirmation.

It is computed from the counters of the probe's ranks. An item that was not done has a reason; none
is assumed.
"""

from __future__ import annotations

from typing import Any

from autotune.core.answer import Trial
from autotune.core.job import Job
from autotune.core.measurement import DeviceMemory, LoopActivity, Measurement, Speed
from autotune.core.plain_data import plain
from autotune.core.space import KnobValue
from autotune.core.units import counted, format_bytes
from autotune.frameworks.shares_in_files import for_files

# Optimizer steps: Adam's state is allocated in the first; the second is the first with all of it.
MIN_STEPS = 3

Item = dict[str, str]
"""Stage of a real run: its name, its state in the probe (`done`, `not applicable` or `not
done`), and its text.
"""


def items_of(job: Job, proof: Trial) -> tuple[Item, ...]:
    """Return every item of the certificate, in a fixed order."""
    activity = proof.measurement.exercised
    if activity is None:
        return tuple(_item(name, False, "the probe reported no counters") for name in _ONLINE_ITEMS)
    if activity.watched == "outside":
        says = (
            f"{activity.optimizer_steps} of its own speed, at least {MIN_STEPS} required; the"
            " lengths of its rows are unknown"
        )
        has_steps = activity.optimizer_steps >= MIN_STEPS
        return _item("records", has_steps, says), _settings(job, proof)
    if activity.watched == "offline":
        return _longest_rows(proof, activity), _steps(activity), *_saves(activity)
    return (
        _longest_lengths(job, proof, activity),
        _steps(activity),
        *_rollouts(activity),
        *_varied_lengths(activity),
        *_saves(activity),
    )


def _varied_lengths(activity: LoopActivity) -> tuple[Item, ...]:
    count = activity.varied_generations
    if count is None:
        return ()
    says = f"{count} generations of short, half as long, longest and mixed completions"
    return (_item("varied lengths", count, says),)


def _steps(activity: LoopActivity) -> Item:
    steps = activity.optimizer_steps
    return _item("optimizer steps", steps >= MIN_STEPS, f"{steps}, at least {MIN_STEPS} required")


def _saves(activity: LoopActivity) -> tuple[Item, Item]:
    saves = activity.checkpoint_saves
    evaluations = activity.evaluations
    return (
        _item("checkpoint save", saves, f"{saves} into scratch, with the optimizer's state"),
        _item(
            "evaluation",
            evaluations,
            f"{evaluations} batch at the longest lengths",
            "the configuration never evaluates",
        ),
    )


def _longest_rows(proof: Trial, activity: LoopActivity) -> Item:
    settings = proof.candidate.settings
    parts = settings.get("max_prompt_length"), settings.get("max_completion_length")
    total = sum(part for part in parts if isinstance(part, int))
    longest = total or settings.get("max_length")
    rows = _range(activity.shortest_prompt, activity.longest_prompt)
    reached = activity.shortest_prompt == longest
    return _item("longest rows", reached, f"of {rows}; asked for {longest}")


def _longest_lengths(
    job: Job,
    proof: Trial,
    activity: LoopActivity,
) -> Item:
    settings = proof.candidate.settings
    prompt = settings.get("max_prompt_length")
    completion = settings.get("max_completion_length")
    prompts = _range(activity.shortest_prompt, activity.longest_prompt)
    completions = _range(activity.shortest_completion, activity.longest_completion)
    says = (
        f"prompts of {prompts}, completions of {completions} tokens; asked for {prompt} and"
        f" {completion}"
    )
    if job.task.workload.weights == "random":
        says += ", forced"
    has_prompts = prompt is None or activity.shortest_prompt == prompt
    has_completions = activity.shortest_completion == completion
    return _item("longest lengths", has_prompts and has_completions, says)


def _rollouts(activity: LoopActivity) -> tuple[Item, Item, Item]:
    borrowed = activity.borrowed_generations
    syncs = activity.weight_syncs
    sleeps = activity.sleeps
    wakes = activity.wakes
    cycles = None
    if sleeps is not None and wakes is not None:
        cycles = min(sleeps, wakes)
    return (
        _item(
            "rollouts",
            activity.generations >= 2 and not borrowed,
            f"{activity.generations} run, {borrowed} reused",
        ),
        _item(
            "weight sync",
            syncs,
            f"{syncs} into the engine",
            "there is no engine: the trained model itself generates",
        ),
        _item(
            "sleep and wake",
            cycles,
            f"{cycles} cycles ({sleeps} sleeps, {wakes} wakes)",
            "there is no engine with a sleep mode",
        ),
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


def _item(
    name: str,
    done: int | None,
    says: str,
    why_not: str = "",
) -> Item:
    """Return an item; None for `done`: not applicable, for the reason `why_not`."""
    if done is None:
        return {"name": name, "state": "not applicable", "says": why_not}
    return {"name": name, "state": "done" if done else "not done", "says": says}


def _settings(job: Job, proof: Trial) -> Item:
    """Compare the effective settings: a framework may change one silently, and then another
    candidate was measured.
    """
    requested = proof.candidate.settings
    effective = proof.measurement.effective
    in_command = for_files(proof.candidate, job)[0].settings  # where a command was started with it
    changed = []
    for name, value in effective.items():
        if requested.get(name) is None:
            continue
        if not _is_equal(requested[name], value) and not _is_equal(in_command[name], value):
            changed.append(f"{name}={value} instead of {requested[name]}")
    name = "settings as asked"
    if not effective:
        return _item(name, None, "", "it does not report its settings")
    if changed:
        return _item(name, False, f"it trained with {', '.join(changed)}")
    count = sum(value is not None for value in requested.values())
    says = f"{len(effective)} of {count} read back from the run itself, none of them changed"
    return _item(name, True, says)


def _is_equal(requested: KnobValue, effective: object) -> bool:
    """Compare two values. A name that the run expanded to a file's content (`zero3`) counts as
    equal.
    """
    if isinstance(effective, dict | list):
        return True
    if isinstance(requested, int | float) and isinstance(effective, int | float):
        return float(requested) == float(effective)
    effective_name = str(effective).lower().removeprefix("torch.")  # `torch.bfloat16`
    return str(requested).lower() == effective_name


def _range(low: int | None, high: int | None) -> str:
    if high is None:
        return "unknown length"
    if low == high:
        return str(high)
    return f"{low} to {high}"


def certificate_row(job: Job, proof: Trial | None) -> dict[str, Any] | None:
    """Return the certificate as JSON; null if the budget ended before the confirmation."""
    if proof is None:
        return None
    measured = proof.measurement
    items = items_of(job, proof)
    return {
        "trial": proof.number,
        "outcome": str(measured.outcome),
        "complete": all(item["state"] != "not done" for item in items) and proof.verdict.fits,
        "items": list(items),
        "why": proof.verdict.why,
        **_memory_fields(job, proof),
        "verified_on_several_gpus": _verified_on_several(job),
        "optimizer_steps": measured.optimizer_steps,
        **_timing_fields(measured.worst),
        "effective": dict(measured.effective),
    }


def _memory_fields(job: Job, proof: Trial) -> dict[str, Any]:
    measured = proof.measurement
    memory = measured.memory
    headroom = job.headroom.required(memory)
    return {
        "peak_bytes": memory.peak_bytes,
        "limit_bytes": memory.limit_bytes,
        "margin_bytes": proof.verdict.margin_bytes,
        "headroom_bytes": headroom.bytes,
        "headroom_why": headroom.why,
        "peak_by": _peak_by(measured),
        "devices": [_device_row(device) for device in memory.devices],
        "models": [plain(model) for model in memory.models],
        "bound_by": memory.bound_by,
        "torch_allocated_bytes": memory.torch_allocated_bytes,
        "torch_reserved_bytes": memory.torch_reserved_bytes,
        "torch_reserved_why": memory.torch_reserved_why,
        "allocation_retries": memory.allocation_retries,
    }


def _verified_on_several(job: Job) -> bool | None:
    """Return False for several GPUs, which were not verified on real ones yet; None for one."""
    hardware = job.task.hardware
    if hardware.kind == "cuda" and hardware.count > 1:
        return False
    return None


def _timing_fields(worst: Speed | None) -> dict[str, Any]:
    if worst is None:
        return {
            "timed_cycles": 0,
            "left_out_cycles": 0,
            "steady": None,
            "rank_skew": {},
            "longest_completion_tokens": None,
            "phase_seconds": {},
            "user_reward_seconds": None,
        }
    return {
        "timed_cycles": len(worst.cycle_seconds),
        "left_out_cycles": worst.left_out_cycles,
        "steady": worst.steady,
        "rank_skew": dict(worst.rank_skew),
        "longest_completion_tokens": worst.completion_tokens,
        "phase_seconds": dict(worst.phase_seconds),
        "user_reward_seconds": worst.user_reward_seconds,
    }


def _device_row(device: DeviceMemory) -> dict[str, Any]:
    return {
        "index": device.index,
        "name": device.name,
        "peak_bytes": device.peak_bytes,
        "measured_by": device.measured_by,
        "why": device.why,
    }


def _peak_by(measured: Measurement) -> str:
    """Return the source of the peak, as text."""
    metered = [device for device in measured.memory.devices if device.peak_bytes is not None]
    if not metered and measured.memory.peak_bytes is None:
        return "unknown"
    if not metered:
        return "the process tree's anonymous and shared memory"
    worst = max(metered, key=lambda device: device.peak_bytes or 0)
    source: str = worst.measured_by
    if measured.emulated:
        source = f"emulated {source}"
    return f"{source} on device {worst.index}, the worst of {len(measured.memory.devices)}"


def certificate_lines(job: Job, proof: Trial | None) -> list[str]:
    """Return the certificate as lines for the recommended file and the terminal."""
    row = certificate_row(job, proof)
    if row is None or proof is None:
        return ["Not certified: the budget ran out before the longer worst-case probe."]
    peak = "unknown"
    margin = ""
    if row["peak_bytes"] is not None:
        peak = format_bytes(row["peak_bytes"])
    if row["margin_bytes"] is not None:
        margin = f", {format_bytes(max(0, row['margin_bytes']))} left"
    head = "Emulated" if proof.measurement.emulated else "Certified"
    if not row["complete"]:
        head += " in part"
    if row["margin_bytes"] is not None and row["headroom_bytes"]:
        required = format_bytes(row["headroom_bytes"])
        margin += f" (at least {required}, {row['headroom_why']}, had to be)"
    lines = [
        f"{head}: peak {peak} of {format_bytes(row['limit_bytes'])}{margin}, by {row['peak_by']}."
    ]
    for item in row["items"]:
        lines.append(f"  {item['name']}: {item['state']} ({item['says']})")
    lines += _steadiness(proof.measurement.worst)
    if row["verified_on_several_gpus"] is False:
        lines.append("  Not verified on several GPUs: this path has run on one at most.")
    return lines


def _steadiness(speed: Speed | None) -> list[str]:
    """Describe the warm-up that was left out of the timing, and how far the ranks are apart."""
    if speed is None:
        return []
    lines = []
    left_out = counted(speed.left_out_cycles, "further warm-up cycle")
    if speed.steady is False:
        lines.append(f"  Not steady: cycles still differed after {left_out} had been left out.")
    elif speed.left_out_cycles:
        lines.append(f"  Steady after {left_out}, left out of the timing.")
    if speed.rank_skew:
        phase = max(speed.rank_skew, key=lambda name: speed.rank_skew[name])
        share = speed.rank_skew[phase] / sum(speed.cycle_seconds)
        lines.append(f"  Ranks are furthest apart in {phase}: {share:.0%} of the time.")
    return lines


def describe_models(measured: Measurement) -> str | None:
    """Describe the model tensors of the fullest rank, the largest part first; None if no rank
    reported any.
    """
    models = measured.memory.models
    if not models:
        return None
    fullest = max(models, key=lambda model: sum(model.bytes.values()))
    parts = sorted(fullest.bytes.items(), key=lambda part: -part[1])
    place = f"rank {fullest.rank}, which holds the most" if len(models) > 1 else "the one rank"
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
    return (
        f"{measured.basis.capitalize()} after an optimizer step, the models' own tensors on"
        f" {place}: {listed}."
    )
