"""Knobs into settings: what TRL would use, every derived value filled in, under TRL's own names.

Some settings are not TRL's. `max_prompt_length`: TRL has no limit on prompts, so autotune keeps it by filtering the dataset.
The others are the launcher's (see trl_topology).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from autotune.candidate import Knobs, KnobValue
from autotune.trainers import trl_topology
from autotune.trainers.base import Job
from autotune.trainers.trl_fields import fields
from autotune.trainers.trl_topology import ranks_of

OWN_SETTINGS = frozenset({"max_prompt_length", *trl_topology.LAUNCH, *trl_topology.NESTED})
DEFAULT_PROMPT_LENGTH = 512

CORE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length",
    "num_iterations", "gradient_checkpointing", "optim", "beta", "loss_type", "use_vllm", "fp16",
)  # fmt: skip
"""GRPOConfig's settings that every candidate states, the default where nothing else was said."""

OFFLINE_CORE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim", "fp16", "max_length", "beta",
)  # fmt: skip
"""The same of the methods that train on given rows, as far as they have them."""

PAIRS_CORE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "optim",
    "fp16",
    "max_new_tokens",
)
"""The same of online DPO, which writes pairs of completions."""

EPISODES_CORE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs", "response_length",
    "local_rollout_forward_batch_size", "optim", "fp16",
)  # fmt: skip
"""The same of PPO, which counts episodes."""

A_PAIR = 2
"""Completions that online DPO writes to each prompt of a micro-batch."""

DEFAULT_ROW_LENGTH = 1024

SERVER_SHARE = 0.9
"""What `vllm serve` claims of GPUs that it has to itself, unless told otherwise."""

ENGINE = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
ADAPTER = ("lora_r", "lora_alpha", "lora_dropout")
GENERATION_SHAPE = ("steps_per_generation", "generation_batch_size")


@cache
def default(name: str, method: str = "grpo") -> KnobValue:
    """TRL's own default."""
    value = fields(method)[name].default
    assert value is None or isinstance(value, bool | int | float | str)
    return value


def settings_of(knobs: Knobs, job: Job, method: str = "grpo") -> dict[str, KnobValue]:
    """Everything TRL is told for these knobs. A knob at null follows from the rest."""
    workload = job.workload
    given = {**workload.held, **{name: value for name, value in knobs.items() if value is not None}}
    settings = {name: value for name, value in given.items() if name not in GENERATION_SHAPE}
    settings.update({name: default(name, method) for name in CORE if name not in given and name in fields(method)})
    settings.setdefault("max_prompt_length", DEFAULT_PROMPT_LENGTH)
    ranks = ranks_of(given, job.hardware.count)
    if "gradient_accumulation_steps" not in given:
        settings["gradient_accumulation_steps"] = _accumulation(settings["per_device_train_batch_size"], job, ranks)
    settings.update(_generation_shape(given, settings, ranks))
    settings.update(_precision(given, job.hardware.kind))
    settings.update(_adapter(given, workload.tuning))
    settings.update(_engine(given, settings))
    return {name: value for name, value in settings.items() if _matters(name, settings)}


def offline_settings(knobs: Knobs, job: Job, method: str) -> dict[str, KnobValue]:
    """The same for a method that trains on rows as they are. A row's longest is cut into a prompt's and a completion's part."""
    given = {**job.workload.held, **{name: value for name, value in knobs.items() if value is not None}}
    settings = {**given, **{name: default(name, method) for name in OFFLINE_CORE if name not in given and name in fields(method)}}
    if "gradient_accumulation_steps" not in given:
        settings["gradient_accumulation_steps"] = _accumulation(settings["per_device_train_batch_size"], job, job.hardware.count)
    settings.update(_precision(given, job.hardware.kind))
    settings.update(_adapter(given, job.workload.tuning))
    settings.update(_row(settings))
    if settings.get("padding_free") and not settings.get("packing"):
        settings["max_length"] = None  # the trainer cuts no rows that it does not pad: they must be within the length already
    settings["use_vllm"] = False
    return {name: value for name, value in settings.items() if _matters(name, settings)}


def pairs_settings(given: Knobs, job: Job, method: str) -> dict[str, KnobValue]:
    """The same for online DPO, whose micro-batches count prompts and whose rows are bounded by two settings of their own."""
    ranks = ranks_of(given, job.hardware.count)
    settings = {**{name: default(name, method) for name in PAIRS_CORE}, "max_prompt_length": DEFAULT_PROMPT_LENGTH, **given}
    if "gradient_accumulation_steps" not in given:
        per_pass = A_PAIR * _int(settings["per_device_train_batch_size"])
        settings["gradient_accumulation_steps"] = _accumulation(per_pass, job, ranks)
    completion = settings["max_completion_length"] = settings["max_new_tokens"]
    settings.setdefault("max_length", _int(settings["max_prompt_length"]) + _int(completion))
    settings.setdefault("use_vllm", False)
    settings["num_generations"] = A_PAIR
    settings.update(_precision(given, job.hardware.kind))
    settings.update(_adapter(given, job.workload.tuning))
    return {name: value for name, value in settings.items() if _matters(name, settings)}


def episodes_settings(given: Knobs, job: Job, method: str) -> dict[str, KnobValue]:
    """The same for PPO: an update's episodes are a rollout, gone through in mini-batches of micro-batches."""
    settings = {**{name: default(name, method) for name in EPISODES_CORE}, "max_prompt_length": DEFAULT_PROMPT_LENGTH, **given}
    if "gradient_accumulation_steps" not in given:
        ranks = ranks_of(given, job.hardware.count)
        settings["gradient_accumulation_steps"] = _accumulation(settings["per_device_train_batch_size"], job, ranks)
    settings |= {"max_completion_length": settings["response_length"], "use_vllm": False}
    settings.update(_precision(given, job.hardware.kind))
    settings.update(_adapter(given, job.workload.tuning))
    return {name: value for name, value in settings.items() if _matters(name, settings)}


def load_of(settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
    """The part that decides what must be loaded anew.

    The engine is sized by the generation batch, so that at a constant one micro-batch and
    accumulation move on the same engine.
    """
    model = job.workload.model
    load: dict[str, KnobValue] = {
        "model": model.name,
        "model_config": model.fingerprint,
        "weights": job.workload.weights,
        "device": job.hardware.kind,
        "ranks": ranks_of(settings, job.hardware.count),
        **trl_topology.load_part(settings),
    }
    names = ("dtype", "attn_implementation", "load_in_4bit", "load_in_8bit", "use_peft", *ADAPTER, "use_rslora", "use_dora")
    load.update({name: settings[name] for name in names if name in settings})
    if settings["use_vllm"]:
        load.update({name: settings[name] for name in (*ENGINE, "vllm_max_model_length", "vllm_model_impl") if name in settings})
        load["max_num_seqs"] = max_num_seqs(settings)
    return load


def max_num_seqs(settings: Mapping[str, KnobValue]) -> int:
    """How many sequences TRL builds its engine for."""
    return (
        _int(settings.get("per_device_train_batch_size"))
        * _int(settings.get("vllm_tensor_parallel_size", 1))
        * _int(settings.get("steps_per_generation"))
    )


def _row(settings: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Prompt and completion of the longest row: as given, and cut to what the trainer cuts rows to."""
    prompt, completion = _int(settings.get("max_prompt_length")), _int(settings.get("max_completion_length"))
    longest = _int(settings.get("max_length")) or (prompt + completion if prompt and completion else 0) or DEFAULT_ROW_LENGTH
    row = min(longest, prompt + completion) if prompt and completion else longest
    prompt = min(prompt or row - min(completion, row - 1) if completion else prompt or row // 2, row - 1)
    return {"max_prompt_length": prompt, "max_completion_length": row - prompt}


def _accumulation(micro_batch: KnobValue, job: Job, ranks: int) -> int:
    """What makes the held global batch; 1 where none is held or none does, and then legality says so."""
    per_step = _int(micro_batch) * ranks
    total = job.workload.global_batch
    return total // per_step if total and per_step and total % per_step == 0 else _int(default("gradient_accumulation_steps"))


def _generation_shape(given: Knobs, settings: Mapping[str, KnobValue], ranks: int) -> dict[str, KnobValue]:
    """`steps_per_generation`, however it was worded; both words at once, or a bad one, stay for legality to refuse."""
    steps, batch = given.get("steps_per_generation"), given.get("generation_batch_size")
    if batch is None:
        return {"steps_per_generation": settings["gradient_accumulation_steps"] if steps is None else steps}
    per_step = _int(settings["per_device_train_batch_size"]) * ranks
    if steps is not None or not per_step or not isinstance(batch, int) or batch % per_step:
        return (
            {"generation_batch_size": batch} if steps is None else {"generation_batch_size": batch, "steps_per_generation": steps}
        )
    return {"steps_per_generation": batch // per_step}


def _precision(given: Knobs, device: str) -> dict[str, KnobValue]:
    """Mixed precision as TRL has it on a GPU; a CPU computes in float32 unless asked otherwise."""
    on_cpu = device == "cpu"
    bf16 = given.get("bf16")
    return {
        "use_cpu": given.get("use_cpu", on_cpu),
        "bf16": bf16 if bf16 is not None else not on_cpu and not given.get("fp16", False),
        "dtype": given.get("dtype") or ("float32" if on_cpu else "bfloat16"),
    }


def _adapter(given: Knobs, tuning: str) -> dict[str, KnobValue]:
    use_peft = given.get("use_peft", tuning != "full")
    quantised: dict[str, KnobValue] = {"load_in_4bit": given.get("load_in_4bit", True)} if tuning == "qlora" else {}
    adapter = {name: given.get(name, default(name)) for name in ADAPTER} if use_peft else {}
    return {"use_peft": use_peft, **adapter, **quantised}


def _engine(given: Knobs, settings: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    if not settings["use_vllm"]:
        return {}
    window = given.get("vllm_max_model_length")
    if window is None:
        window = _int(settings["max_prompt_length"]) + _int(settings["max_completion_length"])
    served = {"server_gpus": given.get("server_gpus", 1)} if trl_topology.with_server({**given, "use_vllm": True}) else {}
    share = {"vllm_gpu_memory_utilization": SERVER_SHARE} if served else {}
    named = {name: given.get(name, share.get(name, default(name))) for name in ENGINE}
    return {**named, **served, "vllm_max_model_length": window}


def _matters(name: str, settings: Mapping[str, KnobValue]) -> bool:
    """Settings that nothing reads would tell equal candidates apart."""
    if (name.startswith("vllm_") and not settings["use_vllm"]) or not trl_topology.matters(name, settings):
        return False
    return not (name.startswith("lora_") and not settings["use_peft"])


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
