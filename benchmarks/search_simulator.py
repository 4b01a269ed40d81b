"""Simulated GPU machine on which every truth is known, for judging the search.

Written from first principles and independent of `autotune.estimate`: parameter counts, bytes per
token and layer, the engine's reservation, sharding, rooflines. No formula is the predictor's; both
use facts (a model's shape, a card's size and rates) and common facts about the training step (two
bytes per weight, Adam's two moments). Nothing here reads a prediction, but a caller may set its two
levels by some. It is not a model of a real machine: its quirks are drawn, and it has interactions
that the predictor lacks.

Sources: activations per token and layer, Korthikanti et al. 2022 (arXiv:2205.05198), transferred to
gated MLPs and grouped heads; mixed-precision states, Rajbhandari et al. 2020 (arXiv:1910.02054);
paged caches and recomputation on preemption, Kwon et al. 2023 (arXiv:2309.06180).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog import Gpu
from autotune.core.measurement import Phase
from autotune.core.space import Candidate

GIB, MIB = 2**30, 2**20
CHUNK = 1024
"""Tokens whose logits are there at a time."""

GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time under ZeRO-3."""

SHORTENED = (
    "max_prompt_length",
    "max_completion_length",
    "steps_per_generation",
    "gradient_accumulation_steps",
)
"""Settings of a probe that is shorter than the training."""

TAIL_POINTS = 100
"""Quantiles that stand for a law of lengths."""


@dataclass(frozen=True)
class Shape:
    """A decoder's numbers."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
        )

    @property
    def per_layer(self) -> int:
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.per_layer + self.vocabulary * self.hidden * (
            1 if self.tied else 2
        )

    @property
    def cache_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head

    def adapter(self, rank: int) -> int:
        """LoRA on all seven projections."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        ends = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.inner)
        return self.layers * rank * ends

    @property
    def live_per_token(self) -> float:
        """Bytes that one layer keeps per token for its backward pass: inputs of norms and
        projections, queries, keys and values, and of the gated MLP its gate, its other half and
        their product.
        """
        q, kv = self.heads * self.head, self.kv_heads * self.head
        return 2 * (4 * self.hidden + q + 2 * kv + 3 * self.inner)


@dataclass(frozen=True)
class Truth:
    """True figures of one candidate on one machine."""

    peak_bytes: float
    """What nvidia-smi would show without a limit: blocks that torch keeps are included."""

    need_bytes: float
    """What is left of it once torch has given back what it can: more than the limit fails."""

    peaks: Mapping[Phase, float]
    """Peak by phase."""

    phase: Phase
    """Phase of the peak, or of the failure."""

    cause: str | None
    """Cause of the failure, None where it runs."""

    numbers: Mapping[str, float]
    cycle_seconds: float
    by_phase: Mapping[str, float]
    tokens: int
    load_seconds: float
    setup_seconds: float


@dataclass(frozen=True)
class Tail:
    """Lengths of completions as shares of the longest, in rising order: a log-normal law, cut at
    1.
    """

    shares: tuple[float, ...]

    @classmethod
    def drawn(cls, dice: random.Random) -> Tail:
        middle, spread = dice.uniform(0.1, 0.4), dice.uniform(0.5, 1.1)
        law = statistics.NormalDist(math.log(middle), spread)
        return cls(
            tuple(
                min(1.0, math.exp(law.inv_cdf((place + 0.5) / TAIL_POINTS)))
                for place in range(TAIL_POINTS)
            )
        )

    @property
    def mean(self) -> float:
        return statistics.fmean(self.shares)

    def longest_of(self, count: float) -> float:
        """Expected longest of so many completions."""
        below = [(place / TAIL_POINTS) ** count for place in range(TAIL_POINTS + 1)]
        return sum(
            share * (below[place + 1] - below[place]) for place, share in enumerate(self.shares)
        )


@dataclass(frozen=True)
class Quirks:
    """Differences of this machine from others: one draw per study."""

    static: float
    activations: float
    logits: float
    rollout: float
    training: float
    movement: float
    fragments: float
    kept: float
    pressure: float
    preemption: float
    wide: float
    small_share: float = 1.0
    """Slowdown of an engine whose share of the card goes to 0; none from half of the card on."""

    small_micro: float = 1.0
    """Slowdown of training at micro-batches of 1; none at 32."""

    recompute: float = 1.0
    """Seconds of recomputation, as a multiple of a forward pass."""

    link: float = 1.0
    """Share of the link's rate in the catalogue."""

    plain: float = 1.0
    """Slowdown of generation by transformers."""

    sleeping: float = 1.0
    """Slowdown of an engine's sleep and wake."""

    returned: float = 0.0
    """Share of the blocks that torch keeps which it gives back before memory runs out."""

    tail: Tail | None = None
    """Lengths of completions; None: all are the longest."""

    @classmethod
    def drawn(cls, dice: random.Random) -> Quirks:
        def within(share: float) -> float:
            return math.exp(dice.uniform(-math.log(1 + share), math.log(1 + share)))

        return cls(
            static=within(0.06),
            activations=within(0.15),
            logits=within(0.15),
            rollout=within(0.3),
            training=within(0.3),
            movement=within(0.3),
            fragments=dice.uniform(0.01, 0.06),
            kept=dice.uniform(0.5, 0.95),
            pressure=dice.uniform(0.0, 0.3),
            preemption=dice.uniform(0.1, 0.5),
            wide=dice.uniform(0.0, 0.06),
        )

    @classmethod
    def worse(cls, dice: random.Random) -> Quirks:
        """Draw a machine that contradicts the prediction: each knob by a factor of its own, up
        to 3 in speed and a quarter in memory.
        """

        def up_to(factor: float) -> float:
            return math.exp(dice.uniform(0, math.log(factor)))

        def around(factor: float) -> float:
            return math.exp(dice.uniform(-1, 1) * math.log(factor))

        return replace(
            cls.drawn(dice),
            static=around(1.1),
            activations=around(1.25),
            logits=around(1.25),
            rollout=around(3),
            training=around(1.5),
            movement=around(2),
            pressure=dice.uniform(0.0, 0.6),
            small_share=up_to(3),
            small_micro=up_to(3),
            recompute=up_to(2),
            link=1 / up_to(10),
            plain=around(3),
            sleeping=up_to(3),
            tail=Tail.drawn(dice),
        )


@dataclass(frozen=True)
class Machine:
    """Model, cards and quirks; candidates go in, truths come out."""

    shape: Shape
    gpu: Gpu
    ranks: int
    limit_bytes: int
    quirks: Quirks
    shortened: float = 1.0
    """Prompts, completions and rollouts, as shares of the longest."""

    def truth(self, candidate: Candidate) -> Truth:
        run = _Run(self, self._shortened(candidate.settings))
        peaks = run.peaks()
        needs = run.peaks(kept_share=1 - self.quirks.returned)
        phase = max(peaks, key=lambda name: peaks[name])
        failure = run.engine_failure()
        cause, numbers = failure or (None, {})
        need_bytes = max(needs.values())
        if cause is None and need_bytes > self.limit_bytes:
            phase = next(name for name in needs if needs[name] > self.limit_bytes)
            cause, numbers = _cause(phase, run), run.oom_numbers()
        seconds = run.seconds(peaks[phase] / self.limit_bytes)
        return Truth(
            peak_bytes=peaks[phase],
            need_bytes=need_bytes,
            peaks=peaks,
            phase="load" if failure else phase,
            cause=cause,
            numbers=numbers,
            cycle_seconds=sum(seconds.values()),
            by_phase=seconds,
            tokens=run.tokens(),
            load_seconds=run.load_seconds(),
            setup_seconds=2.0 + 0.02 * self.shape.layers,
        )

    def _shortened(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return shorter rows, and fewer micro-steps, of the same micro-batch."""
        if self.shortened == 1:
            return settings
        changes = {}
        for name in SHORTENED:
            if settings.get(name):
                changes[name] = max(1, round(settings[name] * self.shortened))
        return {**settings, **changes}


def _cause(phase: str, run: _Run) -> str:
    if phase in ("rollout", "sync", "load"):
        return {
            "rollout": "kv_cache" if not run.engine else "activations",
            "sync": "weight_sync",
            "load": "weights",
        }[phase]
    return (
        "optimizer"
        if phase == "optimizer"
        else "logits"
        if run.logits() > run.activations()
        else "activations"
    )


class _Run:
    """Candidate's settings on one machine."""

    def __init__(self, machine: Machine, settings: Mapping[str, Any]) -> None:
        self.m, self.shape, self.gpu, self.quirks = (
            machine,
            machine.shape,
            machine.gpu,
            machine.quirks,
        )
        self.micro = settings["per_device_train_batch_size"]
        self.steps = settings.get("steps_per_generation") or settings["gradient_accumulation_steps"]
        self.sequences = self.micro * self.steps
        self.prompt, self.completion = (
            settings["max_prompt_length"],
            settings["max_completion_length"],
        )
        self.length = self.prompt + self.completion
        self.recompute, self.lora = (
            bool(settings["gradient_checkpointing"]),
            bool(settings.get("use_peft")),
        )
        self.sharding = settings.get("sharding") or ("ddp" if machine.ranks > 1 else "none")
        self.engine = bool(settings["use_vllm"])
        self.share = settings.get("vllm_gpu_memory_utilization", 0.0) if self.engine else 0.0
        self.sleeps = self.engine and bool(settings.get("vllm_enable_sleep_mode"))
        self.together = (settings.get("vllm_tensor_parallel_size") or 1) if self.engine else 1
        self.adapter = self.shape.adapter(settings.get("lora_r") or 16) if self.lora else 0
        self.trained = self.adapter if self.lora else self.shape.parameters
        self.divided = machine.ranks if self.sharding == "zero3" else 1

    # Memory.

    def weights(self) -> float:
        return 2 * self.shape.parameters / self.divided * self.quirks.static

    def states(self) -> float:
        """Gradients and Adam's moments; DeepSpeed also keeps float32 masters."""
        split = self.m.ranks if self.sharding in ("zero2", "zero3") else 1
        if self.sharding in ("zero2", "zero3"):
            return self.trained * (2 + 12) / split
        per = 16 if self.lora else 6
        return self.trained * per

    def activations(self) -> float:
        tokens, layer = self.micro * self.length, self.shape.live_per_token
        activation_numbers = (
            2 * self.shape.hidden * self.shape.layers + layer
            if self.recompute
            else layer * self.shape.layers
        )
        extra = 1.0 if self.lora else 1.15  # what weights of their own need beside
        return tokens * activation_numbers * extra * self.quirks.activations

    def logits(self) -> float:
        """Bytes of one chunk of tokens: half precision, float32 and a gradient. TRL 1.16 computes
        log-probabilities chunk by chunk."""
        return (
            min(self.micro * self.completion, CHUNK)
            * self.shape.vocabulary
            * 8
            * self.quirks.logits
        )

    def base(self) -> float:
        context_gib = (0.35 if self.m.ranks > 1 else 0.0) + 0.45
        gathered = GATHERED_LAYERS * 2 * self.shape.per_layer if self.sharding == "zero3" else 0
        return self.weights() + gathered + context_gib * GIB

    def reserved(self) -> float:
        return self.share * self.gpu.memory_bytes

    def peaks(self, kept_share: float = 1.0) -> dict[Phase, float]:
        """Return peaks by phase in their order; the allocator's cached bytes between them are the
        fragments' share. `kept_share`: share of the cached bytes that it does not give back."""
        base, states = self.base(), self.states()
        awake = self.reserved()
        asleep = 0.9 * GIB if self.sleeps else awake
        training = self.activations() + self.logits()
        loose = 1 + kept_share * self.quirks.fragments * (2.0 if not self.recompute else 1.0) * (
            1.5 if self.sleeps and not self.recompute else 1.0
        )
        gathered_weights = 2 * self.shape.parameters if self.sharding == "zero3" else 0
        # What torch holds on to after the first micro-steps. TRL lets go of it before it wakes a
        # sleeping engine (trl/generation/vllm_generation.py, `empty_cache`).
        retained = 0.0 if self.sleeps else kept_share * self.quirks.kept * training
        rollout = (
            awake + retained
            if self.engine
            else self.sequences * self.length * self.shape.cache_per_token + gathered_weights
        )
        sampled = 0 if self.engine else self.sequences * self.shape.vocabulary * 12
        return {
            "load": base + awake,
            "rollout": base + states + rollout + sampled,
            "sync": base + states + awake + retained + self._moving(),
            "forward": base + states + asleep + training * 0.85 * loose,
            "backward": base + states + asleep + training * loose,
            "optimizer": base + states + asleep + (0 if self.lora else 0.1 * self.trained),
        }

    def _moving(self) -> float:
        """Bytes of the transfer of weights to the engine: one layer at a time; to merge
        adapters, TRL gathers all at once.
        """
        if not self.engine:
            return 0.0
        if self.sharding == "zero3" and self.lora:
            return 2 * self.shape.parameters
        return 2 * self.shape.per_layer + 2 * self.shape.vocabulary * self.shape.hidden

    def cache_bytes(self) -> float:
        """Remaining bytes of the engine's reservation."""
        profiled = (
            (0.6 if self.together == 1 else 1.1) * GIB
            + self.sequences * self.together * self.shape.vocabulary * 6
            + 40 * MIB * math.sqrt(self.shape.layers)
        )
        return (
            self.reserved()
            - 2 * self.shape.parameters / self.together * self.quirks.static
            - profiled
        )

    @property
    def _cached_here(self) -> float:
        """Bytes of one token's cache on one card; heads that are fewer than the cards are held
        more than once.
        """
        return self.shape.cache_per_token / min(self.together, self.shape.kv_heads)

    def engine_failure(self) -> tuple[str, dict[str, float]] | None:
        if not self.engine:
            return None
        free = self.m.limit_bytes - self.base()
        if self.reserved() > free:
            return "engine_startup", {
                "asked_bytes": int(self.reserved()),
                "free_bytes": int(free),
                "total_bytes": self.gpu.memory_bytes,
                "asked_share": self.share,
                "free_share": max(0.0, free / self.gpu.memory_bytes),
            }
        cache, cache_of_row = self.cache_bytes(), int(self.length * self._cached_here)
        if cache < cache_of_row:
            return "kv_cache", {
                "asked_bytes": cache_of_row,
                "free_bytes": max(0, int(cache)),
                "asked_length": self.length,
                "longest_length": max(0, int(cache / self._cached_here)),
            }
        return None

    def oom_numbers(self) -> dict[str, float]:
        request = (
            self.logits() / 4
            if self.logits() > self.activations() / 8
            else self.activations() / self.shape.layers
        )
        free = request * 0.6
        return {
            "asked_bytes": int(request),
            "free_bytes": int(free),
            "total_bytes": self.m.limit_bytes,
        }

    # Speed.

    @property
    def _mean(self) -> float:
        return self.quirks.tail.mean if self.quirks.tail else 1.0

    def _longest(self, count: float) -> float:
        return self.quirks.tail.longest_of(count) if self.quirks.tail else 1.0

    def tokens(self) -> int:
        return round(self.sequences * self.m.ranks * self.completion * self._mean)

    def seconds(self, fill: float) -> dict[str, float]:
        slow = 1 + self.quirks.pressure * max(0.0, min(1.0, (fill - 0.93) / 0.07))
        parts = {"rollout": self._rollout(), "sync": self._sync(), **self._training()}
        slowed = {}
        for name, value in parts.items():
            slowed[name] = value * (slow if name in ("forward", "backward") else 1.0)
        return slowed

    @property
    def _bandwidth(self) -> float:
        return (self.gpu.bandwidth_gb_per_second or 500) * 1e9

    @property
    def _link(self) -> float:
        return (self.gpu.link_gb_per_second or 16) * 1e9 * 0.6 * self.quirks.link

    def _rollout(self) -> float:
        cached = self.shape.cache_per_token * (self.prompt + self.completion / 2)
        weights = 2 * self.shape.parameters
        prefill = 2 * self.shape.parameters * self.sequences * self.prompt / self._flops(0.4)
        if not self.engine:
            step = (
                weights / (0.55 * self._bandwidth)
                + self.sequences * cached / (0.3 * self._bandwidth)
                + 2.2e-4 * self.shape.layers
            )
            gather = weights / self._link if self.sharding == "zero3" else 0.0
            steps = self.completion * self._longest(self.sequences)
            return (steps * step + prefill) * self.quirks.rollout * self.quirks.plain + gather
        sequences = self.sequences * self.together
        room = max(1.0, self.cache_bytes() / (self.length * self._cached_here))
        running = min(sequences, room)
        waves = sequences / running
        step = weights / self.together / (
            0.75 * self._bandwidth
        ) + running * cached / self.together / (0.6 * self._bandwidth)
        step += (
            1.2e-5 * self.shape.layers
            + 1.5e-3
            + (0 if self.together == 1 else self.shape.layers * self._exchange(running))
        )
        thrash = 1 + self.quirks.preemption * max(0.0, 1 - room / sequences)
        steps = self.completion * (self._longest(sequences) + (waves - 1) * self._mean)
        small = self.quirks.small_share ** max(0.0, 1 - self.share / 0.5)
        return (steps * step * thrash * small + prefill) * self.quirks.rollout

    def _exchange(self, running: float) -> float:
        """Seconds of a layer's two all-reduces between the engine's cards."""
        return 2 * (2.5e-5 + 2 * running * self.shape.hidden * 2 / self._link)

    def _sync(self) -> float:
        if not self.engine:
            return 0.01
        weights = 2 * self.shape.parameters
        seconds = 3 * weights / self.together / self._bandwidth + 1.5e-3 * self.shape.layers
        seconds += weights / self._link if self.sharding == "zero3" else 0.0
        seconds += (
            (0.4 + weights / self.together / 18e9) * self.quirks.sleeping if self.sleeps else 0.0
        )
        return seconds * self.quirks.movement

    def _flops(self, share: float) -> float:
        return self.gpu.tflops.get("bfloat16", 100.0) * 1e12 * share

    def _training(self) -> dict[str, float]:
        tokens = self.micro * (self.prompt + self.completion * self._longest(self.micro))
        share = (
            0.52
            * tokens
            / (tokens + 1800)
            * (1 - self.quirks.wide * max(0.0, math.log2(tokens / 16384)))
        )
        work = 2 * self.shape.parameters * tokens
        forward = work / self._flops(share) + 2.5e-4 * self.shape.layers
        backward = forward * (
            (1.05 if self.lora else 2.0) + (self.quirks.recompute if self.recompute else 0.0)
        )
        few = self.quirks.small_micro ** max(0.0, 1 - math.log2(self.micro) / 5)
        moved = self._moved()
        once = 4 * self.trained / self._link if self.sharding == "ddp" else 0.0
        optimizer = (
            20
            * self.trained
            / (self.m.ranks if self.sharding in ("zero2", "zero3") else 1)
            / self._bandwidth
            + 0.02
            + once
        )
        return {
            "forward": self.steps * (forward * few * self.quirks.training + moved / 3),
            "backward": self.steps * (backward * few * self.quirks.training + moved * 2 / 3),
            "optimizer": optimizer * self.quirks.movement,
        }

    def _moved(self) -> float:
        """Seconds of a micro-step's traffic between cards that computing does not hide."""
        if self.sharding == "zero3":
            gathers = 3 if self.recompute else 2
            return (
                0.45
                * (gathers * 2 * self.shape.parameters + 2 * self.trained)
                / self._link
                * self.quirks.movement
            )
        return (
            0.5 * 2 * self.trained / self._link * self.quirks.movement
            if self.sharding == "zero2"
            else 0.0
        )

    def load_seconds(self) -> float:
        load = 8 + 2 * self.shape.parameters / 1.5e9 / (
            self.m.ranks if self.sharding == "zero3" else 1
        )
        load += 6 if self.m.ranks > 1 else 0
        return load + (
            22 + 0.35 * self.shape.layers + 2 * self.shape.parameters / self.together / 5e9
            if self.engine
            else 0
        )
