"""A stand-in step in common words, and what follows from it: the specification to trace, and the models that are resident."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autotune.composition import Composition, EngineSettings, Generation, Resident, Sharding
from autotune.measurement import Phase
from autotune.trainers.base import Job

STAND_IN = "generic_trace"
"""The module of the training side that follows it: no framework needs to be installed for that."""

MASTER_AND_MOMENTS = 12
"""DeepSpeed's float32 copy and Adam's two moments, in bytes per weight."""

SPREAD_BY: Mapping[str, Sharding] = {
    "zero1": "optimizer",
    "zero2": "gradients",
    "zero3": "parameters",
    "fsdp1": "parameters",
    "fsdp2": "parameters",
}


FOLLOWED_MICRO_STEPS = 2
"""Of an optimizer step: the first makes the gradients, and every later one is as the second."""


@dataclass(frozen=True, kw_only=True)
class Other:
    """A model beside the policy, on the policy's devices."""

    role: str
    """`reference`, `critic` or `reward`."""

    model: str
    dtype: str = "bfloat16"
    trains: bool = False
    whole: bool = False
    """A copy on every device, where the policy is spread."""

    awake: tuple[Phase, ...] | None = None
    """The phases in which it is on the device; None is always, () never for long."""

    state_bytes_per_weight: int = 8
    turn_bytes_per_weight: int = 0
    """Of that, what is on the device in its own turn alone."""

    trains_along: bool = False
    """At the same time as the policy, with activations of its own."""

    as_quantised: bool = True
    """Where the policy's weights are quantised, so are its own."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one framework's settings mean."""

    prompt: int
    completion: int
    tokens: int
    """In one micro-batch on one device, every row at its longest."""

    score_tokens: int
    """The same of a pass for log-probabilities alone."""

    rows: int
    accumulation: int
    generation_batch: int
    """Completions in one rollout, over all devices."""

    ranks: int
    """Devices that train."""

    sharding: str
    options: Mapping[str, object] = field(default_factory=dict)
    shard_ranks: int | None = None
    """Over which the state is spread, where that is not all."""

    traced_dtype: str = "bfloat16"
    """Precision that it computes in."""

    held_dtype: str = "bfloat16"
    """Precision that weights are kept in."""

    mixed: bool = False
    """Whether that is said as mixed precision."""

    adapter: Mapping[str, object] | None = None
    widens_adapter: bool = False
    """Whether PEFT keeps the adapter in float32 over shorter weights, as it does unless told otherwise."""

    quantised: bool = False
    loss: str = "logprobs"
    loss_options: Mapping[str, object] = field(default_factory=dict)
    score_options: Mapping[str, object] = field(default_factory=dict)
    """Of the loss, where a pass for log-probabilities alone differs."""

    checkpointing: bool = True
    reentrant: bool = False
    optimizer: str = "adamw_torch"
    clip: float = 1.0
    attention: str | None = "flash_attention_2"
    others: tuple[Other, ...] = ()
    generation: Generation = "engine"
    engine: EngineSettings | None = None
    engine_dtype: str = "bfloat16"
    processes: int = 1
    away_in_rollout: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    """Parts of this step that the framework's own kernels may keep next to nothing of."""

    pushes_adapter: bool = False
    """To the engine, alone: else whole weights, with what was learned merged into them."""

    pushes_in: int = 1
    """Parts, one after the other, in which they go over."""

    writes_at_a_time: int | None = None
    keeps_logits_of: int = 0
    empties_cache: bool = False
    """As a Composition has them."""

    notes: tuple[str, ...] = ()


def trace_request(step: Step, job: Job) -> Mapping[str, object]:
    """A packed micro-batch as so many rows of at least the longest length: as many tokens, and attention within rows alone."""
    model, longest = job.workload.model, step.prompt + step.completion
    rows, length = _cut(step.tokens, longest)
    sharding: dict[str, object] = {"kind": step.sharding, "ranks": step.shard_ranks or step.ranks}
    return {
        "method": "generic",
        "model": {
            "name": model.name,
            "folder": None if model.folder is None else str(model.folder),
            "config": dict(model.config),
            "dtype": step.held_dtype if step.mixed else step.traced_dtype,
            "attn_implementation": step.attention,
            "load_in_4bit": step.quantised,
            "load_in_8bit": False,
            "gptq_bits": gptq_bits(model.config),
            "layers": None,
        },
        "adapter": None if step.adapter is None else dict(step.adapter),
        "settings": {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": min(step.accumulation, FOLLOWED_MICRO_STEPS),
            "gradient_checkpointing": step.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": step.reentrant},
            "optim": step.optimizer,
            "max_grad_norm": step.clip,
            "bf16": step.mixed or step.sharding.startswith("zero"),
            "use_cache": False,
            "autocast_adapter_dtype": step.widens_adapter,
            "loss": step.loss,
            "loss_options": dict(step.loss_options),
            "score": {**_score_size(step, longest), "loss_options": dict(step.score_options)},
        },
        "device": job.hardware.kind,
        "lengths": {"prompt": min(step.prompt, length - 1), "completion": length - min(step.prompt, length - 1), "padded": False},
        "sharding": sharding | ({"options": dict(step.options)} if step.options else {}),
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": job.workload.trust_remote_code,
    }


def gptq_bits(config: Mapping[str, object]) -> int | None:
    """Where the weights on the hub are quantised already."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "gptq":
        return None
    bits = quantised.get("bits")
    return bits if isinstance(bits, int) else None


def _score_size(step: Step, longest: int) -> dict[str, int]:
    """Without what is the step's own: candidates that differ in their size alone then ask for one thing at several sizes."""
    (rows, length), own = _cut(step.score_tokens, longest), _cut(step.tokens, longest)
    if (rows, length) == own:
        return {}
    return {"rows": rows} if length == own[1] else {"rows": rows, "length": length}


def _cut(tokens: int, longest: int) -> tuple[int, int]:
    """Rows and their length: not one token less."""
    rows = max(1, tokens // longest)
    return rows, max(2, math.ceil(tokens / rows))


def compose(step: Step, job: Job) -> Composition:
    return Composition(
        residents=tuple(_residents(step, job)),
        ranks=step.ranks,
        micro_batch=step.rows,
        accumulation=step.accumulation,
        generation_batch=step.generation_batch,
        prompt_length=step.prompt,
        completion_length=step.completion,
        checkpointing=step.checkpointing,
        optimizer=step.optimizer,
        generation=step.generation,
        engine=step.engine,
        attention=step.attention,
        sharded_by=step.sharding,
        processes=step.processes,
        away_in_rollout=step.away_in_rollout,
        spared=step.spared,
        pushes_adapter=step.pushes_adapter,
        pushes_in=step.pushes_in,
        writes_at_a_time=step.writes_at_a_time,
        keeps_logits_of=step.keeps_logits_of,
        empties_cache=step.empties_cache,
        notes=step.notes,
    )


def _residents(step: Step, job: Job) -> Iterator[Resident]:
    ranks, model = tuple(range(step.ranks)), job.workload.model.name
    spread = SPREAD_BY.get(step.sharding, "none")
    rank = None if step.adapter is None else step.adapter.get("lora_r")
    bits = 4 if step.quantised else gptq_bits(job.workload.model.config)
    yield Resident(
        role="policy", model=model, ranks=ranks, dtype=step.held_dtype, trains=True, sharding=spread,
        adapter_rank=rank if isinstance(rank, int) else None, quantised_bits=bits,
    )  # fmt: skip
    for other in step.others:
        yield _other(other, ranks, spread, bits if other.as_quantised else None)
    if step.engine is not None:
        yield Resident(
            role="engine", model=model, ranks=ranks, dtype=step.engine_dtype, trains=False,
            sharding="tensor" if step.engine.tensor_parallel > 1 else "none", claims_share=step.engine.utilization,
            awake=("rollout", "sync") if step.engine.sleep else None,
        )  # fmt: skip


def _other(other: Other, ranks: tuple[int, ...], spread: Sharding, bits: int | None) -> Resident:
    assert other.role in ("reference", "critic", "reward")
    return Resident(
        role=other.role, model=other.model, ranks=ranks, dtype=other.dtype, trains=other.trains,  # type: ignore[arg-type]
        sharding="none" if other.whole else spread, awake=other.awake, state_bytes_per_weight=other.state_bytes_per_weight,
        turn_bytes_per_weight=other.turn_bytes_per_weight, trains_along=other.trains_along, quantised_bits=bits,
    )  # fmt: skip
