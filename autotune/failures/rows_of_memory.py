"""Texts of memory that ran out, and of what only looks like it. Part of the table of failures, read before the other part."""

from __future__ import annotations

from autotune.failures.rows_of_engines import ASKED, NUMBER, ROWS_OF_ENGINES
from autotune.failures.table import Row, any_of

_FREE, _TOTAL = (NUMBER.format(name) for name in ("free", "total"))

# torch lists who holds the GPU: itself by name, or in a container, where it does not know itself, as one more process.
# A neighbour counts from a GiB up: a display or an idle context explains no failure.
_ITSELF = r"Including non-PyTorch memory, this process has [\d.]+ \w+ memory in use\. "
_PROCESS = r"Process \d+ has [\d.]+ \w+ memory in use\. "
_LARGE_PROCESS = r"Process \d+ has [\d.]+ GiB memory in use\. "
_ANY = rf"(?:{_PROCESS}|{_ITSELF})*?"
# And where torch itself holds less than a GiB, the large one of several is not the one that failed.
_LITTLE = r"Of the allocated memory [\d.]+ (?:MiB|KiB|bytes) is allocated by PyTorch, and [\d.]+ (?:MiB|KiB|bytes) is reserved"
_NEIGHBOURS = (
    rf"{_ANY}(?:{_LARGE_PROCESS}{_ANY}{_ITSELF}|{_ITSELF}{_ANY}{_LARGE_PROCESS}|{_LARGE_PROCESS}{_ANY}{_LARGE_PROCESS}"
    rf"|(?:{_LARGE_PROCESS}{_ANY}{_PROCESS}|{_PROCESS}{_ANY}{_LARGE_PROCESS}){_ANY}{_LITTLE})"
)
_OF_GPU = rf"Tried to allocate {ASKED}\. GPU \d+ has a total capac\w+ of {_TOTAL} of which {_FREE} is free"

_NOT_OUT_OF_MEMORY = (
    Row(
        name="vllm_profiling_disturbed",
        pattern=r"Error in memory profiling\. (?:Initial free memory|This happens when)"
        r"|could not finish memory profiling because another process",
        kind="transient",
        cause="gpu_other_process",
        phase="load",
        said="anywhere",
    ),
    Row(
        name="expandable_segments",
        pattern=r"expandable.segments are not compatible|not supported with expandable.segments|expandable_segments not supported"
        r"|incompatible with PYTORCH_(?:CUDA_)?ALLOC_CONF=expandable_segments",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="kernel_resources",
        pattern=any_of(
            r"out of resources?: (?:shared memory|registers|threads)",
            r"out of resources?: [\w ]{1,30}, required",
            r"too many resources requested for launch",
            r"uses too much shared data",
        ),
        kind="other",
        cause="cuda_fault",
        said="as an error",
    ),
)

# Ray names the machine's memory as torch names a GPU's.
_OF_RAY = (
    Row(
        name="ray_host_memory",
        pattern=any_of(
            r"RAY_memory_usage_threshold",
            r"node running low on memory",
            r"exceeded K8s pod memory limits",
            r"\bray\.exceptions\.OutOfMemoryError",
            r"killed due to (?:the )?(?:node )?memory pressure",
            r"exceeds the memory usage threshold of",
            r"\bObjectStoreFullError\b",
        ),
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
)

_OF_TORCH = (
    Row(name="cuda_other_process", pattern=rf"{_OF_GPU}\. {_NEIGHBOURS}", kind="memory", said="anywhere"),
    Row(name="cuda_out_of_memory", pattern=rf"\b(?-i:[A-Z]{{3,4}}) out of memory\. {_OF_GPU}", kind="memory", said="anywhere"),
    Row(
        name="cuda_out_of_memory_old",
        pattern=rf"\b(?-i:[A-Z]{{3,4}}) out of memory\. Tried to allocate {ASKED} \(\w{{3}} \d+; {_TOTAL} total capacity; "
        rf".{{0,40}}? already allocated; (?:.{{0,40}}? current active; )?{_FREE} free",
        kind="memory",
        said="anywhere",
    ),
    Row(
        # Pinned for copies to a GPU, and yet the machine's own: CUDA uses the same words for both.
        name="pinned_memory",
        pattern=r"(?:CUDA|HIP)\w*(?: driver)? error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
        places=r":_?pin_memory\b|\.pin_memory\(|pin_memory ?= ?True|\b(?:cudaHostRegister|cudaHostAlloc)\b"
        r"|unsloth_zoo/gradient_checkpointing\.py:\S* .*(?:resize_|CPU_BUFFERS|cpu)",
        innermost=2,
        kind="host_memory",
        cause="host_ram",
    ),
    Row(
        # A library's own workspace, made when it is first called: whoever calls first is not to blame for what is full.
        name="no_room_for_a_handle",
        pattern=r"\w_STATUS_\w*(?:ALLOC(?:ATION)?_FAILED|NOT_INITIALIZED) when calling `\w+Create\w*\(",
        kind="memory",
        cause="unknown_memory",
    ),
    Row(
        name="cuda_out_of_memory_plain",
        pattern=any_of(
            r"\b(?-i:CUDA|HIP|NPU|XPU|MUSA|MLU|GCU|HPU|MPS backend) out of memory",
            r"(?:CUDA|HIP)(?: driver| runtime)? error(?: \(.{1,200}?\))?:? ?(?:\(?2\)? ?:)? ?out of memory",
            r"\w_STATUS_\w*ALLOC(?:ATION)?_FAILED",
            r"OutOfMemoryError",
            r"Triton Error \[\w+\]: out of memory",
            r"\b(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY",
            r"\b(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)\b",
            r"\bCUDA failed with error out of memory",
            r"rocblas_status_memory_error",
            r"Allocation on device(?: \d+)? would exceed allowed memory",
        ),
        kind="memory",
        said="as an error",
    ),
    # bitsandbytes prints it and exits, without an exception; what it allocates itself is the state of paged optimizers.
    Row(
        name="cuda_out_of_memory_printed",
        pattern=r"\bError out of memory at line \d+ in file",
        kind="memory",
        cause="optimizer",
        phase="optimizer",
        said="anywhere",
    ),
    Row(
        name="nccl_out_of_memory",
        pattern=r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:\w+ )?(?:m|c)alloc",
        kind="memory",
        said="anywhere",
    ),
    Row(
        # Allocators of whatever kind say it in these words; what only supposes it says "may" or "might".
        name="out_of_memory_somewhere",
        pattern=r"\A(?!.{0,4000}\b(?:may|might|could|possibl[ey]|perhaps|likely|usually|often|reward)\b)(?:[\w.]+\.)?\w*Error\w*"
        r": .{0,1000}(?:\bout of memory\b|\bRESOURCE_EXHAUSTED\b.{0,80}\bmemory\b)",
        kind="memory",
    ),
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
        pattern=r"Unable to allocate " + ASKED + r" for an array",
        kind="memory",
        said="as an error",
        on_host=True,
    ),
    Row(
        # NCCL's own segments: they are small, and a container's /dev/shm is smaller; nothing of the training is in them.
        name="nccl_shared_memory",
        pattern=r"shared memory segment /dev/shm/nccl-|/dev/shm/nccl-\S+ .{0,80}No space left"
        r"|NCCL WARN .{0,60}posix_fallocate failed",
        kind="other",
        cause="hang_or_nccl",
        said="anywhere",
    ),
    Row(
        name="shared_memory",
        pattern=any_of(
            r"insufficient shared memory \(shm\)",
            r"unable to (?:allocate shared memory|open shared memory|write to file </torch)(?!.{0,200}Too many open files)",
            r"shared memory segment /dev/shm/\S+ .{0,80}No space left on device",
            r"Error while creating shared memory segment \S+ \(size \d+\)(?!.{0,60}(?:No such|Permission))",
            r"workers are out of shared memory",
            r"posix_fallocate failed\s*: No space left on device",
        ),
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
    Row(
        # Queues and arrays between processes live in /dev/shm: a full one reads as a full disk.
        name="shared_memory_between_processes",
        pattern=r"No space left on device",
        places=r"multiprocessing/(?:heap|shared_memory|synchronize|resource_sharer)\.py:|multiprocessing/reductions\.py:",
        kind="host_memory",
        cause="host_ram",
    ),
    Row(
        # Memory that is locked for the network card is bounded by a limit of its own: much may be free.
        name="locked_memory",
        pattern=r"\bibv_\w+ failed with error Cannot allocate memory|\bmlock\w*\b.{0,40}Cannot allocate memory|RLIMIT_MEMLOCK",
        kind="other",
        cause="hang_or_nccl",
        said="anywhere",
    ),
    Row(
        name="cannot_allocate",
        pattern=any_of(
            r"\bMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"unable to mmap \d+ bytes",
            r"\bArrowMemoryError\b",
            r"memory allocation of \d+ bytes failed",
            r"\[WinError 1455\]|paging file is too small|\[WinError 8\] ",
            r"Memory allocation still failed after \d+ retries",
            r"\bjava\.lang\.OutOfMemoryError",
        ),
        kind="memory",
        said="as an error",
        on_host=True,
    ),
    # As launchers, shells, SLURM, the kernel and Kubernetes tell it.
    Row(
        name="host_killed",
        pattern=any_of(
            r"(?:exit|return)[ _]?(?:code|status)(?: (?:of|was|is))?['\"]?\s*[:=]?\s*(?:-9|137)\b",
            r"\b(?:exited|ended|terminated) with (?:exit )?(?:code|status) (?:137|-9)\b",
            r"Signal 9 \(SIGKILL\) received by PID",
            r"killed by signal: Killed",
            r"on signal 9 \(Killed\)",
            r"(?:by|with) signal:? (?:SIGKILL|9)\b",
            r"(?m:^(?-i:Killed)\r?$)",
            r": line \d+: +\d+ (?-i:Killed)\b",
            r"died with <Signals\.SIGKILL: 9>",
            r"(?-i:\bOOM ?-?Killed\b)",
            r"Detected [1-9]\d* oom.kill event",
            r"srun: error: .{1,80}: Out Of Memory",
            r"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process",
            r"\binvoked oom-killer\b",
            r"\boom_reaper: reaped process",
            r"\boom-kill:constraint=",
            r"Exceeded (?:job|step) memory limit",
            r"exceeded memory limit \(",
            r"TERM_MEMLIMIT",
            r"job killed: (?:v?mem|pmem)",
            r"\bOUT_OF_ME(?:MORY|\+)",
            r"low on resource: memory",
            r"exceeds? (?:its |the )?(?:container|pod|cgroup) memory limit",
        ),
        kind="host_memory",
        cause="host_ram",
        said="anywhere",
    ),
)

ROWS_OF_MEMORY: tuple[Row, ...] = (*_NOT_OUT_OF_MEMORY, *ROWS_OF_ENGINES, *_OF_RAY, *_OF_TORCH, *_OF_THE_MACHINE)
