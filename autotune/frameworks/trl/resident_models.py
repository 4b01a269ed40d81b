"""Composition of a TRL run: resident models per rank, and the shape of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.composition import Composition, EngineSettings, Generation, Resident, Sharding, SplitEngines
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.core.units import GIB
from autotune.frameworks.base import Settings, count_of, share_of
from autotune.frameworks.served_engines import served
from autotune.frameworks.stand_in_step import MASTER_AND_MOMENTS, SPREAD_BY, OtherModel, StandInSpec
from autotune.frameworks.trl.requests import adapter_request, sharding_request
from autotune.frameworks.trl.settings import COMPLETIONS_PER_ROW, engine_dtype, max_num_seqs
from autotune.frameworks.trl.topology import DEEPSPEED, ranks_of, server_gpus, server_parallel, sharding_of, with_server

ONLINE = frozenset({"grpo", "rloo", "online-dpo"})  # methods that generate completions
BUFFER_BYTES = GIB  # of each of the two buffers in which weights are sent to a server (vLLM's `DEFAULT_PACKED_BUFFER_SIZE_BYTES`)
NEW_BUFFERS = (
    "with TRL 1.11 and newer each weight sync to the server allocates buffers of its own: over the first 16, torch reserves "
    "up to 2 GiB more each time, on both sides, which it gives back when memory is short"
)

WITH_REFERENCE = frozenset({"dpo", "kto", "online-dpo"})  # methods with a reference model for every beta


def compose(candidate: Candidate, task: Task) -> Composition:
    settings, ranks, method = candidate.settings, ranks_of(candidate.settings, task.hardware.count), task.workload.method
    micro, steps = count_of(settings, "per_device_train_batch_size"), count_of(settings, "steps_per_generation")
    prompt, completion = count_of(settings, "max_prompt_length"), count_of(settings, "max_completion_length")
    generation: Generation = "none"
    if method in ONLINE:
        generation = "server" if with_server(settings) else "engine" if settings.get("use_vllm") else "trainer"
    if (per_row := COMPLETIONS_PER_ROW.get(method)) is not None:
        micro, steps = micro * per_row, 1  # each micro-step generates its own completions
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
        gathers_per_token=generation == "trainer" and settings.get("ds3_gather_for_generation") is False,
        engine=_engine(settings, task) if generation == "engine" else None,
        split=_served(settings, task) if generation == "server" else None,
        sync_gathers="packed" if generation == "server" else None,
        sync_buffer_bytes=BUFFER_BYTES if generation == "server" else 0,
        notes=(NEW_BUFFERS,) if generation == "server" else (),
        attention=attention if isinstance(attention, str) else None,
        sharded_by=sharding_of(settings, ranks),
        loss_tokens=loss_tokens if generation == "none" else None,
    )


def residents(candidate: Candidate, task: Task, generation: Generation) -> Iterator[Resident]:
    settings, model = candidate.settings, task.workload.model.name
    ranks = tuple(range(ranks_of(settings, task.hardware.count)))
    adapter = count_of(settings, "lora_r") if settings.get("use_peft") else None
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    dtype, sharding = str(settings.get("dtype")), sharding_of(settings, len(ranks))
    spread = SPREAD_BY.get(sharding, "none")
    yield Resident(
        role="policy", model=model, ranks=ranks, dtype=dtype, trains=True, adapter_rank=adapter, quantised_bits=bits,
        sharding=spread,
    )  # fmt: skip
    if settings.get("beta") or task.workload.method in WITH_REFERENCE:
        # With an adapter, the reference is the policy with the adapter off.
        yield Resident(
            role="reference", model=model, ranks=ranks, dtype=dtype, trains=False, quantised_bits=bits, sharding=spread,
            shares_weights_with="policy" if adapter is not None else None,
        )  # fmt: skip
    judge = task.workload.user_settings.get("reward_model_name_or_path")
    if isinstance(judge, str) and generation != "none":
        # Sharded by DeepSpeed like the policy; replicated otherwise.
        cut: Sharding = "parameters" if sharding == "zero3" else "none"
        yield Resident(role="reward", model=judge, ranks=ranks, dtype=dtype, trains=False, sharding=cut)
    if generation == "engine":
        yield Resident(
            role="engine", model=model, ranks=ranks, dtype=engine_dtype(task.workload.model.config), trains=False,
            sharding="tensor" if settings.get("vllm_tensor_parallel_size", 1) != 1 else "none",
            awake=("rollout", "sync") if settings.get("vllm_enable_sleep_mode") else None,
        )  # fmt: skip


def _served(settings: Settings, task: Task) -> SplitEngines:
    """Return TRL's server: training waits for its completions."""
    return served(
        task.hardware,
        gpus=server_gpus(settings),
        tensor_parallel=server_parallel(settings),
        window=_window(settings, task),
        dtype=engine_dtype(task.workload.model.config),
        utilization=share_of(settings, "vllm_gpu_memory_utilization"),
    )


def _window(settings: Settings, task: Task) -> int:
    return count_of(settings, "vllm_max_model_length") or count_of(task.workload.model.config, "max_position_embeddings")


def _engine(settings: Settings, task: Task) -> EngineSettings:
    """Return TRL's engine: CUDA graphs, and weights in the model's precision or in 4 bits."""
    return EngineSettings(
        utilization=share_of(settings, "vllm_gpu_memory_utilization"),
        max_model_length=_window(settings, task),
        max_num_seqs=max_num_seqs(settings),
        tensor_parallel=count_of(settings, "vllm_tensor_parallel_size") or 1,
        sleep=bool(settings.get("vllm_enable_sleep_mode")),
        quantised_bits=4 if settings.get("load_in_4bit") else None,
    )


WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = {"sgd": 0, "adafactor": 0}  # optimizer -> states of a weight's own size; the default is Adam's two moments


def ppo_step(candidate: Candidate, task: Task) -> StandInSpec:
    """Return the stand-in step of TRL's PPO, which newer releases cannot trace.

    Written for `trl.experimental.ppo` of TRL 1.8 (`PPOTrainer`, `PolicyAndValueWrapper`). Assumptions:

    - Policy and critic are one module: both run forward, and one backward pass covers both. The critic
      is trained in full, also with an adapter, and needs no more memory than a policy of its size.
    - `train` is a loop of its own without checkpointing and gradient clipping.
    - It generates and scores `local_rollout_forward_batch_size` completions at a time. The float32
      logits of all of them stay until the next rollout. torch's cache is emptied in between.
    - Reference and reward model are replicated on every GPU, and sharded with ZeRO-3.
    """
    settings, ranks = candidate.settings, ranks_of(candidate.settings, task.hardware.count)
    prompt, completion = count_of(settings, "max_prompt_length"), count_of(settings, "response_length")
    rows, steps = count_of(settings, "per_device_train_batch_size"), count_of(settings, "gradient_accumulation_steps")
    at_a_time = min(count_of(settings, "local_rollout_forward_batch_size"), rows * steps)
    sharding, dtype, attention = sharding_request(candidate, task), str(settings["dtype"]), settings.get("attn_implementation")
    options = sharding.get("options")
    return StandInSpec(
        prompt_length=prompt,
        completion_length=completion,
        tokens=rows * (prompt + completion),
        score_tokens=at_a_time * (prompt + completion),
        micro_batch=rows,
        accumulation=steps,
        generation_batch=rows * steps * ranks,
        ranks=ranks,
        sharded_by=str(sharding["kind"]),
        options=options if isinstance(options, Mapping) else {},
        traced_dtype=dtype,
        held_dtype=dtype,
        mixed=bool(settings.get("bf16")),
        adapter=adapter_request(candidate, task),
        widens_adapter=True,
        quantised=bool(settings.get("load_in_4bit")),
        checkpointing=False,
        optimizer=str(settings["optim"]),
        clip=0.0,
        attention=attention if isinstance(attention, str) else None,
        others=tuple(_others(settings, task, dtype, str(sharding["kind"]))),
        generation="trainer",
        generation_micro_batch=at_a_time,
        retained_logits=rows * steps,
        empties_rollout_cache=True,
        notes=tuple(_notes(settings, task)),
    )


def _others(settings: Settings, task: Task, dtype: str, sharding: str) -> Iterator[OtherModel]:
    """Yield the other models. With an adapter, the reference is the policy itself."""
    judge, whole = _reward_model(task), sharding != "zero3"
    if not settings.get("use_peft"):
        yield OtherModel(role="reference", model=task.workload.model.name, dtype=dtype, whole=whole)
    optimizer = str(settings["optim"])
    state = STATES.get(optimizer, 2) * (1 if "8bit" in optimizer else WEIGHT_BYTES.get(dtype, 2))
    if settings.get("offload_optimizer_device") == "cpu":
        state = 0
    elif sharding in DEEPSPEED:
        state = MASTER_AND_MOMENTS
    yield OtherModel(
        role="critic", model=judge, dtype=dtype, trains=True, trains_concurrently=True, quantised=False,
        state_bytes_per_weight=state,
    )  # fmt: skip
    yield OtherModel(role="reward", model=judge, dtype=dtype, whole=whole, quantised=False)


def _reward_model(task: Task) -> str:
    """Return the reward model, which initialises the critic; the default is the policy's shape."""
    named = task.workload.user_settings.get("reward_model_path") or task.workload.held.get("reward_model_path")
    return str(named or task.workload.model.name)


def _notes(settings: Settings, task: Task) -> Iterator[str]:
    yield "modelled on TRL 1.8; releases from 1.13 lack PPO, so that they cannot measure it"
    yield "policy and critic train in one pass; the float32 logits of all completions stay until the next rollout"
    if settings.get("gradient_checkpointing"):
        yield "gradient_checkpointing has no effect: TRL's PPO never enables it"
    if _reward_model(task) == task.workload.model.name:
        yield "assumed: reward model and critic have the policy's shape, since no reward_model_path is given"
