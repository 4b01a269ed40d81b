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
from autotune.predict.shapes import Shape
from autotune.predict.usage import Usage
from autotune.trace import Part, Trace

TRAINING: tuple[Phase, ...] = ("forward", "backward", "optimizer")
IN_TRAINING: frozenset[Phase] = frozenset({"backward", "optimizer"})
"""Phases in which a critic that is trained has gradients."""

OF_A_TURN: tuple[Part, ...] = ("gradients", "activations", "logits")
"""What the policy has on the device in its own turn alone."""

STATE: tuple[Part, ...] = ("weights", "optimizer")

JUDGE = "reward"
"""The one model that a framework's own step is followed without: completions that nobody wrote can't be judged."""


def beside(
    trace: Trace, composition: Composition, used: Usage, config: Mapping[str, object]
) -> Mapping[Phase, Mapping[str, int]]:
    """Bytes by part, for each phase; each part under its model's role, as `critic_optimizer`. `config` is the policy's."""
    held: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
    for resident in composition.residents:
        if resident.role in ("policy", "engine") or resident.shares_weights_with is not None:
            continue
        if trace.basis == "traced" and resident.role != JUDGE:
            continue
        for phase in PHASES if resident.awake is None else resident.awake:
            held[phase].update(_of(resident, dict(_parts(resident, trace, composition, phase))))
        for phase in TRAINING if resident.trains_along else ():
            held[phase].update(_of(resident, _own_step(used)))
        for phase, parts in _own_turn(resident, composition, used, config):
            held[phase].update(_of(resident, parts))
    return {phase: dict(parts) for phase, parts in held.items() if parts}


def _of(resident: Resident, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{resident.role}_{part}": size for part, size in parts.items()}


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
    same = resident.model == composition["policy"].model and resident.weight_bytes is None
    if not same:
        yield from _another(resident, phase)
    elif not resident.trains:
        yield "weights", trace.inventory.weight_bytes // apart
    elif composition["policy"].adapter_rank is None:
        # As the policy is held: one after the other is trained, so there is room for its gradients where the policy's are.
        parts: tuple[Part, ...] = ("weights", "optimizer") if resident.state_bytes_per_weight else ("weights",)
        live = trace.live_parts_in_the_end
        yield from ((part, live[part]) for part in parts if part in live)
    else:
        yield "weights", trace.live_parts_in_the_end.get("weights", 0)
        yield from _training(resident, trace.inventory.parameters - trace.inventory.trainable_parameters, phase)


def _another(resident: Resident, phase: Phase) -> Iterator[tuple[str, int]]:
    """A model that is not the policy's."""
    if resident.weight_bytes is not None:
        yield "weights", resident.weight_bytes
        return
    count = _shape_of(resident).parameters
    yield "weights", _weights(resident, count)
    if resident.trains_along:
        yield from _training(resident, count, phase)
    elif resident.trains and resident.state_bytes_per_weight:
        yield "optimizer", _spread_state(resident, count * resident.state_bytes_per_weight)


def _shape_of(resident: Resident) -> Shape:
    try:
        return shapes.shape(models.find_model(resident.model).config)
    except BadInput as error:
        raise CannotPredict(f"The {resident.role} model's size decides, and is not known: {error.what}") from error


def _own_turn(
    resident: Resident, composition: Composition, used: Usage, config: Mapping[str, object]
) -> Iterator[tuple[Phase, Mapping[str, int]]]:
    """Trained in turns with the policy: by how much its turn takes more than the policy's, which is followed. A model of the
    policy's own shape takes no more: it has a figure per token where the policy has logits."""
    another = resident.model != composition["policy"].model and resident.weight_bytes is None
    if not (another and resident.trains and not resident.trains_along):
        return
    shape, policy = _shape_of(resident), shapes.shape(config)
    scale = len(shape.layers) * shape.hidden / (len(policy.layers) * policy.hidden)
    for use in used.phases:
        if use.phase not in TRAINING:
            continue
        own = {
            "weights": _weights(resident, shape.parameters) if resident.awake == () else 0,
            "optimizer": _spread_state(resident, shape.parameters * resident.turn_bytes_per_weight),
            "gradients": _gradients(resident, shape.parameters) if use.phase in IN_TRAINING else 0,
            "activations": round(use.parts.get("activations", 0) * scale),
        }
        theirs = sum(use.parts.get(part, 0) for part in (*OF_A_TURN, *_leaving(composition)))
        yield use.phase, _beyond(own, theirs)


def _leaving(composition: Composition) -> tuple[Part, ...]:
    """Of the policy's state, what is on the host in another's turn."""
    return tuple(part for part in STATE if part in composition.away_in_rollout)


def _beyond(own: Mapping[str, int], theirs: int) -> dict[str, int]:
    """What is left of the parts, in their order, once as much is taken from their end as is there in the other turn."""
    left, found = max(0, sum(own.values()) - theirs), {}
    for part, size in own.items():
        taken = min(size, left)
        left -= taken
        if taken:
            found[part] = taken
    return found


def _weights(resident: Resident, count: int) -> int:
    return _of_a_rank(resident, count * shapes.dtype_bytes(resident.dtype), spread=resident.sharding == "parameters")


def _spread_state(resident: Resident, size: int) -> int:
    return _of_a_rank(resident, size, spread=resident.sharding != "none")


def _gradients(resident: Resident, count: int) -> int:
    spread = resident.sharding in ("parameters", "gradients")
    return _of_a_rank(resident, count * shapes.dtype_bytes(resident.dtype), spread=spread)


def _of_a_rank(resident: Resident, size: int, *, spread: bool) -> int:
    return size // max(1, len(resident.ranks)) if spread else size


def _training(resident: Resident, count: int, phase: Phase) -> Iterator[tuple[str, int]]:
    """What full training of so many weights takes beside them."""
    yield "optimizer", _spread_state(resident, count * resident.state_bytes_per_weight)
    if phase in IN_TRAINING:
        yield "gradients", _gradients(resident, count)
