"""From what the ranks said to a Measurement: cycles merged, peaks combined, the first failure named."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from autotune.errors import RigError
from autotune.failures import Ending, Finding, Raised, judge_ending, judge_launched, judge_raised
from autotune.hardware import DeviceKind
from autotune.inside.wire import Message
from autotune.measurement import Cycle, Exercised, Failure, ModelMemory, Outcome, Phase, Speed
from autotune.rig.conversation import Answer

EXCERPT_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the kernel did to the tree while it answered."""

    out_of_memory: bool
    """It ended some process for want of memory (or the meter did in its place)."""

    own_limit: bool
    """It was our limit that was reached, not the machine's."""

    full: bool
    """The tree stood at its limit: what an allocator that cannot cope with a refusal then dies of counts as out of memory."""

    host_short: bool = False
    """Beside a GPU rig: next to nothing of the machine's memory was left at some moment."""


STILL_MOVING = 0.25
"""Who was heard within so much of its deadline was still going on."""


def failure_of(answer: Answer, kernel: Kernel, device: DeviceKind, seconds: float) -> tuple[Outcome, Failure]:
    """The root failure among what the ranks said; RigError where it says nothing about the candidate."""
    if answer.failures:
        found = [(message, _find(message, answer, kernel, device)) for message in answer.failures]
        message, finding = min(found, key=lambda pair: _rank_of_blame(pair[1]))
        if finding.transient:
            raise RigError(f"The machine was disturbed while it was measured: {finding.evidence}")
        return finding.outcome, _failure(finding, message, answer)
    phase = answer.phase_of(0)
    if answer.keeper_lost:
        finding = judge_ending(_ending({}, phase, kernel, device, answer.printed))
        return finding.outcome, _failure(finding, {}, answer)
    where = f" in phase {phase}" if phase else ""
    evidence = f"no answer after {seconds:.1f} s{where}: ended at its deadline; {_slow_or_hung(answer, seconds)}"
    return Outcome.TIMEOUT, Failure(evidence=evidence, phase=phase, excerpt=end_of(answer.printed))


def _slow_or_hung(answer: Answer, seconds: float) -> str:
    """By when it was last heard to go on. One long step says nothing of itself, so that a long silence is not quite a proof."""
    when = f"{answer.quiet_seconds:.1f} s before ({answer.moving})"
    if answer.quiet_seconds <= seconds * STILL_MOVING:
        return f"slow and not hung, for it went on until {when}"
    return f"hung, or in one step that takes longer than that: it was last heard {when}"


def _rank_of_blame(finding: Finding) -> int:
    """Out of memory first, complaints about a lost peer last; among equals the first one heard."""
    return (0 if finding.outcome.is_out_of_memory else 1) + (2 if finding.secondary else 0)


def _find(message: Message, answer: Answer, kernel: Kernel, device: DeviceKind) -> Finding:
    phase: Phase | None = message.get("phase") or answer.phase_of(message.get("rank"))
    if message["event"] == "lost":
        return judge_ending(_ending(message, phase, kernel, device, answer.printed))
    error = message["error"]
    if "ended" in message:
        return judge_launched(_ending(message["ended"], message.get("phase"), kernel, device, answer.printed), error["text"])
    chain = [(link["type"], link["text"]) for link in error.get("chain", [error])]
    frames = error.get("frames", ())
    return judge_raised(
        Raised(chain=chain, frames=frames, phase=phase, device=device, limit_hit=kernel.out_of_memory, printed=answer.printed)
    )


def _ending(message: Message, phase: Phase | None, kernel: Kernel, device: DeviceKind, printed: str) -> Ending:
    whose: Literal["limit", "machine"] | None = None
    if kernel.out_of_memory:
        whose = "limit" if kernel.own_limit else "machine"
    elif kernel.full and message.get("signal") is not None:
        whose = "limit"
    elif kernel.host_short and message.get("signal") == signal.SIGKILL:
        whose = "machine"  # ended by a daemon that watches memory: the kernel counts only those that it ends itself
    return Ending(
        signal=message.get("signal"), exit=message.get("exit"), phase=phase, device=device, out_of_memory=whose, printed=printed
    )


def end_of(text: str) -> str:
    """The last whole lines of it; of one long line its end."""
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    end = text[-EXCERPT_CHARACTERS:]
    return end.partition("\n")[2] or end


def _failure(finding: Finding, message: Message, answer: Answer) -> Failure:
    excerpt = (message.get("error") or {}).get("traceback") or answer.printed
    return Failure(
        evidence=finding.evidence,
        phase=finding.phase,
        cause=finding.cause,
        rank=message.get("rank"),
        row=finding.row,
        numbers=finding.numbers,
        excerpt=end_of(excerpt),
    )


def merge_speeds(speeds: Sequence[Mapping[str, Any]]) -> Speed | None:
    """One Speed of all ranks: a cycle takes as long as its slowest rank, and the ranks' tokens add up."""
    if not speeds or not all(speed["cycle_seconds"] for speed in speeds):
        return None
    slowest = max(speeds, key=lambda speed: sum(speed["cycle_seconds"]))
    seconds = tuple(max(cycle) for cycle in zip(*(speed["cycle_seconds"] for speed in speeds), strict=False))
    return Speed(
        completion_tokens=int(slowest["completion_tokens"]),
        cycle_seconds=seconds,
        cycle_loss_tokens=tuple(sum(cycle) for cycle in zip(*(speed["cycle_loss_tokens"] for speed in speeds), strict=False)),
        prompt_tokens=sum(int(speed["prompt_tokens"]) for speed in speeds),
        phase_seconds=_phases(slowest.get("phase_seconds", {}), sum(seconds)),
        user_reward_seconds=float(slowest.get("user_reward_seconds", 0.0)),
        cut_short=any(speed.get("cut_short", False) for speed in speeds),
        borrowed_seconds=float(slowest.get("borrowed_seconds", 0.0)),
    )


def exercised_of(bodies: Sequence[Mapping[str, Any]]) -> Exercised | None:
    """What all ranks went through: of every count the least, of every length the shortest, of every cycle the worst."""
    said = [body["exercised"] for body in bodies if body.get("exercised")]
    if not said:
        return None
    names = {one.name for one in fields(Exercised)} - {"cycles", "seconds"}
    known = {name: [one[name] for one in said if one.get(name) is not None] for name in names}
    return Exercised(
        **{name: min(values) for name, values in known.items() if values},
        seconds=max(float(one.get("seconds") or 0.0) for one in said),
        cycles=tuple(_worst_cycle(cycle) for cycle in zip(*(one.get("cycles") or () for one in said), strict=False)),
    )


def _worst_cycle(told: Sequence[Mapping[str, Any]]) -> Cycle:
    return Cycle(
        steps=int(told[0]["steps"]),
        seconds=max(float(one["seconds"]) for one in told),
        peak_bytes=max(int(one["peak_bytes"]) for one in told),
        held_bytes=max(int(one["held_bytes"]) for one in told),
    )


def _phases(phases: Mapping[str, float], whole: float) -> dict[str, float]:
    """The slowest rank's phases; what it waited for the others in single cycles is `other`."""
    named = {name: float(seconds) for name, seconds in phases.items() if name != "other"}
    return {**named, "other": max(0.0, whole - sum(named.values()))}


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of one command, over all ranks."""

    peak_bytes: int | None
    phase_peak_bytes: Mapping[str, int]


def tree_peaks(answer: Answer, meter_peak: int, meter_phases: Mapping[str, int], ceiling_bytes: int | None) -> Peaks:
    """CPU: the tree before the command, and what each rank grew above that, which it knows exactly; the meter only samples."""
    reports = _reports(answer)
    exact = _combined(
        answer.usage_before_bytes, [(report.get("base_bytes"), _body(report).get("peak_bytes")) for report in reports]
    )
    if exact is not None and ceiling_bytes is not None:
        exact = min(exact, max(ceiling_bytes, meter_peak))  # ranks need not have peaked at the same moment
    phases = dict(meter_phases)
    for phase in {name for report in reports for name in _body(report).get("phase_peak_bytes") or {}}:
        pairs = [(report.get("base_bytes"), _body(report).get("phase_peak_bytes", {}).get(phase)) for report in reports]
        combined = _combined(answer.usage_before_bytes, pairs)
        if combined is not None:
            exactly = combined if ceiling_bytes is None else min(combined, max(ceiling_bytes, meter_peak))
            # A rank that was lost told nothing: then the sample, taken of the whole tree, may be the better figure.
            lost = any(report.get("event") == "lost" for report in reports)
            phases[phase] = max(exactly, phases.get(phase, 0)) if lost else exactly
    return Peaks(peak_bytes=max(meter_peak, exact or 0) or None, phase_peak_bytes=phases)


def worst(bodies: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """The largest of the ranks' figures; None where no rank has one."""
    known = [int(body[name]) for body in bodies if body.get(name) is not None]
    return max(known, default=None)


def models_of(bodies: Mapping[int, Mapping[str, Any]]) -> tuple[ModelMemory, ...]:
    """What each rank's models were seen to hold; no rank's figure says anything about another's.

    A rank that trains speaks for itself, and one that started a run for all that run's own ranks.
    """
    own = {rank: body["model_bytes"] for rank, body in bodies.items() if body.get("model_bytes")}
    started = {int(one["rank"]): one["bytes"] for body in bodies.values() for one in body.get("models") or ()}
    return tuple(ModelMemory(rank=rank, bytes=dict(parts)) for rank, parts in sorted({**own, **started}.items()))


def bodies_of(answer: Answer) -> list[Mapping[str, Any]]:
    """By rank: its result, or what a failed one got done."""
    return [_body(report) for report in _reports(answer)]


def bodies_by_rank(answer: Answer) -> dict[int, Mapping[str, Any]]:
    """The same, each under its rank."""
    return {int(report["rank"]): _body(report) for report in _reports(answer) if report.get("rank") is not None}


def _reports(answer: Answer) -> list[Message]:
    return [*(answer.results[rank] for rank in sorted(answer.results)), *answer.failures]


def _body(report: Message) -> Mapping[str, Any]:
    body = report.get("result") or report.get("partial") or {}
    return {**body, **body.get("memory", {})} if isinstance(body, dict) else {}


def _combined(before: int, pairs: Sequence[tuple[int | None, int | None]]) -> int | None:
    grown = [peak - base for base, peak in pairs if peak is not None and base is not None]
    return before + sum(max(0, growth) for growth in grown) if grown else None
