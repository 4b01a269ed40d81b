"""The closed table of failure texts. The first row that matches decides; the order is part of the table.

Memory failures pull in opposite directions (give the engine more, or less), so a row names the cause
and keeps the numbers that the message itself carries. Named groups of a pattern are those numbers:
`asked`, `free`, `total` with a unit beside them (`free_unit`), and `length` as a plain number.
A group without a unit takes `total`'s, or counts bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autotune.measurement import Phase

MEMORY_CAUSES = (
    "weights", "optimizer", "activations", "logits", "kv_cache", "engine_startup", "weight_sync", "zero_gather", "fragmentation",
    "host_ram", "gpu_other_process", "unknown_memory",
)  # fmt: skip
OTHER_CAUSES = (
    "illegal_config", "hang_or_nccl", "version", "data", "disk_or_permission", "network", "cuda_fault", "numeric", "none",
)  # fmt: skip
CAUSES = MEMORY_CAUSES + OTHER_CAUSES

Kind = Literal["memory", "host_memory", "illegal", "transient", "other"]
"""memory: out of it, in the phase at hand. host_memory: out of the machine's own. illegal: never to be tried again.
transient: says nothing about the candidate, to be repeated. other: a crash with a known cause."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One known text."""

    name: str
    """What its samples are called: texts that were produced, each with the word where."""

    pattern: str
    """A regular expression, searched for in the text."""

    kind: Kind
    cause: str | None = None
    """None: told by the frames and the phase it was raised in."""

    phase: Phase | None = None
    """Where this text can only come from; None: wherever it happened."""

    secondary: bool = False
    """True for what a process says when another one failed first."""

    def search(self, text: str) -> re.Match[str] | None:
        return re.search(self.pattern, text, re.IGNORECASE | re.DOTALL)


_NUMBER = r"(?P<{0}>\d+(?:\.\d+)?)\s*(?P<{0}_unit>[KMGT]?i?B|bytes)"
_ASKED, _FREE, _TOTAL = (_NUMBER.format(name) for name in ("asked", "free", "total"))

# torch lists who holds the GPU: itself by name, or in a container, where it does not know itself, as one more process.
# A neighbour counts from a GiB up: a display or an idle context explains no failure.
_ITSELF = r"Including non-PyTorch memory, this process has [\d.]+ \w+ memory in use\. "
_PROCESS = r"Process \d+ has [\d.]+ \w+ memory in use\. "
_LARGE_PROCESS = r"Process \d+ has [\d.]+ GiB memory in use\. "
_ANY = rf"(?:{_PROCESS}|{_ITSELF})*?"
_NEIGHBOURS = rf"{_ANY}(?:{_LARGE_PROCESS}{_ANY}{_ITSELF}|{_ITSELF}{_ANY}{_LARGE_PROCESS}|{_LARGE_PROCESS}{_ANY}{_LARGE_PROCESS})"

ROWS: tuple[Row, ...] = (
    # vLLM's start. Two that only look like running out of memory come first.
    Row(
        name="vllm_profiling_disturbed",
        pattern=r"Error in memory profiling\. Initial free memory",
        kind="transient",
        cause="gpu_other_process",
        phase="load",
    ),
    Row(
        name="expandable_segments",
        pattern=r"expandable.segments are not compatible|not supported with expandable.segments"
        r"|incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="vllm_reservation",
        pattern=r"(?:Free|Available) memory on (?:device|node)(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+)"
        r" (?P<total_unit>GiB)\) on startup is less than desired (?:GPU|CPU) memory utilization \([\d.]+, " + _ASKED,
        kind="memory",
        cause="engine_startup",
        phase="load",
    ),
    Row(
        name="vllm_kv_reservation",
        pattern=r"Available memory on node .{0,200}?on kv cache allocation is less than requested memory for kv"
        r" \((?:-[\d.]+|(?P<asked>[\d.]+))(?:/[\d.]+)? (?P<asked_unit>GiB)\)",
        kind="memory",
        cause="kv_cache",
        phase="load",
    ),
    Row(
        name="vllm_no_cache_blocks",
        pattern=r"No available memory for the cache blocks",
        kind="memory",
        cause="kv_cache",
        phase="load",
    ),
    Row(
        name="vllm_kv_too_small",
        pattern=r"at least one request with the models?'s max seq len \(\d+\),\s\(?(?P<asked>[\d.]+)"
        r" (?P<asked_unit>GiB) KV cache is needed, which"
        r" is larger than the available KV cache memory \((?P<free>[\d.]+) (?P<free_unit>GiB)\)"
        r"(?:.{0,120}?estimated maximum model length is (?P<length>\d+))?",
        kind="memory",
        cause="kv_cache",
        phase="load",
    ),
    Row(
        name="vllm_kv_too_small_old",
        pattern=r"model's max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in"
        r" KV cache \((?P<length>\d+)\)",
        kind="memory",
        cause="kv_cache",
        phase="load",
    ),
    Row(
        name="vllm_sampler_warmup",
        pattern=r"CUDA out of memory occurred when warming up (?:sampler|pooler).{0,40}?with \d+ dummy requests",
        kind="memory",
        cause="engine_startup",
        phase="load",
    ),
    Row(name="vllm_wake_up", pattern=r"CUDA Error: out of memory at \S*cumem_allocator\.cpp", kind="memory", cause="weight_sync"),
    # Ray names the machine's memory as torch names a GPU's.
    Row(
        name="ray_host_memory",
        pattern=r"RAY_memory_usage_threshold|node running low on memory|exceeded K8s pod memory limits"
        r"|Worker unexpectedly exits with a connection error code 2",
        kind="host_memory",
        cause="host_ram",
    ),
    # torch, on a GPU and on a CPU.
    Row(
        name="cuda_other_process",
        pattern=r"Tried to allocate "
        + _ASKED
        + r"\. GPU \d+ has a total capac\w+ of "
        + _TOTAL
        + r" of which "
        + _FREE
        + r" is free\. "
        + _NEIGHBOURS,
        kind="memory",
    ),
    Row(
        name="cuda_out_of_memory",
        pattern=r"CUDA out of memory\. Tried to allocate "
        + _ASKED
        + r"\. GPU \d+ has a total capac\w+ of "
        + _TOTAL
        + r" of which "
        + _FREE
        + r" is free",
        kind="memory",
    ),
    Row(
        name="cuda_out_of_memory_old",
        pattern=r"CUDA out of memory\. Tried to allocate "
        + _ASKED
        + r" \(GPU \d+; "
        + _TOTAL
        + r" total capacity; .{0,40}? already allocated; "
        + _FREE
        + r" free",
        kind="memory",
    ),
    Row(
        name="cuda_out_of_memory_plain",
        pattern=r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError",
        kind="memory",
    ),
    Row(
        name="cpu_out_of_memory",
        pattern=r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<asked>\d+) bytes",
        kind="memory",
    ),
    Row(
        name="cpu_out_of_memory_elsewhere",
        pattern=r"DefaultCPUAllocator: not enough memory: you tried to allocate (?P<asked>\d+) bytes",
        kind="memory",
    ),
    Row(
        name="limit_foreseen",
        pattern=r"\bLimitForeseen\b.{0,300}?over the limit of (?P<total>\d+) (?P<total_unit>bytes)",
        kind="memory",
    ),
    Row(name="numpy_memory_error", pattern=r"Unable to allocate " + _ASKED + r" for an array", kind="memory"),
    Row(
        name="cannot_allocate",
        pattern=r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory|unable to mmap \d+ bytes",
        kind="memory",
    ),
    # The machine's own memory, as launchers tell it.
    Row(
        name="host_killed",
        pattern=r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\) received by PID|exits with return code = -9|killed by signal: Killed"
        # A shell's word alone on its line, or with the line and the process; SLURM's own.
        r"|(?m:^(?-i:Killed)$)|: line \d+: +\d+ (?-i:Killed) |slurmstepd\S*: error: Detected \d+ oom.kill event",
        kind="host_memory",
        cause="host_ram",
    ),
    # What the framework refuses.
    Row(
        name="trl_divisible",
        pattern=r"must be (?:evenly )?divisible by|must divide world size|requires at least 2 generations"
        r"|can ?not be both configured|is not supported by GRPO",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="length_refused",
        pattern=r"max_token_len must be greater than the sequence length|This model's maximum context length is \d+ tokens"
        r"|greater than the derived max_model_len|is too long to fit into the model|longer than the maximum model length of",
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="setting_refused",
        pattern=r"validation errors? for \w+Config|unexpected keyword argument|Your setup doesn't support bf16"
        r"|requires n_samples_per_prompt > 1"
        r"|element 0 of tensors does not require grad|Head size \d+ is not supported|unsupported head.?size",
        kind="illegal",
        cause="illegal_config",
    ),
    # Known and not about memory.
    Row(
        name="numeric",
        pattern=r"probability tensor contains either `inf`, `nan` or element < 0|\bFloatingPointError\b",
        kind="other",
        cause="numeric",
    ),
    Row(
        name="disk",
        pattern=r"No space left on device|Read-only file system|Permission denied|Disk quota exceeded"
        r"|inline_container\.cc:\d+\] \. unexpected pos",
        kind="other",
        cause="disk_or_permission",
    ),
    Row(
        name="network",
        pattern=r"couldn't connect to|Max retries exceeded|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Temporary failure in name resolution|outgoing traffic has been disabled",
        kind="other",
        cause="network",
    ),
    Row(
        name="data",
        pattern=r"DatasetGenerationError|Couldn't find any data file|doesn't contain any data files|KeyError: 'prompt'"
        r"|Column .{1,60} not in the dataset",
        kind="other",
        cause="data",
    ),
    Row(
        name="version",
        pattern=r"\bModuleNotFoundError\b|\bImportError\b|undefined symbol|no kernel image is available",
        kind="other",
        cause="version",
    ),
    Row(
        name="cuda_fault",
        pattern=r"illegal memory access|device-side assert|unspecified launch failure|uncorrectable ECC"
        r"|CUDA error: (?!out of memory)",
        kind="other",
        cause="cuda_fault",
    ),
    # What the others say when one is gone: last, so that the root is found before them.
    Row(
        name="peer_gone",
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout"
        r"|remote process exited or there was a network error",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
    ),
    Row(
        name="collective_timeout",
        pattern=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:send|recv) operation|NCCL error",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
    ),
    Row(
        name="engine_wrapper",
        pattern=r"Engine core initialization failed|EngineCore failed to start|EngineDeadError|EngineCore encountered an issue",
        kind="other",
        secondary=True,
    ),
)
