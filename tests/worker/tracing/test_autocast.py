"""Autocast on CPU tensors with CUDA's lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker.tracing import autocast  # noqa: E402

F = torch.nn.functional
HALF = torch.bfloat16


def x(*shape: int) -> Any:
    return torch.ones(*(shape or (4, 8)), dtype=HALF)


WIDE = {
    "softmax": lambda: F.softmax(x(), -1),
    "log_softmax": lambda: F.log_softmax(x(), -1),
    "layer_norm": lambda: F.layer_norm(x(), (8,)),
    "group_norm": lambda: F.group_norm(x(), 2),
    "cross_entropy": lambda: F.cross_entropy(x(), torch.zeros(4, dtype=torch.long)),
    "nll_loss": lambda: F.nll_loss(x(), torch.zeros(4, dtype=torch.long)),
    "mse_loss": lambda: F.mse_loss(x(), x()),
    "l1_loss": lambda: F.l1_loss(x(), x()),
    "kl_div": lambda: F.kl_div(x(), x(), reduction="sum"),
    "softplus": lambda: F.softplus(x()),
    "pow": lambda: x().pow(2),
    "pow_tensor": lambda: x() ** x(),
    "exp": lambda: x().exp(),
    "expm1": lambda: x().expm1(),
    "log": lambda: x().log(),
    "log1p": lambda: x().log1p(),
    "rsqrt": lambda: x().rsqrt(),
    "reciprocal": lambda: x().reciprocal(),
    "sum": lambda: x().sum(),
    "sum_dim": lambda: x().sum(-1),
    "prod": lambda: x().prod(),
    "cumsum": lambda: x().cumsum(-1),
    "logsumexp": lambda: x().logsumexp(-1),
    "norm": lambda: x().norm(),
    "norm_dim": lambda: x().norm(dim=-1),
    "vector_norm": lambda: torch.linalg.vector_norm(x()),
    "cosine_similarity": lambda: F.cosine_similarity(x(), x()),
    "cdist": lambda: torch.cdist(x(), x()),
}
"""Float32 with bfloat16 operands: "CUDA Ops that can autocast to float32" in torch's documentation.
"""

NARROW = {
    "matmul": lambda: torch.matmul(x(4, 8).float(), x(8, 4).float()),
    "mm": lambda: torch.mm(x(4, 8).float(), x(8, 4).float()),
    "bmm": lambda: torch.bmm(x(2, 4, 8).float(), x(2, 8, 4).float()),
    "addmm": lambda: torch.addmm(x(4, 4).float(), x(4, 8).float(), x(8, 4).float()),
    "baddbmm": lambda: torch.baddbmm(x(2, 4, 4).float(), x(2, 4, 8).float(), x(2, 8, 4).float()),
    "linear": lambda: F.linear(x(4, 8).float(), x(3, 8).float()),
    "mv": lambda: torch.mv(x(4, 8).float(), x(8).float()),
    "addmv": lambda: torch.addmv(x(4).float(), x(4, 8).float(), x(8).float()),
    "addr": lambda: torch.addr(x(4, 8).float(), x(4).float(), x(8).float()),
    "einsum": lambda: torch.einsum("ab,bc->ac", x(4, 8).float(), x(8, 4).float()),
    "conv1d": lambda: F.conv1d(x(1, 2, 8).float(), x(3, 2, 3).float()),
    "prelu": lambda: F.prelu(x(4, 8).float(), x(1).float()),
    "chain_matmul": lambda: torch.linalg.multi_dot(
        [x(4, 8).float(), x(8, 4).float(), x(4, 2).float()]
    ),
}
"""Half precision with float32 operands."""

AS_THEY_ARE = {
    "mean": lambda: x().mean(),
    "relu": lambda: x().relu(),
    "sigmoid": lambda: x().sigmoid(),
    "silu": lambda: F.silu(x()),
    "gelu": lambda: F.gelu(x()),
    "mul": lambda: x() * x(),
    "sum_asked": lambda: x().sum(dtype=HALF),
    "softmax_asked": lambda: F.softmax(x(), -1, dtype=HALF),
    "max": lambda: x().max(),
    "sin": lambda: x().sin(),
    "sqrt": lambda: x().sqrt(),
}
"""The operands' own type: on neither list, or with a type given."""

WIDEST = {
    "addcmul": lambda: torch.addcmul(x(), x(), x().float()),
    "addcdiv": lambda: torch.addcdiv(x(), x(), x().float()),
    "dot": lambda: torch.dot(x(8), x(8).float()),
    "scatter_add": lambda: x().float().scatter_add(0, torch.zeros(4, 8, dtype=torch.long), x()),
    "index_put": lambda: x().index_put((torch.zeros(1, dtype=torch.long),), x(1, 8).float()),
}


def under_autocast(
    code: Any,
    dtype: Any = HALF,
    device: str = "cuda",
) -> Any:
    with autocast.follow_cuda(), torch.autocast(device, dtype=dtype):
        return code().dtype


@pytest.mark.parametrize("name", WIDE)
def test_cuda_widens(name: str) -> None:
    assert under_autocast(WIDE[name]) is torch.float32


@pytest.mark.parametrize("name", NARROW)
def test_cuda_narrows(name: str) -> None:
    assert under_autocast(NARROW[name]) is HALF


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_cuda_does_not_cast(name: str) -> None:
    assert under_autocast(AS_THEY_ARE[name]) is HALF


@pytest.mark.parametrize("name", WIDEST)
def test_cuda_promotes_to_the_widest(name: str) -> None:
    assert under_autocast(WIDEST[name]) is torch.float32


def test_the_cpus_own_lists_differ_and_are_restored() -> None:
    with torch.autocast("cpu", dtype=HALF):
        before = {
            name: code().dtype
            for name, code in WIDE.items()
            if name not in ("cdist", "kl_div", "prod")
        }
    assert torch.bfloat16 in set(before.values())
    under_autocast(WIDE["softmax"])
    with torch.autocast("cpu", dtype=HALF):
        assert {name: WIDE[name]().dtype for name in before} == before
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_float16_and_the_default_of_cuda() -> None:
    assert (
        under_autocast(lambda: torch.mm(x().float(), x(8, 4).float()), torch.float16)
        is torch.float16
    )
    assert under_autocast(lambda: F.softmax(x().half(), -1), torch.float16) is torch.float32
    with autocast.follow_cuda(), torch.autocast("cuda"):
        assert torch.mm(x().float(), x(8, 4).float()).dtype is torch.float16


def test_switched_off_inside() -> None:
    with (
        autocast.follow_cuda(),
        torch.autocast("cuda", dtype=HALF),
        torch.autocast("cuda", enabled=False),
    ):
        assert F.softmax(x(), -1).dtype is HALF
        assert not torch.is_autocast_enabled()


def test_queries_about_cuda_are_redirected() -> None:
    with autocast.follow_cuda(), torch.autocast("cpu", dtype=HALF):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is HALF
    assert not torch.is_autocast_enabled()


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with pytest.raises(RuntimeError, match="with_logits"):
        under_autocast(lambda: F.binary_cross_entropy(x(), x()))


def test_a_weight_is_cast_once() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with autocast.follow_cuda(), torch.autocast("cuda", dtype=HALF):
        first = torch.mv(weight, x(8))
        second = torch.mv(weight, x(8))
        assert first.grad_fn.next_functions[0][0] is second.grad_fn.next_functions[0][0]
        assert len(autocast._casts) == 1
    assert not autocast._casts


def test_the_lists_are_the_installed_torchs() -> None:
    """Compare with the header of torch's own CUDA lists, which is part of the package."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file() or "AT_FORALL_LOWER_PRECISION_FP" not in header.read_text():
        pytest.skip("this torch comes without the header")
    text = header.read_text()
    for macro, operations in (
        ("LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("FP32", autocast.FP32),
        ("FP32_SET_OPT_DTYPE", autocast.FP32_UNLESS_DTYPE_GIVEN),
        ("PROMOTE", autocast.WIDEST),
    ):
        assert set(operations) == listed(text, macro), macro
    overloads = set(re.findall(r'"(norm\.\w+)"', text))
    assert set(autocast.FP32_BY_OVERLOAD) == overloads


def listed(text: str, macro: str) -> set[str]:
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)\s*\\\n((?:.*\\\n)*.*)", text)
    assert body is not None
    return {", ".join(entry).replace(", ", ".") for entry in entries(body[1])}


def entries(body: str) -> list[list[str]]:
    return [
        [part.strip() for part in entry.split(",")] for entry in re.findall(r"_\(([^)]*)\)", body)
    ]
