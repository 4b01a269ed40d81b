"""From what the ranks said to a Measurement: cycles merged, peaks combined, the first failure named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autotune.errors import RigError
from autotune.failures import Ending, Finding, Raised, judge_ending, judge_raised
from autotune.hardware import DeviceKind
from autotune.inside.wire import Message
from autotune.measurement import Failure, Outcome, Phase, Speed
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
    evidence = f"no answer after {seconds:.1f} s{where}: ended at its deadline"
    return Outcome.TIMEOUT, Failure(evidence=evidence, phase=phase, excerpt=answer.printed[-EXCERPT_CHARACTERS:])


def _rank_of_blame(finding: Finding) -> int:
    """Out of memory first, complaints about a lost peer last; among equals the first one heard."""
    return (0 if finding.outcome.is_out_of_memory else 1) + (2 if finding.secondary else 0)


def _find(message: Message, answer: Answer, kernel: Kernel, device: DeviceKind) -> Finding:
    phase: Phase | None = message.get("phase") or answer.phase_of(message.get("rank"))
    if message["event"] == "lost":
        return judge_ending(_ending(message, phase, kernel, device, answer.printed))
    error = message["error"]
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
    return Ending(
        signal=message.get("signal"), exit=message.get("exit"), phase=phase, device=device, out_of_memory=whose, printed=printed
    )


def _failure(finding: Finding, message: Message, answer: Answer) -> Failure:
    excerpt = (message.get("error") or {}).get("traceback") or answer.printed
    return Failure(
        evidence=finding.evidence,
        phase=finding.phase,
        cause=finding.cause,
        rank=message.get("rank"),
        numbers=finding.numbers,
        excerpt=excerpt[-EXCERPT_CHARACTERS:],
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


def device_peaks(answer: Answer) -> Peaks:
    """GPU: the worst rank's device memory."""
    bodies = [_body(report) for report in _reports(answer)]
    phases: dict[str, int] = {}
    for body in bodies:
        for phase, peak in (body.get("phase_peak_bytes") or {}).items():
            phases[phase] = max(peak, phases.get(phase, 0))
    return Peaks(peak_bytes=worst(bodies, "peak_bytes"), phase_peak_bytes=phases)


def worst(bodies: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """The largest of the ranks' figures; None where no rank has one."""
    known = [int(body[name]) for body in bodies if body.get(name) is not None]
    return max(known, default=None)


def bodies_of(answer: Answer) -> list[Mapping[str, Any]]:
    """By rank: its result, or what a failed one got done."""
    return [_body(report) for report in _reports(answer)]


def _reports(answer: Answer) -> list[Message]:
    return [*(answer.results[rank] for rank in sorted(answer.results)), *answer.failures]


def _body(report: Message) -> Mapping[str, Any]:
    body = report.get("result") or report.get("partial") or {}
    return {**body, **body.get("memory", {})} if isinstance(body, dict) else {}


def _combined(before: int, pairs: Sequence[tuple[int | None, int | None]]) -> int | None:
    grown = [peak - base for base, peak in pairs if peak is not None and base is not None]
    return before + sum(max(0, growth) for growth in grown) if grown else None
