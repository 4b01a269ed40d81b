"""Requests to the worker, as JSON: the parts of a probe's and a trace's, and the trace's; and
what a run keeps resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from autotune.core.composition import (
    CompletionSource,
    Composition,
    EngineSettings,
    Resident,
    ShardedState,
)
from autotune.core.dataset import FILE_LOADERS
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.core.units import GIB
from autotune.frameworks.base import SPREAD_BY, count_of, ddp_options, gptq_bits, share_of
from autotune.frameworks.stand_in_step import served
from autotune.frameworks.trl import settings as trl_settings
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.launch_files import launch_configuration

DATASET_KEYS = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_streaming",
    "datasets",
    "streaming",
    "test_split_size",
)

SIDE_EFFECTS = (
    "output_dir",
    "push_to_hub",
    "report_to",
    "run_name",
    "project",
    "trackio_",
    "hub_",
    "log",
    "save_",
    "eval",
    "do_",
    "resume_from_checkpoint",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "max_steps",
    "num_train_epochs",
    "disable_tqdm",
    "prediction_loss_only",
    "fp16_full_eval",
    "bf16_full_eval",
    "per_device_eval",
    "num_generations_eval",
    "num_completions_to_print",
)
"""Prefixes of settings that a probe sets itself: outputs, duration, evaluation."""

ENGINE_ONLY = frozenset(
    {
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
        "vllm_enable_sleep_mode",
        "vllm_mode",
    }
)
"""Settings without effect on the trainer's step. Candidates that differ only in them share a
trace.
"""

EVALUATION_SETTINGS = (
    "per_device_eval_batch_size",
    "num_generations_eval",
    "eval_accumulation_steps",
    "prediction_loss_only",
    "bf16_full_eval",
    "fp16_full_eval",
)

ONLINE = frozenset(
    {"grpo", "rloo", "online-dpo", "async-grpo"}
)  # methods that generate completions
# of each of the two buffers in which weights are sent to a server (vLLM's
# `DEFAULT_PACKED_BUFFER_SIZE_BYTES`)
SYNC_BUFFER_BYTES = GIB
NEW_BUFFERS = (
    "with TRL 1.11 and newer each weight sync to the server allocates buffers of its own: over the"
    " first 16, torch reserves up to 2 GiB more each time, on both sides, which it gives back when"
    " memory is short"
)

WITH_REFERENCE = frozenset(
    {"dpo", "kto", "online-dpo"}
)  # methods with a reference model for every beta


def dataset_of(task: Task) -> Mapping[str, object] | None:
    """Return the dataset settings in TRL's names; None: no dataset."""
    named = {
        name: task.workload.user_settings[name]
        for name in DATASET_KEYS
        if name in task.workload.user_settings
    }
    if task.workload.dataset is not None:
        named = {
            **{name: value for name, value in named.items() if name != "datasets"},
            "dataset_name": task.workload.dataset,
        }
        loader = FILE_LOADERS.get(Path(task.workload.dataset).suffix)
        if (
            loader is not None
        ):  # one file of rows: `load_dataset` takes a file's path for a name on the hub
            streaming = named.get("dataset_streaming") or named.get("streaming")
            return {
                "datasets": [
                    {
                        "path": loader,
                        "data_files": str(Path(task.workload.dataset).expanduser().resolve()),
                    }
                ],
                "dataset_train_split": "train",
                **({"streaming": True} if streaming else {}),
            }
    return named if named.get("dataset_name") or named.get("datasets") else None


def evaluation_request(task: Task) -> Mapping[str, object] | None:
    """Return the settings that determine an evaluation's memory; None: the run never evaluates."""
    user = {**task.workload.held, **task.workload.user_settings}
    if user.get("eval_strategy") in (None, "no", False):  # YAML reads an unquoted no as false
        return None
    return {
        "settings": {name: user[name] for name in EVALUATION_SETTINGS if user.get(name) is not None}
    }


def adapter_request(candidate: Candidate, task: Task) -> dict[str, object] | None:
    """Return the adapter; None under full tuning."""
    if not candidate.settings.get("use_peft"):
        return None
    user, settings = task.workload.user_settings, candidate.settings
    return {
        **{name: settings[name] for name in ("lora_r", "lora_alpha", "lora_dropout")},
        "lora_target_modules": user.get("lora_target_modules", settings.get("lora_target_modules")),
        **{
            name: user[name]
            for name in ("lora_target_parameters", "lora_modules_to_save")
            if name in user
        },
        **{
            name: settings[name]
            for name in ("use_rslora", "use_dora", "lora_task_type")
            if name in settings
        },
    }


def trainer_settings(settings: Mapping[str, object], method: str = "grpo") -> dict[str, object]:
    """Return the settings of the configuration class, without those with side effects."""
    known, left_out = fields(method), trl_settings.OWN_SETTINGS
    whole = {**settings, **trl_settings.nested(settings, settings)}
    own = {
        name: value
        for name, value in whole.items()
        if name in known and known[name].owner == "config"
    }
    return {
        name: value
        for name, value in own.items()
        if name not in left_out and not name.startswith(SIDE_EFFECTS)
    }


def model_request(candidate: Candidate, task: Task, **own: object) -> dict[str, object]:
    """Return the model and its loading; `own`: entries of one kind of request."""
    model, settings = task.workload.model, candidate.settings
    return {
        "name": model.name,
        "folder": None if model.folder is None else str(model.folder),
        "config": dict(model.config),
        **own,
        "dtype": settings["dtype"],
        "attn_implementation": settings.get("attn_implementation"),
        "load_in_4bit": bool(settings.get("load_in_4bit")),
        "load_in_8bit": bool(settings.get("load_in_8bit")),
    }


def trace_request(
    candidate: Candidate, task: Task, prompt: int, completion: int
) -> Mapping[str, object]:
    """Return the specification of a trace: two optimizer steps, every row at its longest."""
    workload, settings = task.workload, candidate.settings
    traced = trainer_settings({**workload.user_settings, **settings}, workload.method)
    return {
        "method": workload.method,
        "model": {
            **model_request(candidate, task),
            "gptq_bits": gptq_bits(workload.model.config),
            "layers": None,
        },
        "adapter": adapter_request(candidate, task),
        "settings": {name: value for name, value in traced.items() if name not in ENGINE_ONLY},
        "device": task.hardware.kind,
        "lengths": {"prompt": prompt, "completion": completion, "padded": False},
        **images_request(task),
        "sharding": sharding_request(candidate, task),
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": workload.trust_remote_code,
    }


def lengths_request(settings: Mapping[str, object], task: Task) -> dict[str, object]:
    """Return the longest lengths of a probe and, under `drawn`, those that occur, where they are
    known.

    On emulated GPUs the speed is predicted, at either lengths.
    """
    workload, prompt, longest = (
        task.workload,
        settings["max_prompt_length"],
        settings["max_completion_length"],
    )
    request: dict[str, object] = {"prompt": prompt, "completion": longest, "typical": None}
    typical = workload.typical_completion_length
    if typical is None or not isinstance(longest, int) or task.hardware.emulated:
        return request
    drawn = {
        "drawn": (workload.completion_lengths, longest),
        "drawn_prompts": (workload.prompt_lengths, prompt),
    }
    samples = {
        name: list(lengths.up_to(limit).sample)
        for name, (lengths, limit) in drawn.items()
        if lengths is not None and isinstance(limit, int)
    }
    return {**request, "typical": min(typical, longest), **samples}


def images_request(task: Task) -> dict[str, object]:
    """Return the images of each row, under their key; empty: texts only."""
    images = task.workload.images
    return {} if images is None else {"images": asdict(images)}


def sharding_request(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the sharding of the training state for a trace."""
    settings = candidate.settings
    ranks = trl_settings.ranks_of(settings, task.hardware.count)
    named = {
        "offload_optimizer": "offload_optimizer_device",
        "offload_param": "offload_param_device",
    }
    options: dict[str, object] = {
        name: {"device": "cpu"} for name, knob in named.items() if settings.get(knob) == "cpu"
    }
    kind = trl_settings.sharding_of(settings, ranks)
    if kind == "ddp":
        options |= ddp_options(
            {**task.workload.user_settings, **settings}, adapter=bool(settings.get("use_peft"))
        )
    if kind == "fsdp2" and settings.get("fsdp_offload_params"):
        options["offload_params"] = True
    precision = next((name for name in ("bf16", "fp16") if settings.get(name)), None)
    if kind == "fsdp1" and precision is not None:
        options["mixed_precision"] = precision  # accelerate widens what trains to float32
    if kind == "fsdp1" and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        options["begins_on_meta"] = (
            True  # transformers loads quantised weights on the first rank only
        )
    return {"kind": kind, "ranks": ranks, **({"options": options} if options else {})}


def launch_request(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the launch of the ranks, as in the files of the final run."""
    return {
        "sharding": trl_settings.sharding_of(
            candidate.settings, trl_settings.ranks_of(candidate.settings, task.hardware.count)
        ),
        "accelerate": launch_configuration(candidate, task),
        "environment": trl_settings.environment_of(candidate.settings),
    }


def engine_request(candidate: Candidate) -> dict[str, object] | None:
    """Return vLLM's colocated engine; None: there is none."""
    settings = candidate.settings
    if not settings["use_vllm"] or trl_settings.with_server(settings):
        return None
    names = (
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
        "vllm_enable_sleep_mode",
    )
    request: dict[str, object] = {name: settings[name] for name in names}
    if "vllm_model_impl" in settings:
        request["vllm_model_impl"] = settings["vllm_model_impl"]
    return {**request, "max_num_seqs": trl_settings.max_num_seqs(settings)}


def server_request(candidate: Candidate, task: Task) -> dict[str, object] | None:
    """Return vLLM's server on GPUs of its own; None: there is none."""
    settings = candidate.settings
    if not trl_settings.with_server(settings):
        return None
    return {
        "gpus": trl_settings.server_gpus(settings),
        "tensor_parallel_size": trl_settings.server_parallel(settings),
        "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_length": settings["vllm_max_model_length"],
        "model_impl": settings.get("vllm_model_impl"),
        "dtype": trl_settings.engine_dtype(task.workload.model.config),
    }


# Composition: resident models per rank, and the shape of the step.


def compose(candidate: Candidate, task: Task) -> Composition:
    settings, method = candidate.settings, task.workload.method
    ranks = trl_settings.ranks_of(settings, task.hardware.count)
    micro, steps = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "steps_per_generation"),
    )
    prompt, completion = (
        count_of(settings, "max_prompt_length"),
        count_of(settings, "max_completion_length"),
    )
    generation: CompletionSource = "none"
    if method in ONLINE:
        generation = (
            "server"
            if trl_settings.with_server(settings)
            else "engine"
            if settings.get("use_vllm")
            else "trainer"
        )
    if (per_row := trl_settings.COMPLETIONS_PER_ROW.get(method)) is not None:
        micro, steps = micro * per_row, 1  # each micro-step generates its own completions
    # Engines. On the training devices: CUDA graphs, and weights in the model's precision or in 4
    # bits. Training waits for the completions of a server.
    engine, split = None, None
    share = share_of(settings, "vllm_gpu_memory_utilization")
    window = count_of(settings, "vllm_max_model_length") or count_of(
        task.workload.model.config, "max_position_embeddings"
    )
    if generation == "engine":
        engine = EngineSettings(
            utilization=share,
            max_model_length=window,
            max_num_seqs=trl_settings.max_num_seqs(settings),
            tensor_parallel=count_of(settings, "vllm_tensor_parallel_size") or 1,
            sleep=bool(settings.get("vllm_enable_sleep_mode")),
            quantised_bits=4 if settings.get("load_in_4bit") else None,
        )
    elif generation == "server":
        split = served(
            task.hardware,
            gpus=trl_settings.server_gpus(settings),
            tensor_parallel=trl_settings.server_parallel(settings),
            window=window,
            dtype=trl_settings.engine_dtype(task.workload.model.config),
            utilization=share,
        )
    # Tokens in the loss per row: both answers of a DPO pair; of other rows all but the first token.
    loss_tokens = 2 * completion if method == "dpo" else prompt + completion - 1
    attention = settings.get("attn_implementation")
    return Composition(
        residents=tuple(residents(candidate, task, generation)),
        ranks=ranks,
        micro_batch=micro,
        accumulation=count_of(settings, "gradient_accumulation_steps") or 1,
        generation_batch=0 if generation == "none" else micro * ranks * steps,
        prompt_length=prompt,
        completion_length=completion,
        checkpointing=bool(settings.get("gradient_checkpointing")),
        optimizer=str(settings.get("optim")),
        generation=generation,
        gathers_per_token=generation == "trainer"
        and settings.get("ds3_gather_for_generation") is False,
        engine=engine,
        split=split,
        sync_gathers="packed" if generation == "server" else None,
        sync_buffer_bytes=SYNC_BUFFER_BYTES if generation == "server" else 0,
        notes=(NEW_BUFFERS,) if generation == "server" else (),
        attention=attention if isinstance(attention, str) else None,
        sharded_by=trl_settings.sharding_of(settings, ranks),
        loss_tokens=loss_tokens if generation == "none" else None,
    )


def residents(candidate: Candidate, task: Task, generation: CompletionSource) -> Iterator[Resident]:
    settings, model = candidate.settings, task.workload.model.name
    ranks = tuple(range(trl_settings.ranks_of(settings, task.hardware.count)))
    adapter = count_of(settings, "lora_r") if settings.get("use_peft") else None
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    dtype, sharding = str(settings.get("dtype")), trl_settings.sharding_of(settings, len(ranks))
    spread = SPREAD_BY.get(sharding, "none")
    yield Resident(
        role="policy",
        model=model,
        ranks=ranks,
        dtype=dtype,
        trains=True,
        adapter_rank=adapter,
        quantised_bits=bits,
        sharding=spread,
    )
    if settings.get("beta") or task.workload.method in WITH_REFERENCE:
        # With an adapter, the reference is the policy with the adapter off.
        yield Resident(
            role="reference",
            model=model,
            ranks=ranks,
            dtype=dtype,
            trains=False,
            quantised_bits=bits,
            sharding=spread,
            shares_weights_with="policy" if adapter is not None else None,
        )
    judge = task.workload.user_settings.get("reward_model_name_or_path")
    if isinstance(judge, str) and generation != "none":
        # Sharded by DeepSpeed like the policy; replicated otherwise.
        cut: ShardedState = "parameters" if sharding == "zero3" else "none"
        yield Resident(
            role="reward", model=judge, ranks=ranks, dtype=dtype, trains=False, sharding=cut
        )
    if generation == "engine":
        yield Resident(
            role="engine",
            model=model,
            ranks=ranks,
            dtype=trl_settings.engine_dtype(task.workload.model.config),
            trains=False,
            sharding="tensor" if settings.get("vllm_tensor_parallel_size", 1) != 1 else "none",
            awake=("rollout", "sync") if settings.get("vllm_enable_sleep_mode") else None,
        )
