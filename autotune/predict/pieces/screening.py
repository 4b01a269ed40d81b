"""A Usage for any point of a family without replaying anything: pieces for what is requested, a replayed neighbour for the rest.

What an allocator adds to what is requested, and what the libraries and the sharding put around the step, hardly moves from
point to point: it is taken over from anchors, traces of the same model that were replayed in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.measurement import Phase
from autotune.predict.pieces import Heights
from autotune.predict.pieces.blocks import PARTS
from autotune.predict.usage import Generation, PhaseUse, Surroundings, Usage
from autotune.trace import Part, Trace

Parts = Mapping[Part, int]

CACHED = 0.98
"""Share of the highest that a phase has reserved when the highest peak's cache is still there."""

SPREAD = 0.02
"""Of what is reserved: how much fragmentation differed between points of a family when both were replayed; added to the
upper end for points that are only screened."""


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """What a replay showed beyond the bare trace."""

    top: int
    """Requested bytes at the highest peak."""

    more: Mapping[Phase, Parts]
    """By phase: requested bytes by part that the bare trace does not have. A rollout in the trainer is not among it."""

    more_at_rest: Parts
    allocated: float
    """Allocated over requested bytes at the highest peak."""

    reserved: float
    """Reserved over requested bytes there."""

    reserved_high: float
    own: Mapping[Phase, float]
    """Reserved over requested bytes of the phases in which the cache of the highest peak is not there."""

    at_rest: float
    loaded: float

    @classmethod
    def of(cls, usage: Usage, trace: Trace) -> Anchor:
        """`trace` as it came, before sharding."""
        bare, resting = parts_of(trace)
        top = max(use.requested_bytes for use in usage.phases)
        loaded = next((use for use in usage.phases if use.phase == "load"), usage.resting)
        return cls(
            top=top,
            more={use.phase: _less(use.parts, bare.get(use.phase, resting)) for use in usage.phases if use.phase != "rollout"},
            more_at_rest=_less(usage.resting.parts, resting),
            allocated=usage.allocated_bytes / top,
            reserved=usage.reserved_bytes / top,
            reserved_high=usage.reserved_high_bytes / top,
            own={use.phase: _ratio(use) for use in usage.phases if use.reserved_bytes < CACHED * usage.reserved_bytes},
            at_rest=_ratio(usage.resting),
            loaded=usage.loaded_bytes / max(1, loaded.requested_bytes),
        )


def between(small: Anchor, large: Anchor, top: int) -> Anchor:
    """For a point that requests so much at its peak: how much lies idle in the cache grows with what passes through it."""
    if large.top <= small.top:
        return large
    share = min(1.0, max(0.0, math.log(top / small.top) / math.log(large.top / small.top)))

    def mixed(one: float, other: float) -> float:
        return one + share * (other - one)

    nearer = large if share > 0.5 else small
    return replace(
        nearer,
        allocated=mixed(small.allocated, large.allocated),
        reserved=mixed(small.reserved, large.reserved),
        reserved_high=mixed(small.reserved_high, large.reserved_high),
        at_rest=mixed(small.at_rest, large.at_rest),
        loaded=mixed(small.loaded, large.loaded),
    )


def usage_at(heights: Heights, row: int, anchors: tuple[Anchor, Anchor], around: Surroundings, residual: float = 0.0) -> Usage:
    """One point's, from the anchors of a small point and of a large one."""
    anchor = anchors[1]
    resting = _sum(heights.parts_at_rest(row), anchor.more_at_rest)
    phases: dict[Phase, Parts] = {phase: _sum(heights.parts(phase, row), anchor.more.get(phase, {})) for phase in heights.phases}
    if around.merge_bytes:
        phases["sync"] = _sum(resting, {"workspaces": around.merge_bytes})
    if around.generation is not None:
        rollout = _sum(resting, generation_parts(around.generation))
        phases["rollout"] = max(phases.get("rollout", {}), rollout, key=lambda parts: sum(parts.values()))
    top = max(sum(parts.values()) for parts in phases.values())
    anchor = between(*anchors, top)
    uses = tuple(_use(phase, parts, top, anchor, residual) for phase, parts in phases.items())
    loaded = next((use.requested_bytes for use in uses if use.phase == "load"), sum(resting.values()))
    at_rest = replace(anchor, own={"rollout": anchor.at_rest})
    return Usage(
        phases=uses, resting=_use("rollout", resting, top, at_rest, residual), loaded_bytes=round(anchor.loaded * loaded)
    )


def generation_parts(generation: Generation) -> dict[Part, int]:
    """What a rollout inside the trainer takes at its highest: while prompts are read, or at the last token."""
    cache, tensors = generation.kv_cache_bytes, 2 * max(1, generation.layers)
    prompts = cache * generation.prompt_length // (generation.prompt_length + generation.completion_length)
    beside = generation.logits_bytes + generation.decode_bytes
    reading: Counter[Part] = Counter({"kv_cache": prompts, "activations": generation.prefill_bytes})
    copying: Counter[Part] = Counter({"kv_cache": cache + cache // tensors})
    writing: Counter[Part] = Counter(
        {"kv_cache": cache, "logits": generation.logits_bytes, "activations": generation.decode_bytes} if beside else {}
    )
    highest = max((reading, copying, writing), key=lambda parts: sum(parts.values()))
    return dict(highest + Counter({"communication": generation.gathered_bytes}))


def parts_of(trace: Trace) -> tuple[dict[Phase, Parts], Parts]:
    """Requested bytes by part at each phase's highest moment, and between two steps."""
    live: Counter[int] = Counter()
    total = 0
    highest: dict[Phase, int] = {}
    phases: dict[Phase, dict[int, int]] = {}
    resting: dict[int, int] | None = None
    for mark, span in trace.stretches():
        if resting is None and mark.step >= 1 and mark.phase != "load":
            resting = dict(live)
        if len(span) and total > highest.get(mark.phase, -1):
            highest[mark.phase], phases[mark.phase] = total, dict(live)
        pending = False
        for at in span:
            entry = trace.events[at]
            number = abs(entry) - 1
            if entry < 0 and pending:
                pending, phases[mark.phase] = False, dict(live)
            live[trace.parts[number]] += trace.sizes[number] if entry > 0 else -trace.sizes[number]
            total += trace.sizes[number] if entry > 0 else -trace.sizes[number]
            if entry > 0 and total > highest[mark.phase]:
                highest[mark.phase], pending = total, True
        if pending:
            phases[mark.phase] = dict(live)
    rest = resting if resting is not None else dict(live)
    return {phase: _named(trace, parts) for phase, parts in phases.items()}, _named(trace, rest)


def _use(phase: Phase, parts: Parts, top: int, anchor: Anchor, residual: float) -> PhaseUse:
    requested = sum(parts.values())
    allocated = round(requested * anchor.allocated)
    cached = phase not in anchor.own
    reserved = max(allocated, round(top * anchor.reserved if cached else requested * anchor.own[phase]))
    above = anchor.reserved_high / anchor.reserved + SPREAD
    return PhaseUse(
        phase=phase,
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        reserved_high_bytes=round(reserved * max(1.0, above) * (1 + residual)),
        parts=parts,
    )


def _ratio(use: PhaseUse) -> float:
    return use.reserved_bytes / max(1, use.requested_bytes)


def _named(trace: Trace, parts: Mapping[int, int]) -> dict[Part, int]:
    return {trace.part_names[part]: size for part, size in parts.items() if size}


def _less(parts: Parts, other: Parts) -> dict[Part, int]:
    return {part: parts.get(part, 0) - other.get(part, 0) for part in PARTS if parts.get(part, 0) != other.get(part, 0)}


def _sum(parts: Parts, other: Parts) -> dict[Part, int]:
    found = {part: parts.get(part, 0) + other.get(part, 0) for part in PARTS}
    return {part: max(0, size) for part, size in found.items() if size}
