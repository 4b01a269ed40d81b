"""The timeline: who is resident in which phase, and what the device shows then, by name.

The trainer's part comes from the replay of its trace. The engine shares the trainer's process, its context and torch's
cache: its weights, KV cache and graphs come on top while it is awake, and what its passes need for a moment it takes out of
the same cache that the trainer's step leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.measurement import PHASES, Phase
from autotune.predict import shown
from autotune.predict.shown import Outside
from autotune.predict.usage import PhaseUse, Usage
from autotune.prediction import Basis, Estimate, PhasePrediction

OF_A_MODEL = ("weights", "gradients", "optimizer", "activations", "inputs")
BESIDE = tuple(f"{role}_{part}" for role in ("reference", "critic", "reward") for part in OF_A_MODEL)
NAMES = (
    "weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspaces", "inputs", *BESIDE,
    "kv_cache", "engine", "fragmentation", "context", "communication",
)  # fmt: skip
"""Of a breakdown, in this order: the policy's, those of the models beside it under their roles, and the device's."""


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """A rollout engine on one of the training devices."""

    awake: Estimate
    """What it holds while it generates, apart from its passes' own transients."""

    loading: Estimate
    """What it holds while weights are pushed to it: less than `awake` where it wakes in two steps."""

    asleep: Estimate
    kv_cache_bytes: int
    weights_bytes: int
    passing_bytes: int
    """Its passes' transients, out of the cache that it shares with the trainer."""

    sleeps: bool
    wakes_whole: bool = False
    """Whether its cache is back when weights are pushed to it."""

    def held(self, phase: Phase) -> Estimate:
        if self.has_cache(phase):
            return self.awake
        return self.loading if phase == "sync" else self.asleep

    def has_cache(self, phase: Phase) -> bool:
        return not self.sleeps or phase in ("load", "rollout") or (phase == "sync" and self.wakes_whole)

    def passes(self, phase: Phase) -> int:
        return self.passing_bytes if phase in ("load", "rollout") else 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything that stands on one device."""

    usage: Usage
    basis: Basis
    high_extra_bytes: int
    outside: Outside
    engine: EngineShare | None = None
    beside: Mapping[Phase, Mapping[str, int]] = field(default_factory=dict)
    """Models that the step does not run over but that are there, by phase and part."""

    away: tuple[str, ...] = ()
    """Parts of the trainer's state that are on the host while completions are written."""

    spared: tuple[str, ...] = ()
    """Parts that may be next to nothing."""

    @property
    def away_bytes(self) -> int:
        return sum(size for part, size in self.usage.resting.parts.items() if part in self.away)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One phase at its peak."""

    phase: Phase
    torch_reserved: Estimate
    """The trainer's share of torch's cache, the engine's passes in it."""

    shown: Estimate
    parts: Mapping[str, int]

    @property
    def prediction(self) -> PhasePrediction:
        return PhasePrediction(name=self.phase, peak_bytes=self.shown, seconds=None, parts=self.parts)


def moments(scene: Scene) -> tuple[Moment, ...]:
    """Every phase that runs, in the order of the design."""
    uses = {use.phase: use for use in scene.usage.phases}
    if scene.engine is not None:
        for phase in ("rollout", "sync"):
            uses.setdefault(phase, _resting(scene, phase))
    return tuple(_moment(scene, uses[phase]) for phase in PHASES if phase in uses)


def peak(several: tuple[Moment, ...]) -> Moment:
    """The highest; of equally high ones the one that fills most of it, for the others show what it left in the cache."""
    return max(several, key=lambda moment: (moment.shown.value, -moment.parts.get("fragmentation", 0)))


def _resting(scene: Scene, phase: Phase) -> PhaseUse:
    """The trainer between two steps: its state, and the cache unless a sleeping engine had it given back."""
    uses = {use.phase: use for use in scene.usage.phases}
    resting = scene.usage.resting
    cached = 0 if scene.engine is not None and scene.engine.sleeps else max(use.reserved_bytes for use in uses.values())
    cached_high = 0 if not cached else max(use.reserved_high_bytes for use in uses.values())
    away = scene.away_bytes if phase == "rollout" else 0
    return PhaseUse(
        phase=phase,
        requested_bytes=max(0, resting.requested_bytes - away),
        allocated_bytes=max(0, resting.allocated_bytes - away),
        reserved_bytes=max(resting.reserved_bytes - away, cached, 0),
        reserved_high_bytes=max(resting.reserved_high_bytes - away, cached_high, 0),
        parts={part: size for part, size in resting.parts.items() if not away or part not in scene.away},
    )


def _moment(scene: Scene, use: PhaseUse) -> Moment:
    held = shown.reserved(use, scene.basis, scene.high_extra_bytes)
    passing = _beyond_cache(scene, use)
    reserved = held + Estimate.exactly(passing) + shown.beside(scene.beside.get(use.phase, {}), scene.basis)
    total = reserved + scene.outside.total
    if scene.engine is not None:
        total = total + scene.engine.held(use.phase)
    spared = sum(size for part, size in use.parts.items() if part in scene.spared)
    total = Estimate(value=total.value, low=max(0.0, total.low - spared), high=total.high)
    return Moment(
        phase=use.phase, torch_reserved=reserved, shown=_whole(total), parts=_parts(scene, use, passing, round(total.value))
    )


def _beyond_cache(scene: Scene, use: PhaseUse) -> int:
    """What the engine's passes need beyond what lies free in torch's cache."""
    if scene.engine is None:
        return 0
    free = use.reserved_bytes - use.allocated_bytes
    return max(0, scene.engine.passes(use.phase) - free)


def _parts(scene: Scene, use: PhaseUse, passing: int, total: int) -> dict[str, int]:
    """By name; fragmentation is what is left, so that they sum to the total."""
    parts: dict[str, int] = {str(name): size for name, size in use.parts.items()}
    for name, size in scene.beside.get(use.phase, {}).items():
        parts[name] = parts.get(name, 0) + size
    parts["context"] = round(scene.outside.context.value)
    parts["communication"] = parts.get("communication", 0) + round(scene.outside.communication.value)
    for name, size in _engine_parts(scene.engine, use.phase, passing):
        parts[name] = parts.get(name, 0) + size
    parts["fragmentation"] = total - sum(parts.values())
    return {name: parts[name] for name in NAMES if parts.get(name)}


def _engine_parts(engine: EngineShare | None, phase: Phase, passing: int) -> Iterator[tuple[str, int]]:
    if engine is None:
        return
    cache = engine.kv_cache_bytes if engine.has_cache(phase) else 0
    yield "kv_cache", cache
    yield "engine", round(engine.held(phase).value) - cache + passing


def _whole(estimate: Estimate) -> Estimate:
    """Whole bytes: the figure as it is shown, and its interval around it."""
    value = round(estimate.value)
    return Estimate(value=value, low=min(value, round(estimate.low)), high=max(value, round(estimate.high)))
