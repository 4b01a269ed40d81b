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
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """)

FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
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
    native = _native_kernels()
    # Operations that both devices run in lower precision keep torch's kernel, with its own cache of
    # cast weights.
    policies: dict[str, Callable[..., Any] | None] = {
        **dict.fromkeys(native - set(LOWER_PRECISION)),
        **dict.fromkeys(
            set(LOWER_PRECISION) - native,
            functools.partial(_cast_to, lambda args: torch.get_autocast_dtype("cpu")),
        ),
        **dict.fromkeys(FP32, functools.partial(_cast_to, lambda args: torch.float32)),
        **dict.fromkeys(FP32_UNLESS_DTYPE_GIVEN, _fp32_unless_dtype_given),
        **dict.fromkeys(FP32_BY_OVERLOAD, _fp32_by_overload),
        **dict.fromkeys(WIDEST, functools.partial(_cast_to, _widest)),
        "binary_cross_entropy": _unsafe,
    }
    for name, policy in policies.items():
        operation = _operation(name)
        if operation is None:
            continue  # not in this release of torch
        kernel = (
            torch.library.fallthrough_kernel
            if policy is None
            else functools.partial(policy, operation)
        )
        library.impl(name, kernel, KEY)


@functools.lru_cache(maxsize=1)
def _native_kernels() -> frozenset[str]:
    """Return the operations of this torch's CPU list."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    held = (name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY))
    return frozenset(name.removeprefix("aten::") for name in held)


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


# Policies of `ATen/autocast_mode.h`.


def _cast_to(
    choose: Callable[[Any], torch.dtype], operation: Any, *args: Any, **kwargs: Any
) -> Any:
    dtype = choose((args, kwargs))
    changed = with_tensors(
        lambda tensor: _cast_one(tensor, dtype) if _eligible(tensor) else tensor, (args, kwargs)
    )
    return _run(operation, *changed)


def _widest(given: Any) -> torch.dtype:
    wide = any(_eligible(tensor) and tensor.dtype is torch.float32 for tensor in tensors_in(given))
    return torch.float32 if wide else torch.get_autocast_dtype("cpu")


def _fp32_unless_dtype_given(operation: Any, *args: Any, **kwargs: Any) -> Any:
    place = [argument.name for argument in operation._schema.arguments].index("dtype")
    dtype = args[place] if len(args) > place else kwargs.get("dtype")
    if dtype is None and _eligible(args[0]):
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return _run(operation, args, kwargs)


def _fp32_by_overload(operation: Any, *args: Any, **kwargs: Any) -> Any:
    wider = _operation(
        FP32_BY_OVERLOAD[
            f"{operation._schema.name.removeprefix('aten::')}.{operation._overloadname}"
        ]
    )
    defaults = [argument.default_value for argument in operation._schema.arguments]
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return _run(wider, (*args, *defaults[len(args) :]), {**kwargs, "dtype": dtype})


def _unsafe(operation: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy: refused under autocast on CUDA. Use"
        " binary_cross_entropy_with_logits, or leave autocast."
    )


def _run(operation: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ):
        return operation(*args, **kwargs)


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast_one(tensor: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor; as in torch, a weight's half-precision copy is cached until autocast ends."""
    if tensor.dtype is dtype:
        return tensor
    weight = (
        dtype in _HALF and tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf
    )
    if not weight or tensor._is_view() or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    cached = _casts.get(id(tensor))
    if cached is None or cached[0]() is not tensor:
        cached = _casts[id(tensor)] = (weakref.ref(tensor), tensor.to(dtype))
    return cached[1]


@contextmanager
def _cuda_autocast_redirected() -> Iterator[None]:
    """Redirect "cuda" autocast, and queries about it, to the CPU tensors that represent CUDA's."""
    autocast = torch.amp.autocast_mode.autocast
    begin, clear = autocast.__init__, torch.clear_autocast_cache
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def stand_in(device_type: Any = None) -> Any:
        return "cpu" if device_type in (None, "cuda") else device_type

    def init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, stand_in(device_type), *args, **kwargs)

    def forget() -> None:
        clear()
        _casts.clear()

    with (
        attribute(autocast, "__init__", init),
        attribute(torch, "clear_autocast_cache", forget),
        attribute(
            torch, "is_autocast_enabled", lambda device_type=None: enabled(stand_in(device_type))
        ),
        attribute(torch, "get_autocast_dtype", lambda device_type: dtype_of(stand_in(device_type))),
    ):
        yield
