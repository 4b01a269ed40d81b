"""Memory of models outside the traced step, by phase.

Frozen references and rewards (weights), critics (all that training needs), and kept logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autotune.catalog import model_lookup
from autotune.core.composition import Composition, Resident
from autotune.core.errors import BadInput, CannotPredict
from autotune.core.measurement import PHASES, Phase
from autotune.core.trace import Part, Trace
from autotune.estimate import model_shape
from autotune.estimate.model_shape import Shape
from autotune.estimate.replay import TraceUsage

TRAINING: tuple[Phase, ...] = ("forward", "backward", "optimizer")
GRADIENT_PHASES: frozenset[Phase] = frozenset({"backward", "optimizer"})
"""Phases in which a trained critic has gradients; with accumulation, the forward pass too."""

TURN_PARTS: tuple[Part, ...] = ("gradients", "activations", "logits")
"""Parts of the policy that are on the device in its own turn alone."""

STATE: tuple[Part, ...] = ("weights", "optimizer")

FLOAT32_BYTES = 4

# the one model outside a framework's traced step: there are no completions to judge
REWARD_ROLE = "reward"


def other_model_bytes(
    trace: Trace, composition: Composition, used: TraceUsage, config: Mapping[str, object]
) -> Mapping[Phase, Mapping[str, int]]:
    """Return bytes by phase and part; a part carries its model's role: `critic_optimizer`.

    `config`: the policy's config.json.
    """
    held: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
    for resident in composition.residents:
        if resident.role in ("policy", "engine") or resident.shares_weights_with is not None:
            continue
        if trace.basis == "traced" and resident.role != REWARD_ROLE:
            continue
        model = _OtherModel(resident, trace, composition, used, config)
        named = [
            (phase, dict(model.standing(phase)))
            for phase in (PHASES if resident.awake is None else resident.awake)
        ]
        named += [
            (phase, model.own_step())
            for phase in (TRAINING if resident.trains_concurrently else ())
        ]
        for phase, parts in (*named, *model.own_turn()):
            held[phase].update({f"{resident.role}_{part}": size for part, size in parts.items()})
    for phase, size in kept_logits(composition, used, config):
        held[phase]["logits"] += size
    return {phase: dict(parts) for phase, parts in held.items() if parts}


def kept_logits(
    composition: Composition, used: TraceUsage, config: Mapping[str, object]
) -> Iterator[tuple[Phase, int]]:
    """Yield the logits of a loop that keeps those of its rollout.

    The previous rollout's are still held while the next ones are made. Those end up in one piece:
    a second copy, made when the last completions' own are stacked or when the cache is freed.
    """
    each = FLOAT32_BYTES * composition.completion_length * model_shape.shape(config).vocabulary
    whole = composition.retained_logits * each
    last = (composition.generation_micro_batch or composition.retained_logits) * each
    rollout = max((use.requested_bytes for use in used.phases if use.phase == "rollout"), default=0)
    growing = max(0, rollout - used.resting.requested_bytes)
    for phase in PHASES if whole else ():
        if phase == "rollout":
            yield phase, max(2 * whole + last, 3 * whole - growing)
        elif phase != "load":
            yield phase, whole


class _OtherModel:
    """Bytes of one resident beside the policy, on one rank."""

    def __init__(
        self,
        resident: Resident,
        trace: Trace,
        composition: Composition,
        used: TraceUsage,
        config: Mapping[str, object],
    ) -> None:
        self.resident, self.trace, self.composition, self.used, self.config = (
            resident,
            trace,
            composition,
            used,
            config,
        )
        policy = composition["policy"]
        # Another model than the policy's, or the same in another quantisation.
        self.differs = resident.weight_bytes is None and (
            resident.model != policy.model or resident.quantised_bits != policy.quantised_bits
        )
        self.gradient_phases = (
            GRADIENT_PHASES | {"forward"} if composition.accumulation > 1 else GRADIENT_PHASES
        )

    def standing(self, phase: Phase) -> Iterator[tuple[str, int]]:
        """Yield what it holds in a phase in which it is awake, without a step of its own."""
        resident, rests = (
            self.resident,
            self.used.resting.parts,
        )  # rests: the policy's state between two steps
        if resident.weight_bytes is not None:
            yield "weights", resident.weight_bytes
        elif self.differs:
            count = self._parameters()
            yield "weights", self._in_dtype(count, "parameters")
            if resident.trains_concurrently:
                yield from self._training(count, phase)
            elif resident.trains and resident.state_bytes_per_weight:
                yield "optimizer", self._state(count * resident.state_bytes_per_weight)
        elif not resident.trains:
            held = self.trace.inventory.weight_bytes
            yield "weights", self._per_rank(held) if resident.sharding == "parameters" else held
        elif self.composition["policy"].adapter_rank is None:
            # Held like the policy. They train in turns: gradients share their memory.
            parts: tuple[Part, ...] = (
                ("weights", "optimizer") if resident.state_bytes_per_weight else ("weights",)
            )
            yield from ((part, rests[part]) for part in parts if part in rests)
        else:
            yield "weights", rests.get("weights", 0)
            yield from self._training(
                self.trace.inventory.parameters - self.trace.inventory.trainable_parameters, phase
            )

    def own_step(self) -> dict[str, int]:
        """Return its concurrent step: like the policy's without logits.

        Activations of another model are scaled by depth and width; gradients: `_training`.
        """
        scale = self._scale() if self.differs else 1.0
        parts: Counter[str] = Counter()
        for use in self.used.phases:
            if use.phase in TRAINING:
                own = {
                    "activations": round(use.parts.get("activations", 0) * scale),
                    "inputs": use.parts.get("inputs", 0),
                }
                gradients = {} if self.differs else {"gradients": use.parts.get("gradients", 0)}
                parts |= Counter({**own, **gradients})
        return dict(parts)

    def own_turn(self) -> Iterator[tuple[Phase, Mapping[str, int]]]:
        """Yield the excess of its turn over the policy's, if the two train in turns.

        A model of the policy's own shape has no excess: one value per token instead of logits.
        """
        resident = self.resident
        if not (self.differs and resident.trains and not resident.trains_concurrently):
            return
        count, scale = self._parameters(), self._scale()
        offloaded = tuple(part for part in STATE if part in self.composition.offloaded_in_rollout)
        for use in self.used.phases:
            if use.phase not in TRAINING:
                continue
            own = {
                "weights": self._in_dtype(count, "parameters") if resident.awake == () else 0,
                "optimizer": self._state(count * resident.offloaded_bytes_per_weight),
                "gradients": (
                    self._in_dtype(count, "parameters", "gradients")
                    if use.phase in self.gradient_phases
                    else 0
                ),
                "activations": round(use.parts.get("activations", 0) * scale),
            }
            policy = sum(use.parts.get(part, 0) for part in (*TURN_PARTS, *offloaded))
            # The excess, filled up with its parts in their order.
            left, excess = max(0, sum(own.values()) - policy), {}
            for part, size in own.items():
                taken = min(size, left)
                left -= taken
                if taken:
                    excess[part] = taken
            yield use.phase, excess

    def _shape(self) -> Shape:
        if self.resident.model == self.composition["policy"].model:
            return model_shape.shape(self.config)
        try:
            return model_shape.shape(model_lookup.find_model(self.resident.model).config)
        except BadInput as error:
            raise CannotPredict(
                f"The {self.resident.role} model's size decides, and is not known: {error.what}"
            ) from error

    def _scale(self) -> float:
        """Return layers · hidden, relative to the policy's: the ratio of the activations."""
        shape, policy = self._shape(), model_shape.shape(self.config)
        return len(shape.layers) * shape.hidden / (len(policy.layers) * policy.hidden)

    def _parameters(self) -> int:
        """Return the parameters; critics and rewards have one output, no vocabulary."""
        shape = self._shape()
        return shape.parameters - (shape.head if self.resident.role in ("critic", "reward") else 0)

    def _training(self, count: int, phase: Phase) -> Iterator[tuple[str, int]]:
        """Yield optimizer state and gradients of full training."""
        yield "optimizer", self._state(count * self.resident.state_bytes_per_weight)
        if phase in self.gradient_phases:
            yield "gradients", self._in_dtype(count, "parameters", "gradients")

    def _in_dtype(self, count: int, *sharded: str) -> int:
        """Return the bytes of weights or gradients, which these kinds of sharding divide among
        the ranks.
        """
        size = count * model_shape.dtype_bytes(self.resident.dtype)
        return self._per_rank(size) if self.resident.sharding in sharded else size

    def _state(self, size: int) -> int:
        return size if self.resident.sharding == "none" else self._per_rank(size)

    def _per_rank(self, size: int) -> int:
        return size // max(1, len(self.resident.ranks))
