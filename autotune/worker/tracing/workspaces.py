"""Memory that CUDA kernels allocate and free inside one operation, invisible to fake tensors.

Each function names its source. cuBLAS's workspaces are not included: they belong to the process,
not to an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import attention, capability

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

Workspace = Callable[[tuple[Any, ...], Mapping[str, Any], Any], "int | tuple[int, ...]"]
"""Bytes inside an operation's kernel, of one block or of several at the same time, from its
arguments and its result.
"""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _flash_backward(args: Any, kwargs: Any, out: Any) -> tuple[int, ...]:
    """`mha_bwd` in flash-attention's `flash_api.cpp`, as vendored by torch.

    A gradient in another layout is copied first. Then the row sums of dO x O and a float32
    accumulator for dq, with rows rounded up to 128 and the head to 32 (above 192: to 256). Under
    grouped queries also dk and dv per query head.
    """
    gradient, query, key = args[0], args[1], args[2]
    batch, heads, length, size = query.shape
    rows, columns = round_up(length, 128), round_up(size, 32) if size <= 192 else 256
    taken = [_copied(gradient), batch * heads * rows * 4, batch * heads * rows * columns * 4]
    if key.shape[1] != heads:
        taken += 2 * [batch * heads * key.shape[2] * size * query.element_size()]
    return tuple(size for size in taken if size)


def _flash_package_backward(args: Any, kwargs: Any, out: Any) -> int:
    """The same for the package's layouts: batch, row, head, size, or packed rows
    (`mha_varlen_bwd`).

    There the accumulators have 128 additional rows for each sequence.
    """
    gradient, query, key, starts = args[0], args[1], args[2], args[6]
    heads, size = query.shape[-2:]
    sequences = query.shape[0] if starts is None else starts.numel() - 1
    rows = (
        sequences * round_up(query.shape[1], 128)
        if starts is None
        else query.shape[0] + 128 * sequences
    )
    taken = heads * rows * ((round_up(size, 32) if size <= 192 else 256) + 1) * 4
    if key.shape[-2] != heads:
        taken += 2 * key.numel() // key.shape[-2] * heads * query.element_size()
    return int(taken + (0 if gradient.is_contiguous() else gradient.nbytes))


def _flash3_blocks(size: int) -> tuple[int, int]:
    """Return rows of a block of queries and of keys (`kBlockM` and `kBlockN` of a causal
    backward pass).
    """
    major, minor = capability()
    if major >= 9:
        return (128 if size <= 64 else 64), 128 if size <= 128 else 96 if size <= 192 else 80
    if (major, minor) in ((8, 6), (8, 9)):
        return (64 if size <= 192 else 32), 128 if size <= 96 else 96 if size <= 128 else 64
    return (128 if size <= 64 else 64), 128 if size <= 128 else 80 if size <= 192 else 64


def flash3_backward(args: Any, kwargs: Any, out: Any) -> tuple[int, ...]:
    """`mha_bwd` in `hopper/flash_api.cpp`: two numbers per row, a float32 accumulator of dq and,
    under grouped queries, of dk and dv. Rows are rounded up with a block for each sequence,
    heads to 64, 96, 128, 192 or 256.
    """
    _, query, key, _, _, sequences = args
    size = next(most for most in (64, 96, 128, 192, 256) if query.shape[-1] <= most)
    of_queries, of_keys = _flash3_blocks(size)
    rows = round_up(query.shape[0] + sequences * of_queries, of_queries)
    taken = [query.shape[1] * rows * 4] * 2 + [query.shape[1] * rows * size * 4]
    if key.shape[1] != query.shape[1]:
        taken += [
            key.shape[1] * round_up(key.shape[0] + sequences * of_keys, of_keys) * size * 4
        ] * 2
    return tuple(taken)


def _cudnn_backward(args: Any, kwargs: Any, out: Any) -> int:
    """`SDPABackwardNode` in cudnn-frontend: `dQ_accum` and `softmax_sum`, both float32."""
    batch, heads, length, size = args[1].shape
    return int(batch * heads * length * (size + 1) * 4)


def _copied(gradient: Any) -> int:
    """Bytes of a copy: kernels require the gradient contiguous as batch, row, head, size."""
    return 0 if gradient.transpose(1, 2).is_contiguous() else int(gradient.nbytes)


def _efficient_backward(args: Any, kwargs: Any, out: Any) -> int:
    """`_efficient_attention_backward` in `attention_backward.cu`, `workspace_size` in
    `mem_eff_attention/kernel_backward.h`.

    One float32 tile per block of queries for dq, tiles for dk and dv that do not fit into
    registers, and one number per row.
    """
    gradient, query, key, value = args[0], args[1], args[2], args[3]
    batch, heads, length, size = query.shape
    half = query.dtype in _HALF
    rows, columns, most = _efficient_tile(max(size, value.shape[3]), half)
    in_registers = half and most <= rows
    taken = math.ceil(length / rows) * math.ceil(size / columns) * (16 + rows * columns * 4)
    if half and not in_registers:
        splits = max(1, min(math.ceil(key.shape[2] / columns), 200 // (batch * heads)))
        taken += splits * columns * (round_up(size, rows) + round_up(value.shape[3], rows)) * 4
    per_row = batch * heads * length * 4
    if not (half and (in_registers or capability() != (7, 0))):
        per_row += gradient.numel() * 4 * (3 if half else 1)  # dO x O in full
    return int(batch * heads * round_up(taken, 16) + per_row + _copied(gradient))


def _efficient_tile(size: int, half: bool) -> tuple[int, int, int]:
    """Rows, columns and largest head of the first kernel in `cutlassB.h` that fits."""
    large_shared_memory = capability() in ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
    for most in (32, 64):
        if size <= most:
            return 64, 64, most
    if not half or capability()[0] < 8:
        return (128 if half else 64), 64, 128 if size <= 128 else 65536
    if size <= 96 and capability() in ((8, 6), (8, 9)):
        return 128, 64, 96
    if size <= 128:
        return (128, 128, 128) if large_shared_memory else (64, 64, 128)
    return (128 if large_shared_memory else 64), 64, 65536


def _embedding_backward(args: Any, kwargs: Any, out: Any) -> int:
    """`embedding_dense_backward_cuda` in `Embedding.cu`, `embedding_backward_cuda_kernel` in
    `EmbeddingBackwardKernel.cu`.

    Above 3,072 indices: sorted indices with their origins, then segments of at most 10 rows summed
    in float32.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    if count <= 3072:
        return 0
    width = indices.element_size()
    sorting = 4 * count * width  # sorted indices, origins, and as much again inside the sort
    segments = min(count, rows)
    partial = count // 10 + segments
    return int(sorting + 3 * segments * width + partial * (width + gradient.shape[-1] * 4))


def _index_put_backward(args: Any, kwargs: Any, out: Any) -> int:
    """`index_put_with_sort_kernel` in `Indexing.cu`: linear index, sorted with its origins."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return 0
    indices = [index for index in args[1] if index is not None]
    return int(4 * 8 * max((index.numel() for index in indices), default=0))


def _logsumexp(args: Any, kwargs: Any, out: Any) -> int:
    """`logsumexp_out_impl` in `ReduceOps.cpp`: the shifted exponentials in full, and the maxima."""
    return int(args[0].nbytes + out.nbytes)


def _softmax(args: Any, kwargs: Any, out: Any) -> int:
    """`host_softmax` in `SoftMax.cu`, `softmax_cpu_out` and `log_softmax_cpu_out` in `SoftMax.cpp`.

    A non-contiguous input (logits without the last position) is copied first.
    """
    return 0 if args[0].is_contiguous() else int(args[0].nbytes)


THREADS, WARP, WORDS = 512, 32, 4
"""Threads of a block for one output each, of a warp; outputs of one thread at most
(`Reduce.cuh`).
"""

LEAST_VALUES, MOST_VALUES = 16, 256
"""Values per thread below and above which `Reduce.cuh` divides the inputs over fewer or more
blocks.
"""

MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 40,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Compute capability -> multiprocessors of its largest common card."""

RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Compute capability -> threads that a multiprocessor holds; 2,048 for the others."""


def _reduction(args: Any, kwargs: Any, out: Any) -> int:
    """`setReduceConfig` and `global_memory_size` in `Reduce.cuh`, for sums over the leading
    dimensions: the gradients of biases and of norms' weights.

    The rows are divided over blocks, each of which leaves a float32 for every output it has a
    thread for: 4 x outputs x blocks x (threads along the outputs x outputs of a thread).
    """
    given, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    count = len(dims or ())
    leading = sorted(dim % given.dim() for dim in dims or ()) == list(range(count))
    if (
        not count
        or count == given.dim()
        or not leading
        or not given.is_contiguous()
        or not given.is_floating_point()
    ):
        return 0
    outputs = math.prod(given.shape[count:])
    inputs = given.numel() // outputs if outputs else 0
    words = math.gcd(outputs, WORDS)
    width, height = _block(outputs // words, inputs, THREADS // words)
    if not width or inputs < min(16 * height, MOST_VALUES):
        return 0
    values = math.ceil(inputs / height)
    grid = math.ceil(outputs // words / width)
    gpu = capability()
    processors = MULTIPROCESSORS.get(gpu, MULTIPROCESSORS[8, 0])
    resident = processors * (RESIDENT_THREADS.get(gpu, 2048) // (width * height))
    if values < MOST_VALUES or grid > resident:
        return 0
    blocks = max(
        min(math.ceil(resident / grid), math.ceil(values / LEAST_VALUES)),
        math.ceil(values / MOST_VALUES),
    )
    return 4 * outputs * blocks * width * words if blocks > 1 else 0


def _block(across: int, along: int, most: int) -> tuple[int, int]:
    """Return a block's threads across the outputs and along the inputs (`set_block_dimension`)."""
    columns, rows = (
        most if size >= most else 1 << size.bit_length() - 1 if size else 0
        for size in (across, along)
    )
    height = min(rows, most // min(columns, WARP)) if columns else 0
    return (min(columns, most // height), height) if height else (0, 0)


def _foreach_norm(args: Any, kwargs: Any, out: Any) -> int:
    """`foreach_tensor_norm_cuda` in `ForeachReduceOp.cu`: a float per 65,536 numbers, for each
    tensor as for the largest.
    """
    sizes = [tensor.numel() for tensor in args[0]]
    return 4 * len(sizes) * math.ceil(max(sizes, default=0) / 65536)


def _by_operation(named: dict[str, Workspace]) -> dict[Any, Workspace]:
    found: dict[Any, Workspace] = {}
    for name, workspace in named.items():
        base, overload = name.split(".")
        packet = getattr(aten, base, None)
        if packet is not None and hasattr(packet, overload):  # an older torch may not have it
            found[getattr(packet, overload)] = workspace
    return found


ON_ANY_DEVICE = _by_operation(
    {
        "logsumexp.default": _logsumexp,
        "_softmax.default": _softmax,
        "_log_softmax.default": _softmax,
    }
)
"""Workspaces on CPU and CUDA alike."""

ON_CUDA = ON_ANY_DEVICE | _by_operation(
    {
        "_scaled_dot_product_flash_attention_backward.default": _flash_backward,
        "_flash_attention_backward.default": _flash_package_backward,
        "_scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
        "_scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
        "embedding_dense_backward.default": _embedding_backward,
        "index_put.default": _index_put_backward,
        "index_put_.default": _index_put_backward,
        "_index_put_impl_.default": _index_put_backward,
        "_foreach_norm.Scalar": _foreach_norm,
        "sum.dim_IntList": _reduction,
        "mean.dim": _reduction,
    }
)
ON_CUDA[attention.FLASH3_BACKWARD] = flash3_backward
"""Workspaces on CUDA, sized for the GPU in `traced_gpu`."""


def workspaces_for(spec: Mapping[str, Any]) -> Mapping[Any, Workspace]:
    """Return the table for the specification's device."""
    return ON_CUDA if spec.get("device", "cuda") == "cuda" else ON_ANY_DEVICE
