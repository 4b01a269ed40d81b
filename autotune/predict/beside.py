"""What a stand-in step does not run over, and what holds memory on the same devices: frozen references and rewards with their
weights, critics with all that training needs, logits that a loop keeps. Each counts in the phases in which it is there."""

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
"""Phases in which a critic that is trained has gradients; in a forward pass too, once there was one before it."""

OF_A_TURN: tuple[Part, ...] = ("gradients", "activations", "logits")
"""What the policy has on the device in its own turn alone."""

STATE: tuple[Part, ...] = ("weights", "optimizer")

FLOAT32 = 4

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
            held[phase].update(_of(resident, dict(_parts(resident, trace, composition, used, config, phase))))
        for phase in TRAINING if resident.trains_along else ():
            held[phase].update(_of(resident, _own_step(resident, composition, used, config)))
        for phase, parts in _own_turn(resident, composition, used, config):
            held[phase].update(_of(resident, parts))
    for phase, size in kept_logits(composition, used, config):
        held[phase]["logits"] += size
    return {phase: dict(parts) for phase, parts in held.items() if parts}


def _of(resident: Resident, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{resident.role}_{part}": size for part, size in parts.items()}


def kept_logits(composition: Composition, used: Usage, config: Mapping[str, object]) -> Iterator[tuple[Phase, int]]:
    """Of a loop that keeps what a rollout was drawn from. The last rollout's are still there while the next one's are made, which
    end up in one piece: a second copy, when the last completions' own are stacked or when the cache is gone."""
    shape = shapes.shape(config)
    each = FLOAT32 * composition.completion_length * shape.vocabulary
    whole = composition.keeps_logits_of * each
    last = (composition.writes_at_a_time or composition.keeps_logits_of) * each
    writing = max((use.requested_bytes for use in used.phases if use.phase == "rollout"), default=0)
    growing = max(0, writing - used.resting.requested_bytes)
    for phase in PHASES if whole else ():
        if phase == "rollout":
            yield phase, max(2 * whole + last, 3 * whole - growing)
        elif phase != "load":
            yield phase, whole


def _own_step(resident: Resident, composition: Composition, used: Usage, config: Mapping[str, object]) -> dict[str, int]:
    """A step beside the policy's is taken to be like it, but for the logits: a critic has one figure per token. Another model's
    activations are as much larger as it is deeper and wider, and its gradients are counted with what its training takes."""
    another = _is_another(resident, composition)
    scale = _scale(_shape_of(resident, composition, config), shapes.shape(config)) if another else 1.0
    parts: Counter[str] = Counter()
    for use in used.phases:
        if use.phase in TRAINING:
            own = {"activations": round(use.parts.get("activations", 0) * scale), "inputs": use.parts.get("inputs", 0)}
            gradients = {} if another else {"gradients": use.parts.get("gradients", 0)}
            parts |= Counter({**own, **gradients})
    return dict(parts)


def _is_another(resident: Resident, composition: Composition) -> bool:
    """Than the policy's, or held in another way."""
    policy = composition["policy"]
    return resident.weight_bytes is None and (resident.model != policy.model or resident.quantised_bits != policy.quantised_bits)


def _scale(shape: Shape, policy: Shape) -> float:
    """How much larger its activations are."""
    return len(shape.layers) * shape.hidden / (len(policy.layers) * policy.hidden)


def _parts(
    resident: Resident, trace: Trace, composition: Composition, used: Usage, config: Mapping[str, object], phase: Phase
) -> Iterator[tuple[str, int]]:
    rests = used.resting.parts  # the policy's state between two steps
    ranks = max(1, len(resident.ranks))
    apart = ranks if resident.sharding == "parameters" else 1
    if resident.weight_bytes is not None or _is_another(resident, composition):
        yield from _another(resident, composition, config, phase)
    elif not resident.trains:
        yield "weights", trace.inventory.weight_bytes // apart
    elif composition["policy"].adapter_rank is None:
        # As the policy is held: one after the other is trained, so there is room for its gradients where the policy's are.
        parts: tuple[Part, ...] = ("weights", "optimizer") if resident.state_bytes_per_weight else ("weights",)
        yield from ((part, rests[part]) for part in parts if part in rests)
    else:
        yield "weights", rests.get("weights", 0)
        frozen = trace.inventory.parameters - trace.inventory.trainable_parameters
        yield from _training(resident, composition, frozen, phase)


def _another(
    resident: Resident, composition: Composition, config: Mapping[str, object], phase: Phase
) -> Iterator[tuple[str, int]]:
    """A model that is not the policy's."""
    if resident.weight_bytes is not None:
        yield "weights", resident.weight_bytes
        return
    count = _parameters(resident, _shape_of(resident, composition, config))
    yield "weights", _weights(resident, count)
    if resident.trains_along:
        yield from _training(resident, composition, count, phase)
    elif resident.trains and resident.state_bytes_per_weight:
        yield "optimizer", _spread_state(resident, count * resident.state_bytes_per_weight)


def _shape_of(resident: Resident, composition: Composition, config: Mapping[str, object]) -> Shape:
    if resident.model == composition["policy"].model:
        return shapes.shape(config)
    try:
        return shapes.shape(models.find_model(resident.model).config)
    except BadInput as error:
        raise CannotPredict(f"The {resident.role} model's size decides, and is not known: {error.what}") from error


def _parameters(resident: Resident, shape: Shape) -> int:
    """Who judges has one figure where a policy has a vocabulary."""
    return shape.parameters - (shape.head if resident.role in ("critic", "reward") else 0)


def _own_turn(
    resident: Resident, composition: Composition, used: Usage, config: Mapping[str, object]
) -> Iterator[tuple[Phase, Mapping[str, int]]]:
    """Trained in turns with the policy: by how much its turn takes more than the policy's, which is followed. A model of the
    policy's own shape takes no more: it has a figure per token where the policy has logits."""
    if not (_is_another(resident, composition) and resident.trains and not resident.trains_along):
        return
    shape = _shape_of(resident, composition, config)
    count = _parameters(resident, shape)
    scale = _scale(shape, shapes.shape(config))
    for use in used.phases:
        if use.phase not in TRAINING:
            continue
        own = {
            "weights": _weights(resident, count) if resident.awake == () else 0,
            "optimizer": _spread_state(resident, count * resident.turn_bytes_per_weight),
            "gradients": _gradients(resident, count) if use.phase in _with_gradients(composition) else 0,
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


def _training(resident: Resident, composition: Composition, count: int, phase: Phase) -> Iterator[tuple[str, int]]:
    """What full training of so many weights takes beside them."""
    yield "optimizer", _spread_state(resident, count * resident.state_bytes_per_weight)
    if phase in _with_gradients(composition):
        yield "gradients", _gradients(resident, count)


def _with_gradients(composition: Composition) -> frozenset[Phase]:
    return IN_TRAINING | {"forward"} if composition.accumulation > 1 else IN_TRAINING
