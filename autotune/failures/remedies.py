"""What helps, by cause: one table. Nothing here is computed, so nothing here says by how much.

Two remedies of the same failing setting can point in opposite directions: vLLM's own complaints about too
small a budget ask for more of the GPU, while a full GPU asks vLLM to take less. So a row of the table of
failures that knows better has its own remedies, before those of its cause.

Settings carry TRL's names, or those of the program that they belong to. What changes what is learned says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change."""

    change: Mapping[str, str]
    """Setting -> direction (`raise`, `lower`, `on`, `off`) or the value to give it."""

    why: str
    bounded_by: str | None = None
    """The number of the message that the setting must not exceed, where the message has it."""


def _do(setting: str, direction: str, why: str, *, bounded_by: str | None = None) -> Remedy:
    return Remedy(change={setting: direction}, why=why, bounded_by=bounded_by)


_MICRO_BATCH = _do(
    "per_device_train_batch_size",
    "lower",
    "fewer sequences are computed at once; raise gradient_accumulation_steps by the same factor and the update stays the same",
)
_CHECKPOINTING = _do(
    "gradient_checkpointing",
    "on",
    "activations inside the layers are computed again instead of kept; slower, and nothing learned changes",
)
_COMPLETION = _do("max_completion_length", "lower", "shorter sequences need less of everything; this changes what can be learned")
_ENGINE_LESS = _do(
    "vllm_gpu_memory_utilization", "lower", "with vLLM in the training process: its share is taken from the trainer's memory"
)
_ENGINE_MORE = _do(
    "vllm_gpu_memory_utilization", "raise", "the engine's budget holds weights and activations before the KV cache"
)
_ENGINE_SHORTER = _do(
    "vllm_max_model_length", "lower", "one whole sequence must fit into the KV cache", bounded_by="longest_length"
)
_SLEEP = _do("vllm_enable_sleep_mode", "on", "the engine's memory is given back while the trainer computes")
_LEFTOVERS = _do("other processes on the GPU", "end", "an earlier run that still holds memory is the usual one: see nvidia-smi")
_SEQUENCES = _do(
    "per_device_train_batch_size",
    "lower",
    "TRL takes the engine's max_num_seqs from it, times steps_per_generation and the tensor parallel size",
)
_EIGHT_BIT = _do("optim", "adamw_8bit", "a quarter of Adam's state in float32; this changes what is learned a little")
_LORA = _do("use_peft", "on", "an adapter's gradients and optimizer state are small; this changes what is learned")
_ALLOCATOR = _do(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "freed pieces can be joined; not together with vllm_enable_sleep_mode"
)

BY_CAUSE: Mapping[str, tuple[Remedy, ...]] = {
    "weights": (
        _do("model_init_kwargs.dtype", "bfloat16", "TRL loads float32 unless told otherwise: half of it does"),
        _do("load_in_4bit", "on", "with an adapter the frozen weights can be quantised; this changes what is learned a little"),
        _ENGINE_LESS,
    ),
    "optimizer": (_EIGHT_BIT, _LORA, _ENGINE_LESS),
    "activations": (_MICRO_BATCH, _CHECKPOINTING, _COMPLETION),
    "logits": (
        _MICRO_BATCH,
        _do("use_liger_kernel", "on", "the loss is computed in pieces, without the logits of every token at once"),
        _COMPLETION,
    ),
    "kv_cache": (
        _ENGINE_LESS,
        _do("num_generations", "lower", "fewer completions grow at once; this changes what is learned"),
        _COMPLETION,
    ),
    "engine_startup": (_ENGINE_LESS, _SEQUENCES, _LEFTOVERS),
    "weight_sync": (
        _do(
            "vllm_enable_lora",
            "on",
            "the adapter alone goes to the engine, not merged weights: ms-swift's name; verl does it once model.lora_rank is "
            "above 0, and TRL cannot",
        ),
        _ENGINE_LESS,
        _do("vllm_mode", "server", "on GPUs of its own the engine does not hold its weights beside the trainer's"),
    ),
    "zero_gather": (
        _do("ds3_gather_for_generation", "off", "weights are gathered layer by layer; slower, and not possible with vLLM"),
        _ENGINE_LESS,
    ),
    "fragmentation": (
        _ALLOCATOR,
        _do("torch_empty_cache_steps", "1", "what lies idle in torch's cache is given back after each step; slower"),
        _MICRO_BATCH,
    ),
    "host_ram": (
        _do("offload to the CPU (DeepSpeed, FSDP)", "off", "optimizer state and weights kept there are the largest part of it"),
        _do("dataloader_num_workers", "lower", "each worker holds its own copy of what it touches"),
        _do("the job's memory limit", "raise", "a container's or SLURM's limit ends a process long before the machine is full"),
    ),
    "gpu_other_process": (_LEFTOVERS, _ENGINE_LESS),
    "unknown_memory": (_MICRO_BATCH, _ENGINE_LESS, _COMPLETION),
    "illegal_config": (_do("the setting named in the line", "correct", "it fails every time, before any memory is needed"),),
    "hang_or_nccl": (
        _do("the other ranks' logs", "read", "one that waits only tells that another was gone, late or stuck"),
        _do("NCCL_DEBUG", "INFO", "NCCL then says which connection or call it was"),
    ),
    "version": (
        _do("the package or driver named in the line", "install", "missing, or built for another version of torch or CUDA"),
        _do("autotune diagnose --check", "run", "it looks for packages that are known not to go together"),
    ),
    "data": (_do("the data set", "correct", "its files or columns are not what the trainer asks for"),),
    "disk_or_permission": (
        _do("output_dir", "another disk", "there must be room for checkpoints, and the right to write them"),
        _do("save_total_limit", "lower", "old checkpoints are then deleted"),
    ),
    "network": (
        _do("HF_HOME", "a filled cache", "download model and data where there is a network, then start with HF_HUB_OFFLINE=1"),
        _do(
            "the service named in the line",
            "reach",
            "its address, the token for it and the proxy, as the failing process has them",
        ),
    ),
    "cuda_fault": (
        _do("CUDA_LAUNCH_BLOCKING", "1", "the traceback then shows the operation that failed: often an index beyond a table"),
        _do("attn_implementation", "sdpa", "tells whether a custom kernel is at fault"),
    ),
    "numeric": (
        _do("learning_rate", "lower", "weights that blew up give no probabilities; this changes what is learned"),
        _do("bf16", "on", "instead of fp16, whose range is small"),
    ),
    "none": (),
}

BY_ROW: Mapping[str, tuple[Remedy, ...]] = {
    # The engine's budget is too small: more for the engine.
    "vllm_no_cache_blocks": (_ENGINE_MORE, _SEQUENCES, _ENGINE_SHORTER),
    "vllm_kv_too_small": (_ENGINE_SHORTER, _ENGINE_MORE),
    "vllm_kv_too_small_old": (_ENGINE_SHORTER, _ENGINE_MORE),
    # It asks for more than is free: less for the engine.
    "vllm_reservation": (_ENGINE_LESS, _LEFTOVERS),
    "vllm_kv_reservation": (_ENGINE_LESS, _LEFTOVERS),
    "vllm_sampler_warmup": (_SEQUENCES, _ENGINE_LESS),
    "vllm_wake_up": (
        _ENGINE_LESS,
        _do("offload of the trainer", "on", "what the trainer keeps on the GPU is there when the engine wakes up"),
    ),
    "vllm_wake_up_cache": (
        _ENGINE_LESS,
        _do("offload of the trainer", "on", "what the trainer keeps on the GPU is there when the engine wakes up"),
    ),
    "no_room_for_a_handle": (_ENGINE_LESS, _LEFTOVERS, _MICRO_BATCH),
    "unreachable": (
        _do("the head's address and port", "reach", "it must run before the others start, and let them through"),
        _do("the other nodes' logs", "read", "whoever was to answer may have ended first"),
    ),
    "vllm_profiling_disturbed": (
        _do(
            "the same configuration", "start again", "memory changed hands while vLLM measured it; the settings are not at fault"
        ),
        _LEFTOVERS,
    ),
    "sglang_cache": (
        _do("mem_fraction_static", "raise", "the engine's share holds the weights before its cache"),
        _do("rollout.tensor_model_parallel_size", "raise", "each GPU then holds a smaller part of the engine's weights"),
    ),
    "shared_memory": (
        _do("--shm-size of the container", "raise", "/dev/shm carries batches between a loader's workers and NCCL's messages"),
        _do("dataloader_num_workers", "0", "without workers no batch has to travel"),
    ),
    "nccl_shared_memory": (
        _do("--shm-size of the container", "raise", "NCCL's messages between the GPUs of a machine go through /dev/shm"),
        _do("NCCL_SHM_DISABLE", "1", "over sockets nothing has to fit there; slower"),
    ),
    "weights_beyond_gpu": (
        _do("load_in_4bit", "on", "the weights do not fit onto the GPU as they are; this changes what is learned a little"),
        _LEFTOVERS,
        _ENGINE_LESS,
    ),
    "vllm_weights": (
        _do("vllm_tensor_parallel_size", "raise", "each GPU then holds a smaller part of the engine's weights"),
        _do("model_init_kwargs.dtype", "bfloat16", "half of what float32 takes; the trainer's own copy is on the same GPU"),
        _LEFTOVERS,
    ),
    "vllm_no_length_fits": (_ENGINE_MORE, _SEQUENCES),
    "pinned_memory": (
        _do("pin_memory of the offload or the loader", "off", "pinned pages can't be swapped; copies to the GPU get slower"),
        _do("offload to the CPU (DeepSpeed, FSDP)", "off", "what is kept there is the largest part of the machine's memory"),
        _do("the job's memory limit", "raise", "it counts pinned memory, whatever the GPUs have free"),
    ),
    "shared_memory_between_processes": (
        _do("--shm-size of the container", "raise", "arrays and queues between processes live in /dev/shm, which is full"),
        _do("dataloader_num_workers", "0", "without workers nothing has to travel"),
    ),
    "locked_memory": (
        _do("ulimit -l", "unlimited", "the network card locks its buffers; containers have 64 KiB unless told otherwise"),
        _do("NCCL_IB_DISABLE", "1", "over TCP nothing has to be locked; slower"),
    ),
    "limits": (
        _do(
            "ulimit -n and -u",
            "raise",
            "open files and processes are counted for a user or a container, whatever the disks have free",
        ),
        _do("dataloader_num_workers", "lower", "each worker holds files, threads and descriptors"),
    ),
    "kernel_resources": (
        _do(
            "attn_implementation",
            "sdpa",
            "a hand-written kernel asks for more on-chip memory than this GPU has; no setting of it",
        ),
        _do(
            "triton",
            "upgrade",
            "its kernels are tuned by GPU; on-chip memory is not the GPU's memory, smaller batches don't help",
        ),
    ),
    "rendezvous": (
        _do("main_process_port", "another one", "an earlier run may still hold it, or two runs share a machine"),
        _do("the other nodes' logs", "read", "each waits for all: one that never started, or can't be reached, is enough"),
    ),
    "unexpected_argument_within": (
        _do("the package whose code stands last", "a matching version", "one package calls another with what that does not know"),
    ),
    "xid": (
        _do("the GPU", "look at `nvidia-smi -q` and `dmesg`", "the driver reports a fault of the device, which no setting mends"),
    ),
    "expandable_segments": (
        _do("PYTORCH_CUDA_ALLOC_CONF", "without expandable_segments", "sleep mode's memory pool cannot use them"),
        _do("vllm_enable_sleep_mode", "off", "the other one of the two to drop"),
    ),
    "length_refused": (
        _do("vllm_max_model_length", "raise", "prompt and completion must fit into it, and it into what the model allows"),
        _do("max_completion_length", "lower", "the other way round; this changes what can be learned"),
    ),
    "no_gradient": (
        _do(
            "gradient_checkpointing_kwargs",
            '{"use_reentrant": false}',
            "reentrant checkpointing needs an input with a gradient, and under an adapter the embedding is frozen",
        ),
        _do(
            "model.enable_input_require_grads()",
            "call it before the adapter is put on",
            "with prepare_model_for_kbit_training first where weights are quantised; no batch size helps",
        ),
    ),
    "trl_divisible": (
        _do("per_device_train_batch_size", "a matching value", "times processes and steps_per_generation: the generation batch"),
        _do("num_generations", "a matching value", "it must divide the generation batch; this changes what is learned"),
    ),
}


_DIRECTIONS = ("raise", "lower", "on", "off")


def pushes(cause: str, row: str | None = None) -> Mapping[str, str]:
    """Which way each setting must move after this failure, where it is a setting that has a direction; the first word counts."""
    found: dict[str, str] = {}
    for remedy in remedies_for(cause, row):
        for setting, direction in remedy.change.items():
            if direction in _DIRECTIONS:
                found.setdefault(setting, direction)
    return found


def remedies_for(cause: str, row: str | None = None) -> tuple[Remedy, ...]:
    """The row's own, or those of its cause."""
    return BY_ROW.get(row or "") or BY_CAUSE[cause]
