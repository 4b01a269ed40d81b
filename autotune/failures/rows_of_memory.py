"""Texts of memory that ran out, and of what only looks like it. Part of the table of failures, read before the other part."""

from __future__ import annotations

from autotune.failures.table import Row

_NUMBER = r"(?P<{0}>\d+(?:\.\d+)?)\s*(?P<{0}_unit>[KMGT]?i?B|bytes)"
_ASKED, _FREE, _TOTAL = (_NUMBER.format(name) for name in ("asked", "free", "total"))

# torch lists who holds the GPU: itself by name, or in a container, where it does not know itself, as one more process.
# A neighbour counts from a GiB up: a display or an idle context explains no failure.
_ITSELF = r"Including non-PyTorch memory, this process has [\d.]+ \w+ memory in use\. "
_PROCESS = r"Process \d+ has [\d.]+ \w+ memory in use\. "
_LARGE_PROCESS = r"Process \d+ has [\d.]+ GiB memory in use\. "
_ANY = rf"(?:{_PROCESS}|{_ITSELF})*?"
_NEIGHBOURS = rf"{_ANY}(?:{_LARGE_PROCESS}{_ANY}{_ITSELF}|{_ITSELF}{_ANY}{_LARGE_PROCESS}|{_LARGE_PROCESS}{_ANY}{_LARGE_PROCESS})"
_OF_GPU = rf"Tried to allocate {_ASKED}\. GPU \d+ has a total capac\w+ of {_TOTAL} of which {_FREE} is free"

_NOT_OUT_OF_MEMORY = (
    Row(
        name="vllm_profiling_disturbed",
        pattern=r"Error in memory profiling\. Initial free memory",
        kind="transient",
        cause="gpu_other_process",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="expandable_segments",
        pattern=r"expandable.segments are not compatible|not supported with expandable.segments"
        r"|incompatible with PYTORCH_(?:CUDA_)?ALLOC_CONF=expandable_segments",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="kernel_resources",
        pattern=r"out of resources?: (?:shared memory|registers|threads)|too many resources requested for launch",
        kind="other",
        cause="cuda_fault",
        said="as an error",
    ),
)

_OF_VLLM = (
    Row(
        name="vllm_reservation",
        pattern=r"(?:Free|Available) memory on (?:device|node)(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+)"
        r" (?P<total_unit>GiB)\) on startup is less than desired (?:GPU|CPU) memory utilization \((?P<share>[\d.]+), " + _ASKED,
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
        pattern=r"No available memory for the cache blocks",
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
        name="vllm_wake_up",
        pattern=r"CUDA Error: out of memory at \S*cumem_allocator\.cpp",
        kind="memory",
        cause="weight_sync",
        said="anywhere",
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

# Ray names the machine's memory as torch names a GPU's.
_OF_RAY = (
    Row(
        name="ray_host_memory",
        pattern=r"RAY_memory_usage_threshold|node running low on memory|exceeded K8s pod memory limits"
        r"|exceeds the memory usage threshold of|Worker unexpectedly exits with a connection error code 2"
        r"|\bObjectStoreFullError\b",
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
)

_OF_TORCH = (
    Row(name="cuda_other_process", pattern=rf"{_OF_GPU}\. {_NEIGHBOURS}", kind="memory", said="anywhere"),
    Row(name="cuda_out_of_memory", pattern=rf"(?:CUDA|HIP|NPU|XPU) out of memory\. {_OF_GPU}", kind="memory", said="anywhere"),
    Row(
        name="cuda_out_of_memory_old",
        pattern=rf"(?:CUDA|HIP|NPU) out of memory\. Tried to allocate {_ASKED} \([GN]PU \d+; {_TOTAL} total capacity; "
        rf".{{0,40}}? already allocated; (?:.{{0,40}}? current active; )?{_FREE} free",
        kind="memory",
        said="anywhere",
    ),
    Row(
        name="cuda_out_of_memory_plain",
        pattern=r"(?:CUDA|HIP|NPU|XPU|MPS backend) out of memory|CUDA(?: driver)? error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|OutOfMemoryError|Triton Error \[CUDA\]: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|\bError out of memory at line \d+ in file",
        kind="memory",
        said="as an error",
    ),
    Row(name="nccl_out_of_memory", pattern=r"Cuda failure (?:\d+ )?'out of memory'", kind="memory", said="anywhere"),
    Row(
        name="weights_beyond_gpu",
        pattern=r"Some modules are dispatched on the CPU or the disk",
        kind="memory",
        cause="weights",
        phase="load",
    ),
    Row(
        name="cpu_out_of_memory",
        pattern=r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<asked>\d+) bytes",
        kind="memory",
        said="anywhere",
        on_host=True,
    ),
    Row(
        name="cpu_out_of_memory_elsewhere",
        pattern=r"DefaultCPUAllocator: not enough memory: you tried to allocate (?P<asked>\d+) bytes",
        kind="memory",
        said="anywhere",
        on_host=True,
    ),
    Row(
        name="limit_foreseen",
        pattern=r"\bLimitForeseen\b.{0,300}?over the limit of (?P<total>\d+) (?P<total_unit>bytes)",
        kind="memory",
        said="as an error",
    ),
)

_OF_THE_MACHINE = (
    Row(
        name="numpy_memory_error",
        pattern=r"Unable to allocate " + _ASKED + r" for an array",
        kind="memory",
        said="as an error",
        on_host=True,
    ),
    Row(
        name="shared_memory",
        pattern=r"insufficient shared memory \(shm\)|unable to (?:allocate shared memory|open shared memory|write to file <"
        r"/torch)|shared memory segment /dev/shm/\S+ .{0,80}No space left on device",
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
    Row(
        name="cannot_allocate",
        pattern=r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory|unable to mmap \d+ bytes|\bArrowMemoryError\b"
        r"|memory allocation of \d+ bytes failed",
        kind="memory",
        said="as an error",
        on_host=True,
    ),
    # As launchers, shells, SLURM, the kernel and Kubernetes tell it.
    Row(
        name="host_killed",
        pattern=r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\) received by PID|exits with return code = -9|killed by signal: Killed"
        r"|(?m:^(?-i:Killed)$)|: line \d+: +\d+ (?-i:Killed) |slurmstepd\S*: error: Detected \d+ oom.kill event"
        r"|(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process|(?-i:\bOOMKilled\b)"
        r"|died unexpectedly \(exit code: -9\)|died with <Signals\.SIGKILL: 9>",
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
)

ROWS_OF_MEMORY: tuple[Row, ...] = (*_NOT_OUT_OF_MEMORY, *_OF_VLLM, *_OF_RAY, *_OF_TORCH, *_OF_THE_MACHINE)
