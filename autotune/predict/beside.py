"""Models that a stand-in step does not run over, and that hold memory on the same devices: frozen references and rewards
with their weights, critics with all that training needs. Each counts in the phases in which it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autotune import models
from autotune.composition import Composition, Resident
from autotune.errors import BadInput, CannotPredict
from autotune.measurement import PHASES, Phase
from autotune.predict import shapes
from autotune.predict.usage import Usage
from autotune.trace import Part, Trace

TRAINING: tuple[Phase, ...] = ("forward", "backward", "optimizer")
IN_TRAINING: frozenset[Phase] = frozenset({"backward", "optimizer"})
"""Phases in which a critic that is trained has gradients."""


def beside(trace: Trace, composition: Composition, used: Usage) -> Mapping[Phase, Mapping[str, int]]:
    """Bytes by part, for each phase."""
    if trace.basis == "traced":
        return {}
    held: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
    for resident in composition.residents:
        if resident.role in ("policy", "engine") or resident.shares_weights_with is not None:
            continue
        for phase in PHASES if resident.awake is None else resident.awake:
            held[phase].update(dict(_parts(resident, trace, composition, phase)))
        for phase in TRAINING if resident.trains_along else ():
            held[phase].update(_own_step(used))
    return {phase: dict(parts) for phase, parts in held.items() if parts}


def _own_step(used: Usage) -> dict[str, int]:
    """A step beside the policy's is taken to be like it, but for the logits: a critic has one figure per token."""
    parts: Counter[str] = Counter()
    for use in used.phases:
        if use.phase in TRAINING:
            parts |= Counter({part: size for part, size in use.parts.items() if part in ("activations", "gradients", "inputs")})
    return dict(parts)


def _parts(resident: Resident, trace: Trace, composition: Composition, phase: Phase) -> Iterator[tuple[str, int]]:
    ranks = max(1, len(resident.ranks))
    apart = ranks if resident.sharding == "parameters" else 1
    live = trace.live_parts_at(len(trace.events) - 1)
    same = resident.model == composition["policy"].model and resident.weight_bytes is None
    if not same:
        yield from _another(resident, ranks, phase)
    elif not resident.trains:
        yield "weights", trace.inventory.weight_bytes // apart
    elif composition["policy"].adapter_rank is None:
        # As the policy is held: one after the other is trained, so there is room for its gradients where the policy's are.
        parts: tuple[Part, ...] = ("weights", "optimizer") if resident.state_bytes_per_weight else ("weights",)
        yield from ((part, live[part]) for part in parts if part in live)
    else:
        yield "weights", live.get("weights", 0)
        yield from _training(resident, trace.inventory.parameters - trace.inventory.trainable_parameters, ranks, phase)


def _another(resident: Resident, ranks: int, phase: Phase) -> Iterator[tuple[str, int]]:
    """A model that is not the policy's."""
    if resident.weight_bytes is not None:
        yield "weights", resident.weight_bytes
        return
    try:
        count = shapes.shape(models.find_model(resident.model).config).parameters
    except BadInput as error:
        raise CannotPredict(f"The {resident.role} model's size decides, and is not known: {error.what}") from error
    yield "weights", count * shapes.dtype_bytes(resident.dtype) // (ranks if resident.sharding == "parameters" else 1)
    if resident.trains:
        yield from _training(resident, count, ranks, phase)


def _training(resident: Resident, count: int, ranks: int, phase: Phase) -> Iterator[tuple[str, int]]:
    """What full training of so many weights takes beside them."""
    yield "optimizer", count * resident.state_bytes_per_weight // (ranks if resident.sharding != "none" else 1)
    if phase in IN_TRAINING:
        spread = ranks if resident.sharding in ("parameters", "gradients") else 1
        yield "gradients", count * shapes.dtype_bytes(resident.dtype) // spread
