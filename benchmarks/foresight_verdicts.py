"""Verdicts on GRPO and PPO rows: fit or not. Facts that the source does not state stay open, and
the verdict reports them.

Each row's training step is a generic one with its Composition around it. An unstated fact that
affects memory is tried both ways, and a verdict exists if all ways agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import foresight_verl
import msgspec
from foresight_express import Case

from autotune import catalog
from autotune.core.composition import (
    CompletionSource,
    Composition,
    EngineSettings,
    Resident,
    Role,
    ShardedState,
)
from autotune.core.job import Hardware
from autotune.core.prediction import Prediction
from autotune.core.trace import Trace
from autotune.core.units import MIB
from autotune.estimate import sharding
from autotune.estimate.predictor import predict
from autotune.estimate.trace_context import PredictionInput
from autotune.estimate.track import Track

MODELS = {
    "/home/u/Projects/Qwen/Qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "unsloth/qwen3-14b-unsloth-bnb-4bit": "Qwen/Qwen3-14B",
    "Qwen/Qwen2.5-Math-7B": "Qwen/Qwen2.5-7B",
    "Qwen2.5-72B-Instruct": "Qwen/Qwen2.5-72B-Instruct",
    "llama3_70b": "meta-llama/Llama-3.1-70B",
    "Llama-3-8b-sft-mixture": "meta-llama/Llama-3.1-8B",
    "32b (model-type qwq)": "Qwen/QwQ-32B",
    "Qwen/Qwen2-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
}
"""Fine-tunes and spellings, by a model of the same shape that the catalogue has."""

GPUS = {
    "Tesla T4": "T4",
    "RTX 3090": "RTX3090",
    "H100": "H100",
    "A40": "A40",
    "H20": "H20",
    "A800": "A100-80G",
    "H800": "H100",
    None: "A100-80G",
}
"""Card that is assumed for 80 GB of memory without a name: the A100. Its size decides, not its
speed.
"""

ALTERNATIVES: Mapping[str, tuple[Any, Any]] = {
    "gc": (True, False),
    "optim": ("adamw_torch", "adamw_torch_fused"),
    "beta": (0.0, 0.04),
}
"""Possible values of unstated facts. TRL's default of beta changed from 0.04 to 0; above 0 a full
tuning holds a reference model. Precision is assumed to be bfloat16, the default of all these
frameworks, and attention to be flash or sdpa's flash, which keep the same tensors."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A row's facts, in one framework-free form."""

    model: str
    ranks: int
    micro_batch: int
    prompt: int
    completion: int
    sharded_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineSettings | None = None
    generation: CompletionSource = "server"
    generation_batch: int = 1
    beside: tuple[Role, ...] = ()
    trl: bool = False
    """True where TRL's own trainer trains."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Combination of the unstated facts."""

    chosen: Mapping[str, Any]
    case: Case


@dataclass(frozen=True, kw_only=True)
class VerdictCase:
    row: Mapping[str, Any]
    reading: Reading | None
    ways: tuple[Way, ...] = ()
    open: tuple[str, ...] = ()

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(way.case for way in self.ways)


def express(row: Mapping[str, Any]) -> VerdictCase:
    """Return the case with one specification per combination; none where the source leaves the
    layout open, or for verl, which the product predicts by itself.
    """
    if "verl" in str(row["framework"]).lower():
        return VerdictCase(row=row, reading=None)
    try:
        reading = _read(row)
        known_model_config(reading.model)
    except LookupError as missing:
        return VerdictCase(
            row=row,
            reading=None,
            open=(str(missing).strip("'\""),),
        )
    return VerdictCase(
        row=row,
        reading=reading,
        ways=tuple(_ways(row, reading)),
    )


def _read(row: Mapping[str, Any]) -> Reading:
    framework = str(row["framework"]).lower()
    if "openrlhf" in framework:
        return _openrlhf(row)
    return _trl(row)


def _trl(row: Mapping[str, Any]) -> Reading:
    """TRL's own recipes, and ms-swift's, which train through TRL's trainer."""
    config, model = row["config"], MODELS.get(row["model"], row["model"])
    stage = config.get("zero_stage") or {"zero2": 2, "zero3": 3}.get(
        str(config.get("deepspeed")), 0
    )
    colocated = config.get("use_vllm") and config.get("vllm_mode") == "colocate"
    ranks = int(config.get("num_processes") or row["gpus"])
    if (
        config.get("use_vllm")
        and not colocated
        and "num_processes" not in config
        and row["gpus"] > 1
    ):
        raise LookupError("how many GPUs train and how many write completions")
    offload = config.get("deepspeed_config") or {}
    # ms-swift's own `offload_model` and `offload_optimizer` act while vLLM generates, not in
    # DeepSpeed.
    options = {
        "offload_optimizer": (
            {"device": "cpu"} if offload.get("offload_optimizer_device") == "cpu" else {}
        ),
        "offload_param": {"device": "cpu"} if offload.get("offload_param_device") == "cpu" else {},
    }
    prompt, completion = (
        int(config.get("max_prompt_length") or config.get("max_length") or 512),
        int(config["max_completion_length"]),
    )
    micro = int(config["per_device_train_batch_size"])
    engine = None
    if colocated:
        engine = EngineSettings(
            utilization=0.3,
            max_model_length=prompt + completion,
            max_num_seqs=256,
        )
    return Reading(
        model=model,
        ranks=ranks,
        micro_batch=micro,
        prompt=prompt,
        completion=completion,
        sharded_by=f"zero{stage}" if stage else "none" if ranks == 1 else "ddp",
        options=options,
        engine=engine,
        generation="engine" if colocated else "server" if config.get("use_vllm") else "trainer",
        generation_batch=micro * ranks,
        trl=True,
    )


def _openrlhf(row: Mapping[str, Any]) -> Reading:
    """Return the roles: one per group of GPUs under Ray, all of them on each GPU otherwise."""
    config = row["config"]
    ranks = int(config.get("actor_gpus") or row["gpus"])
    colocated = "actor_gpus" not in config
    options = {"offload_optimizer": {"device": "cpu"}} if config.get("adam_offload") else {}
    return Reading(
        model=MODELS.get(row["model"], row["model"]),
        ranks=ranks,
        micro_batch=int(config["micro_train_batch_size"]),
        prompt=int(config["prompt_max_len"]),
        completion=int(config["generate_max_len"]),
        sharded_by=f"zero{config['zero_stage']}",
        options=options,
        generation="trainer" if colocated else "server",
        generation_batch=int(config["micro_rollout_batch_size"]) * ranks,
        beside=("reference", "critic", "reward") if colocated else (),
    )


def known_model_config(name: str) -> Mapping[str, Any]:
    model = catalog.model_of_id(name)
    if model is None:
        raise LookupError(f"the shape of {name}")
    return model.config


def _ways(row: Mapping[str, Any], reading: Reading) -> list[Way]:
    stated = row["config"]
    unknown = [fact for fact in row["not_stated"] if fact in ALTERNATIVES]
    if reading.sharded_by.startswith("zero"):
        unknown = [fact for fact in unknown if fact != "optim"]  # DeepSpeed brings its own
    if reading.trl and row["tuning"] == "full" and "beta" not in stated:
        unknown.append("beta")
    ways = []
    for values in itertools.product(*(ALTERNATIVES[fact] for fact in unknown)):
        chosen = dict(zip(unknown, values, strict=True))
        facts = {
            "gc": chosen.get("gc", stated.get("gradient_checkpointing", True)),
            "attn": (
                stated.get("attn_implementation")
                or ("flash_attention_2" if stated.get("flash_attn") else "sdpa")
            ),
            "optim": chosen.get("optim", stated.get("optim", "adamw_torch")),
            "beta": chosen.get("beta", stated.get("beta", 0.0)),
        }
        ways.append(
            Way(
                chosen=chosen, case=Case(row=row, specification=_specification(row, reading, facts))
            )
        )
    return ways


def _specification(
    row: Mapping[str, Any],
    reading: Reading,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    config = dict(known_model_config(reading.model))
    quantised = "qlora" in row["tuning"]
    dtype = "float16" if row["config"].get("dtype") == "float16" else "bfloat16"
    adapter = None
    if row["tuning"] != "full":
        targets = row["target_modules"]
        adapter = {
            "lora_r": row["lora_rank"] or 16,
            "lora_alpha": 32,
            "lora_target_modules": targets if isinstance(targets, str) else list(targets),
        }
    zero = reading.sharded_by.startswith("zero")
    stated, completions = row["config"], max(2, reading.micro_batch)
    special: dict[str, Any] = {
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "loss": "logprobs",
    }
    if (
        reading.trl
    ):  # one generation batch of one group: what is in it does not move the step's memory
        special = {
            "gradient_accumulation_steps": completions // reading.micro_batch,
            "num_generations": completions,
            "beta": facts["beta"],
            "use_liger_kernel": bool(stated.get("use_liger_kernel")),
            "max_completion_length": reading.completion,
        }
    return {
        "method": "grpo" if reading.trl else "generic",
        "model": {
            "name": reading.model,
            "folder": None,
            "config": config,
            "dtype": dtype,
            "attn_implementation": facts["attn"],
            "load_in_4bit": quantised,
            "bnb_4bit_use_double_quant": quantised,
            "bnb_4bit_compute_dtype": dtype,
        },
        "adapter": adapter,
        "settings": {
            "per_device_train_batch_size": reading.micro_batch,
            "gradient_checkpointing": bool(facts["gc"]),
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
            "optim": facts["optim"],
            **special,
        },
        "device": "cuda",
        "capability": _capability(row),
        "steps": 2,
        "micro_steps": 1,
        "lengths": {"prompt": reading.prompt, "completion": reading.completion, "padded": False},
        **(
            {"sharding": {"kind": reading.sharded_by, "ranks": reading.ranks}}
            if zero or reading.sharded_by == "ddp"
            else {}
        ),
    }


def _gpu(row: Mapping[str, Any]) -> catalog.Gpu:
    if row["gpu"] == "A40":  # the A6000's chip; its memory as nvidia-smi lists it
        return dataclasses.replace(
            next(gpu for gpu in catalog.gpus() if gpu.name == "A6000"), name="A40", memory_mib=46068
        )
    name = GPUS[row["gpu"]] if row["gpu"] or row["gpu_gb"] != 96 else "H20"
    gpus = []
    for gpu in catalog.gpus():
        if gpu.name.replace("-", "").startswith(name.replace("-", "")):
            gpus.append(gpu)
    sized = []
    for gpu in gpus:
        if not row["gpu_gb"] or abs(gpu.memory_mib / 1024 - row["gpu_gb"]) < 0.15 * row["gpu_gb"]:
            sized.append(gpu)
    return (sized or gpus)[0]


def _capability(row: Mapping[str, Any]) -> list[int]:
    stated = _gpu(row).compute_capability or "8.0"
    return [int(part) for part in stated.split(".")]


def decide(case: VerdictCase, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Fits in all ways, in none, or it depends."""
    row = case.row
    line: dict[str, Any] = {
        "id": row["id"],
        "url": row["url"],
        "framework": row["framework"],
        "outcome": row["outcome"],
    }
    if case.reading is None and not case.open:
        return {**line, **foresight_verl.decide(row, MODELS.get(row["model"], row["model"]))}
    if case.reading is None:
        return {**line, "verdict": None, "depends_on": list(case.open)}
    predictions = []
    for way in case.ways:
        answer = answers.get(way.case.key) or {"error": "not followed"}
        if "error" in answer:
            return {**line, "verdict": None, "depends_on": [answer["error"][:200]]}
        try:
            predictions.append(
                (way, _prediction(case, way, msgspec.convert(answer["trace"], Trace)))
            )
        except (ValueError, NotImplementedError, KeyError, StopIteration) as error:
            return {
                **line,
                "verdict": None,
                "depends_on": [f"{type(error).__name__}: {error}"[:200]],
            }
    return {**line, **_elsewhere_too(case, _verdict(predictions))}


def _elsewhere_too(case: VerdictCase, decided: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict after the other GPUs: a fit of the training GPUs counts if the row states
    the models on the GPUs of its engine.

    Added after a first run had predicted a fit for iss-openrlhf-006, which ran out of memory on a
    GPU that the report does not name.
    """
    reading = case.reading
    engine_is_told = "vllm_gpu_memory_utilization" in case.row["config"]
    if (
        decided["verdict"] is True
        and reading is not None
        and reading.generation == "server"
        and not engine_is_told
    ):
        return {
            **decided,
            "verdict": None,
            "depends_on": ["what the GPUs of the engine and of the other models hold"],
        }
    return decided


def _verdict(predictions: Sequence[tuple[Way, Prediction]]) -> dict[str, Any]:
    fits: set[bool | None] = set()
    chosen: set[str] = set()
    depends: set[str] = set()
    peaks = []
    for way, prediction in predictions:
        fits.add(prediction.fits)
        chosen.update(way.chosen)
        depends.update(prediction.depends_on)
        peaks.append(prediction.peak_memory_bytes)
    line = {
        "peak_memory_bytes": {
            "low": round(min(peak.low for peak in peaks)),
            "high": round(max(peak.high for peak in peaks)),
        }
    }
    if len(fits) == 1 and None not in fits:
        return {**line, "verdict": fits.pop(), "depends_on": []}
    if len(fits) > 1:
        depends |= chosen
    return {
        **line,
        "verdict": None,
        "depends_on": sorted(depends) or ["the limit lies inside the interval"],
    }


def _prediction(
    case: VerdictCase,
    way: Way,
    trace: Trace,
) -> Prediction:
    row, reading = case.row, case.reading
    assert reading is not None
    gpu = _gpu(row)
    spec = way.case.specification
    hidden = spec["model"]["config"].get("hidden_size")
    ranks = sharding.compared_ranks(
        trace,
        sharding.Sharding.of(
            {"kind": reading.sharded_by, "ranks": reading.ranks, "options": dict(reading.options)},
            hidden_size=hidden,
        ),
    )
    spread = max(
        ranks, key=lambda rank: (Track(rank.trace).replay().reserved_bytes, rank.trace.peak_bytes)
    )
    return predict(
        PredictionInput(
            candidate_id=row["id"],
            composition=_composition(row, reading, spec),
            gpu=gpu,
            hardware=Hardware(
                kind="cuda",
                name=gpu.name,
                count=reading.ranks,
                memory_bytes=gpu.memory_mib * MIB,
                here=False,
            ),
            limit_bytes=gpu.memory_mib * MIB,
            config=spec["model"]["config"],
            trace=spread.trace,
            settings=spec["settings"],
            host_bytes=spread.host_bytes,
        )
    )


def _composition(
    row: Mapping[str, Any],
    reading: Reading,
    spec: Mapping[str, Any],
) -> Composition:
    everywhere = tuple(range(reading.ranks))
    parameters: ShardedState = "parameters" if reading.sharded_by == "zero3" else "none"
    rank = None if row["tuning"] == "full" else row["lora_rank"]
    dtype = spec["model"]["dtype"]
    residents = [
        Resident(
            role="policy",
            model=reading.model,
            ranks=everywhere,
            dtype=dtype,
            trains=True,
            adapter_rank=rank,
            sharding=parameters,
        )
    ]
    for role in reading.beside:
        residents.append(
            Resident(
                role=role,
                model=reading.model,
                ranks=everywhere,
                dtype=dtype,
                trains=role == "critic",
                sharding=parameters,
            )
        )
    if reading.engine is not None:
        residents.append(
            Resident(
                role="engine",
                model=reading.model,
                ranks=everywhere,
                dtype=dtype,
                trains=False,
            )
        )
    return Composition(
        residents=tuple(residents),
        ranks=reading.ranks,
        micro_batch=reading.micro_batch,
        accumulation=1,
        generation_batch=reading.generation_batch,
        prompt_length=reading.prompt,
        completion_length=reading.completion,
        checkpointing=spec["settings"]["gradient_checkpointing"],
        optimizer=spec["settings"]["optim"],
        generation=reading.generation,
        engine=reading.engine,
        attention=spec["model"]["attn_implementation"],
        sharded_by=reading.sharded_by,
    )
