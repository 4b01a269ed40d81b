"""Autocast on fake CPU tensors with CUDA's lists: which operations run in half precision, which in
float32.

torch has one list per device. On a GPU softmax, exp or sum widen to float32; on a CPU they do not.
The width decides what is saved for backward, so CUDA's lists are used. They are in
`ATen/autocast_mode.h` (and in torch's documentation of `torch.amp`, "CUDA Op-Specific Behavior").

Operations that both devices run in half precision keep torch's kernel; the others get a Python
kernel with the same policy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .operands import tensors_in, with_tensors
from .patching import attribute, torch_kernels

KEY = "AutocastCPU"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """)

FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
    """)

FP32_UNLESS_DTYPE_GIVEN = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm"
    " linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"
)

FP32_BY_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

WIDEST = _names(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)

_HALF = (torch.float16, torch.bfloat16)

_casts: dict[int, tuple[Any, Any]] = {}
"""Half-precision copies of weights until autocast ends: id -> reference to the weight, its copy."""

Policy = Callable[..., Any]
"""Runs an operation, its first argument, on cast operands."""


@contextmanager
def follow_cuda() -> Iterator[None]:
    """Make autocast on CPU tensors, entered as "cpu" or "cuda", use CUDA's lists."""
    dtype = torch.get_autocast_dtype("cpu")
    try:
        with torch_kernels(_install):
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
            with _cuda_autocast_redirected():
                yield
    finally:
        torch.set_autocast_dtype("cpu", dtype)
        _casts.clear()


def _install(library: Any) -> None:
    """Register a kernel for each operation of CUDA's lists, and none for others of the CPU's."""
    operations = _operations_of_cpu_list()
    for name, policy in _policies(operations).items():
        operation = _operation(name)
        if operation is None:
            continue  # not in this release of torch
        kernel = policy
        if policy is not torch.library.fallthrough_kernel:
            kernel = functools.partial(policy, operation)
        library.impl(name, kernel, KEY)


def _policies(on_cpu: frozenset[str]) -> dict[str, Policy]:
    """Return the policy of each operation, given those of the CPU's list.

    Operations that both devices run in lower precision are left out: they keep torch's kernel, with
    its own cache of cast weights.
    """
    lower_precision = frozenset(LOWER_PRECISION)
    to_lower_precision = functools.partial(_cast_all, _lower_precision)
    to_float32 = functools.partial(_cast_all, _float32)
    to_widest = functools.partial(_cast_all, _widest)

    policies: dict[str, Policy] = {}
    on_cpu_only = on_cpu - lower_precision
    policies.update(dict.fromkeys(on_cpu_only, torch.library.fallthrough_kernel))
    policies.update(dict.fromkeys(lower_precision - on_cpu, to_lower_precision))
    policies.update(dict.fromkeys(FP32, to_float32))
    policies.update(dict.fromkeys(FP32_UNLESS_DTYPE_GIVEN, _fp32_unless_dtype_given))
    policies.update(dict.fromkeys(FP32_BY_OVERLOAD, _fp32_by_overload))
    policies.update(dict.fromkeys(WIDEST, to_widest))
    policies["binary_cross_entropy"] = _unsafe
    return policies


@functools.lru_cache(maxsize=1)
def _operations_of_cpu_list() -> frozenset[str]:
    """Return the operations of this torch's CPU list."""
    operations = set()
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY):
            operations.add(name.removeprefix("aten::"))
    return frozenset(operations)


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return None
    return getattr(packet, overload or "default", None)


# Policies of `ATen/autocast_mode.h`.


def _cast_all(
    dtype_of: Callable[[Any], torch.dtype], operation: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cast all operands to the type that `dtype_of` chooses from them."""
    dtype = dtype_of((args, kwargs))
    cast_args, cast_kwargs = with_tensors(lambda tensor: _cast(tensor, dtype), (args, kwargs))
    return _run(operation, cast_args, cast_kwargs)


def _lower_precision(operands: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _float32(operands: Any) -> torch.dtype:
    return torch.float32


def _widest(operands: Any) -> torch.dtype:
    """Return float32 if any operand has it, else the lower precision."""
    for tensor in tensors_in(operands):
        if tensor.dtype is torch.float32:
            return torch.float32
    return torch.get_autocast_dtype("cpu")


def _fp32_unless_dtype_given(operation: Any, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    position = names.index("dtype")
    dtype = args[position] if len(args) > position else kwargs.get("dtype")
    if dtype is None and _is_castable(args[0]):
        args = args[:position]
        kwargs = {**kwargs, "dtype": torch.float32}
    return _run(operation, args, kwargs)


def _fp32_by_overload(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run another overload of the operation, which takes a type for its result."""
    schema = operation._schema
    name = f"{schema.name.removeprefix('aten::')}.{operation._overloadname}"
    defaults = [argument.default_value for argument in schema.arguments]
    missing = defaults[len(args) :]
    all_args = (*args, *missing)
    dtype = torch.float32 if _is_castable(args[0]) else args[0].dtype
    operation = _operation(FP32_BY_OVERLOAD[name])
    return _run(operation, all_args, {**kwargs, "dtype": dtype})


def _unsafe(operation: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy: refused under autocast on CUDA. Use"
        " binary_cross_entropy_with_logits, or leave autocast."
    )


def _run(
    operation: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    autocast_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(autocast_key):
        return operation(*args, **kwargs)


def _is_castable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.dtype is not torch.float64


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor; as in torch, a weight's half-precision copy is cached until autocast ends."""
    if not _is_castable(tensor) or tensor.dtype is dtype:
        return tensor
    if not _is_cached(tensor, dtype):
        return tensor.to(dtype)
    entry = _casts.get(id(tensor))
    if entry is None or entry[0]() is not tensor:
        entry = (weakref.ref(tensor), tensor.to(dtype))
        _casts[id(tensor)] = entry
    return entry[1]


def _is_cached(tensor: Any, dtype: torch.dtype) -> bool:
    """Return True for the half-precision copy of a float32 weight."""
    is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf
    if not is_weight or dtype not in _HALF or tensor._is_view():
        return False
    return bool(torch.is_autocast_cache_enabled())


@contextmanager
def _cuda_autocast_redirected() -> Iterator[None]:
    """Redirect "cuda" autocast, and queries about it, to the CPU tensors that represent CUDA's."""
    autocast = torch.amp.autocast_mode.autocast
    init_of_torch = autocast.__init__
    clear_of_torch = torch.clear_autocast_cache
    is_enabled_of_torch = torch.is_autocast_enabled
    dtype_of_torch = torch.get_autocast_dtype

    def redirected(device_type: Any) -> Any:
        return "cpu" if device_type in (None, "cuda") else device_type

    def init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        init_of_torch(self, redirected(device_type), *args, **kwargs)

    def clear_cache() -> None:
        clear_of_torch()
        _casts.clear()

    def is_enabled(device_type: Any = None) -> Any:
        return is_enabled_of_torch(redirected(device_type))

    def autocast_dtype(device_type: Any) -> Any:
        return dtype_of_torch(redirected(device_type))

    with (
        attribute(autocast, "__init__", init),
        attribute(torch, "clear_autocast_cache", clear_cache),
        attribute(torch, "is_autocast_enabled", is_enabled),
        attribute(torch, "get_autocast_dtype", autocast_dtype),
    ):
        yield
