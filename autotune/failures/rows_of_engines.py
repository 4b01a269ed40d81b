"""Texts of engines that have no room: vLLM, SGLang, and who starts them. Part of the rows of memory."""

from __future__ import annotations

from autotune.failures.places import WAKES_CACHE
from autotune.failures.table import Row

NUMBER = r"(?P<{0}>\d+(?:\.\d*)?)\s*(?P<{0}_unit>[KMGT]?i?B|bytes)"
ASKED = NUMBER.format("asked")

_POOL = r"CUDA Error: out of memory at \S*cumem_allocator\.cpp"
"""vLLM's own allocator, which serves all that sleeps and wakes: what it was asked for stands where it was called."""

ROWS_OF_ENGINES: tuple[Row, ...] = (
    Row(
        name="vllm_reservation",
        pattern=r"(?:Free|Available) memory on (?:device|node)(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+)"
        r" (?P<total_unit>GiB)\) on startup is less than desired (?:GPU|CPU) memory utilization \((?P<share>[\d.]+), " + ASKED,
        kind="memory",
        cause="engine_startup",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_kv_reservation",
        pattern=r"Available memory on node .{0,200}?on kv cache allocation is less than requested memory for kv"
        r" \((?:-[\d.]+|(?P<asked>[\d.]+))(?:/[\d.]+)? (?P<asked_unit>GiB)\)",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_no_cache_blocks",
        # Models with a state per sequence have blocks of their own for it, and so many sequences at once.
        pattern=r"No available memory for the cache blocks"
        r"|max_num_seqs \((?P<sequences>\d+)\) exceeds available Mamba cache blocks",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_kv_too_small",
        pattern=r"at least one request with the models?'s max seq len \((?P<wanted>\d+)\),\s\(?(?P<asked>[\d.]+)"
        r" (?P<asked_unit>GiB) KV cache is needed, which"
        r" is larger than the available KV cache memory \((?P<free>[\d.]+) (?P<free_unit>GiB)\)"
        r"(?:.{0,120}?estimated maximum model length is (?P<length>\d+))?",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_kv_too_small_old",
        pattern=r"model's max seq len \((?P<wanted>\d+)\) is larger than the maximum number of tokens that can be stored in"
        r" KV cache \((?P<length>\d+)\)",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_sampler_warmup",
        pattern=r"CUDA out of memory occurred when warming up (?:sampler|pooler).{0,40}?with (?P<sequences>\d+) dummy requests",
        kind="memory",
        cause="engine_startup",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_weights",
        pattern=r"Failed to load model - not enough GPU memory",
        kind="memory",
        cause="weights",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="vllm_no_length_fits",
        pattern=r"Cannot auto-fit max_model_len: not enough GPU memory",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
    Row(
        # Its own words for whatever ran out while the engine started.
        name="unsloth_engine",
        pattern=r"Your GPU ran out of memory loading vLLM",
        kind="memory",
        cause="engine_startup",
        phase="load",
    ),
    Row(
        # The same allocator serves the engine's start: what it was asked for stands where it was called.
        name="vllm_pool_cache",
        pattern=_POOL,
        places=r"allocate_kv_cache|:initialize_(?:kv_)?cache|:initialize_from_config|/cache_engine\.py",
        innermost=24,
        kind="memory",
        cause="kv_cache",
        phase="load",
    ),
    Row(
        name="vllm_pool_weights",
        pattern=_POOL,
        places=r"model_loader/|:create_weights\b|/(?:vllm|sglang)/\S*:load_model\b",
        innermost=24,
        kind="memory",
        cause="weights",
        phase="load",
    ),
    Row(
        # Which part of the engine's memory is to come back stands where it was asked for.
        name="vllm_wake_up_cache",
        pattern=_POOL,
        places=WAKES_CACHE,
        innermost=16,
        kind="memory",
        cause="kv_cache",
    ),
    Row(
        name="vllm_wake_up",
        pattern=_POOL,
        kind="memory",
        cause="weight_sync",
        said="anywhere",
    ),
    Row(
        # Its pool of cache slots, while it runs: not the device.
        name="sglang_cache_full",
        pattern=r"(?:Decode|Prefill|alloc_\w+) out of memory\. Try to lower your batch size|KV cache pool is full",
        kind="memory",
        cause="kv_cache",
        phase="rollout",
    ),
    Row(
        # Every GPU of a group is expected to be as free as the others; newer versions only warn of it.
        name="sglang_unbalanced",
        pattern=r"memory capacity is unbalanced",
        kind="memory",
        cause="gpu_other_process",
        phase="load",
        said="as an error",
    ),
    Row(
        name="sglang_cache",
        pattern=r"Not enough memory[.;] Please try to (?:increase|decrease) --mem-fraction-static",
        kind="memory",
        cause="kv_cache",
        phase="load",
        said="anywhere",
    ),
)
