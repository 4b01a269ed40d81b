"""Stand-in step: a plain transformers step with the models of a framework around it, and vLLM
servers on GPUs of their own.

It yields the specification of a trace and the composition, in terms that frameworks share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autotune.core.composition import (
    CompletionSource,
    Composition,
    EngineSettings,
    Resident,
    Role,
    SplitEngines,
    StepShape,
)
from autotune.core.job import Hardware, Task
from autotune.core.measurement import Phase
from autotune.core.units import GIB
from autotune.frameworks.base import SPREAD_BY, gptq_bits

MASTER_AND_MOMENTS = (
    12  # bytes per weight of DeepSpeed's float32 master copy and Adam's two moments
)
LARGE_DEVICE_BYTES = 70 * GIB
LARGE_LIMITS, USUAL_LIMITS = (1024, 8192), (256, 2048)
"""Sequences, and tokens of a pass, by `EngineArgs` of vLLM 0.31. vLLM takes an A100 for a usual
device whatever its memory.
"""

SHARE = 0.9  # share of its GPUs that a server claims

# micro-steps that are traced: the first allocates the gradients, later ones repeat the second
TRACED_MICRO_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """Model on the policy's devices besides the policy. Undocumented fields are those of a
    Resident.
    """

    role: Role
    model: str
    dtype: str = "bfloat16"
    trains: bool = False
    whole: bool = False  # replicated on every device, even if the policy is sharded
    quantised: bool = True  # quantised like the policy
    awake: tuple[Phase, ...] | None = None
    state_bytes_per_weight: int = 8
    offloaded_bytes_per_weight: int = 0
    trains_concurrently: bool = False


@dataclass(frozen=True, kw_only=True)
class StandInSpec(StepShape):
    """Settings of a framework, translated: the shape of the step and the details that a trace
    needs.
    """

    checkpointing: bool = True
    optimizer: str = "adamw_torch"
    generation: CompletionSource = "engine"
    attention: str | None = "flash_attention_2"
    tokens: int  # of one micro-batch on one device, every row at its longest
    score_tokens: int  # of one forward pass for log-probabilities; 0: the engine's are used
    options: Mapping[str, object] = field(
        default_factory=dict
    )  # of the sharding, as a trace takes them
    shard_ranks: int | None = None  # ranks that share the training state; None: all ranks
    traced_dtype: str = "bfloat16"  # compute precision
    held_dtype: str = "bfloat16"  # storage precision of the weights
    engine_dtype: str = "bfloat16"
    mixed: bool = False  # mixed precision through bf16=true
    adapter: Mapping[str, object] | None = None
    quantised: bool = False
    loss: str = "logprobs"
    loss_options: Mapping[str, object] = field(default_factory=dict)
    score_options: Mapping[str, object] = field(
        default_factory=dict
    )  # that differ in a forward pass for log-probabilities
    activations_in_flight: int | None = (
        None  # saved activations that stay on the device, the others on the host; None: all
    )
    offloads_optimizer: bool = False  # the optimizer's state is on the device during its step only
    reentrant: bool = False
    clip: float = 1.0
    others: tuple[OtherModel, ...] = ()


def trace_request(spec: StandInSpec, task: Task) -> Mapping[str, object]:
    """Return the specification of a trace.

    A packed micro-batch is traced as rows of at least the longest length: the number of tokens is
    the same, and attention stays within a row."""
    model, longest = task.workload.model, spec.prompt_length + spec.completion_length
    rows, length = _rows(spec.tokens, longest)
    prompt = min(spec.prompt_length, length - 1)
    sharding: dict[str, object] = {"kind": spec.sharded_by, "ranks": spec.shard_ranks or spec.ranks}
    return {
        "method": "generic",
        "model": {
            "name": model.name,
            "folder": None if model.folder is None else str(model.folder),
            "config": dict(model.config),
            "dtype": spec.held_dtype if spec.mixed else spec.traced_dtype,
            "attn_implementation": spec.attention,
            "load_in_4bit": spec.quantised,
            "load_in_8bit": False,
            "gptq_bits": gptq_bits(model.config),
            "layers": None,
        },
        "adapter": None if spec.adapter is None else dict(spec.adapter),
        "settings": {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": min(spec.accumulation, TRACED_MICRO_STEPS),
            "gradient_checkpointing": spec.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": spec.reentrant},
            "optim": spec.optimizer,
            "max_grad_norm": spec.clip,
            "bf16": spec.mixed or spec.sharded_by.startswith("zero"),
            "use_cache": False,
            "autocast_adapter_dtype": False,  # the adapter has the precision of the weights
            "loss": spec.loss,
            "loss_options": dict(spec.loss_options),
            **(
                {"activations_in_flight": spec.activations_in_flight}
                if spec.activations_in_flight is not None
                else {}
            ),
            **({"offloads_optimizer": True} if spec.offloads_optimizer else {}),
            "score": (
                _score_settings(spec, longest)
                if spec.generation != "none" and spec.score_tokens
                else None
            ),
        },
        "device": task.hardware.kind,
        "lengths": {"prompt": prompt, "completion": length - prompt, "padded": False},
        "sharding": sharding | ({"options": dict(spec.options)} if spec.options else {}),
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": task.workload.trust_remote_code,
    }


def _score_settings(spec: StandInSpec, longest: int) -> dict[str, object]:
    """Return the scoring pass of completions, without the sizes that equal the training pass's.

    Candidates that differ only in size then share one request."""
    (rows, length), own = _rows(spec.score_tokens, longest), _rows(spec.tokens, longest)
    sizes = (
        {}
        if (rows, length) == own
        else {"rows": rows}
        if length == own[1]
        else {"rows": rows, "length": length}
    )
    return {**sizes, "loss_options": dict(spec.score_options)}


def _rows(tokens: int, longest: int) -> tuple[int, int]:
    """Return the number of rows and their length; together at least `tokens`."""
    rows = max(1, tokens // longest)
    return rows, max(2, math.ceil(tokens / rows))


def compose(spec: StandInSpec, task: Task) -> Composition:
    ranks, model = tuple(range(spec.ranks)), task.workload.model.name
    spread = SPREAD_BY.get(spec.sharded_by, "none")
    rank = None if spec.adapter is None else spec.adapter.get("lora_r")
    bits = 4 if spec.quantised else gptq_bits(task.workload.model.config)
    residents = [
        Resident(
            role="policy",
            model=model,
            ranks=ranks,
            dtype=spec.held_dtype,
            trains=True,
            sharding=spread,
            adapter_rank=rank if isinstance(rank, int) else None,
            quantised_bits=bits,
        )
    ]
    for other in spec.others:
        own = {
            name: value for name, value in vars(other).items() if name not in ("whole", "quantised")
        }
        sharding = "none" if other.whole else spread
        residents.append(
            Resident(
                ranks=ranks,
                sharding=sharding,
                quantised_bits=bits if other.quantised else None,
                **own,
            )
        )
    if spec.engine is not None:
        residents.append(
            Resident(
                role="engine",
                model=model,
                ranks=ranks,
                dtype=spec.engine_dtype,
                trains=False,
                sharding="tensor" if spec.engine.tensor_parallel > 1 else "none",
                awake=("rollout", "sync") if spec.engine.sleep else None,
            )
        )
    return Composition(
        residents=tuple(residents),
        **{each.name: getattr(spec, each.name) for each in fields(StepShape)},
    )


def served(
    hardware: Hardware,
    *,
    gpus: int,
    tensor_parallel: int,
    window: int,
    dtype: str,
    utilization: float = SHARE,
    **schedule: Any,
) -> SplitEngines:
    """Return the engines of a server, gpus / tensor_parallel replicas with vLLM's defaults;
    `schedule`: how they overlap with training.
    """
    large = hardware.memory_bytes >= LARGE_DEVICE_BYTES and "a100" not in hardware.name.lower()
    sequences, tokens = LARGE_LIMITS if large else USUAL_LIMITS
    engine = EngineSettings(
        utilization=utilization,
        max_model_length=window,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        tensor_parallel=max(1, tensor_parallel),
        apart=True,
    )
    return SplitEngines(gpus=gpus, engine=engine, dtype=dtype, **schedule)
