"""Rates of a card: products, attention, memory, Adam, launches and the host link, for
catalog/efficiency.yaml.

python benchmarks/first_light_rates.py --out DIR      # appends facts to DIR/results.jsonl
    python benchmarks/first_light_rates.py --cudnn --out DIR
        attention of cuDNN, which emulated cards do not have

On emulated cards the program runs to its end, and its rates, which mean nothing, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from first_light_card import Fact, add_fact
from gpu_record import FILE, Record, basis_here
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from autotune.core.units import GIB, MIB

BF16 = torch.bfloat16
TIMED_SECONDS = 0.03
REPETITIONS = 5
MOST_CALLS = 50

Rate = tuple[str, Callable[[], Any]]
"""Name, and the call that finds it."""

LAYERS = {  # inputs and outputs of linear layers
    "square": (8192, 8192),
    "7b query": (3584, 3584),
    "7b key": (3584, 512),
    "7b up": (3584, 18944),
    "7b down": (18944, 3584),
    "7b head": (3584, 152064),
    "1.5b up": (1536, 8960),
    "0.5b query": (896, 896),
    "0.5b up": (896, 4864),
    "adapter a": (3584, 16),
    "adapter b": (16, 3584),
}
TOKENS = (1024, 4096, 16384)
HEAD_TOKENS = (1024, 4096)

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ATTENTION_SHAPES = ((8, 1024), (4, 2048), (2, 4096))  # batch and length
HEADS = ((28, 4, 128), (14, 2, 64))  # heads, groups of keys, width


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, by events of the card."""
    call()
    once = max(_by_events(call, 1), 1e-6)
    calls = max(1, min(MOST_CALLS, int(TIMED_SECONDS / once)))
    repetitions = 1 if basis_here() == "emulated" else REPETITIONS
    times = sorted(_by_events(call, calls) for _ in range(repetitions))
    return times[len(times) // 2] or 1e-9


def _by_events(call: Callable[[], object], calls: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _random(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(
        *shape,
        device="cuda",
        dtype=BF16,
        requires_grad=grad,
    )


def product(
    tokens: int,
    inputs: int,
    outputs: int,
) -> Fact:
    """Rates of a linear layer's three products."""
    x = _random(tokens, inputs)
    weight = _random(outputs, inputs)
    gradient = _random(tokens, outputs)
    seconds = {
        "forward": seconds_of(lambda: x @ weight.T),
        "input gradient": seconds_of(lambda: gradient @ weight),
        "weight gradient": seconds_of(lambda: gradient.T @ x),
    }
    operations = 2 * tokens * inputs * outputs
    return {
        "tokens": tokens,
        "inputs": inputs,
        "outputs": outputs,
        "tflops": _rates(operations / 1e12, seconds),
    }


def _rates(amount: float, seconds: Mapping[str, float]) -> dict[str, float]:
    rates = {}
    for name, took in seconds.items():
        rates[name] = round(amount / took, 1)
    return rates


def memory_rates() -> Fact:
    """GB/s of large copies and sums, reading and writing counted."""
    first = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    second = torch.empty_like(first)
    halves = first.view(BF16).zero_()
    other_halves = second.view(BF16).zero_()
    seconds_per_pass = {
        "copy": seconds_of(lambda: second.copy_(first)) / 2,
        "fill": seconds_of(second.zero_),
        "add in place": seconds_of(lambda: halves.add_(other_halves)) / 3,
        "sum": seconds_of(halves.sum),
    }
    return _rates(first.numel() / 1e9, seconds_per_pass)


def attention(
    batch: int,
    length: int,
    heads: tuple[int, int, int],
    backend: str,
) -> Fact:
    """Rates of causal attention, and the kernels of `default`. TFLOP/s count the visible half."""
    count, groups, width = heads
    query = _random(batch, count, length, width, grad=True)
    takes_groups = backend != "efficient"
    key_heads = groups if takes_groups else count
    key = _random(batch, key_heads, length, width, grad=True)
    value = _random(batch, key_heads, length, width, grad=True)

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            enable_gqa=takes_groups,
        )

    def forward_and_backward() -> object:
        return torch.autograd.grad(forward(), (query, key, value), gradient)

    with contextlib.ExitStack() as stack:
        if backend in BACKENDS:
            stack.enter_context(sdpa_kernel([BACKENDS[backend]]))
        before = torch.cuda.memory_allocated()
        output = forward()
        kept_bytes = torch.cuda.memory_allocated() - before
        gradient = torch.randn_like(output)
        forward_seconds = seconds_of(forward)
        all_seconds = seconds_of(forward_and_backward)
        kernels = _kernels(forward_and_backward) if backend == "default" else None
    operations = 2 * batch * count * length * length * width
    backward_seconds = max(all_seconds - forward_seconds, 1e-9)
    return {
        "batch": batch,
        "length": length,
        "heads": heads,
        "backend": backend,
        "kernels": kernels,
        "kept_bytes": kept_bytes,
        "tflops_forward": round(operations / forward_seconds / 1e12, 1),
        "tflops_backward": round(2.5 * operations / backward_seconds / 1e12, 1),
    }


def _kernels(call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a call runs: which attention torch chose."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    names = set()
    for event in profile.key_averages():
        names.add(event.key[:120])
    return sorted(names)


def adam(dtype: torch.dtype, **options: bool) -> Fact:
    parameters = []
    for _ in range(8):
        values = torch.zeros(3584, 18944, device="cuda", dtype=dtype)
        parameter = torch.nn.Parameter(values)
        parameter.grad = torch.zeros_like(parameter)
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, **options)
    took = seconds_of(optimizer.step)
    moved_bytes = 7 * len(parameters) * values.nbytes
    return {
        "dtype": str(dtype),
        **options,
        "gb_per_second": round(moved_bytes / took / 1e9),
    }


def launches() -> Fact:
    """Microseconds per operation: of the host in eager mode, of the card in a captured graph."""
    small = torch.ones(1024, device="cuda")
    row, weight = _random(1, 896), _random(896, 896)
    with torch.no_grad():
        add_seconds = _queued(lambda: small.add_(1))
        linear_seconds = _queued(lambda: linear(row, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            small.add_(1)
    return {
        "add": add_seconds * 1e6,
        "linear": linear_seconds * 1e6,
        "kernel in a graph": seconds_of(graph.replay) * 1e3,
    }


def _queued(call: Callable[[], object], calls: int = 2000) -> float:
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def host_link() -> Fact:
    """GB/s between the host's memory and the card."""
    device = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True)
    seconds = {
        "pinned to device": seconds_of(lambda: device.copy_(pinned, non_blocking=True)),
        "device to pinned": seconds_of(lambda: pinned.copy_(device, non_blocking=True)),
    }
    return _rates(device.numel() / 1e9, seconds)


def all_rates() -> list[Rate]:
    rates: list[Rate] = []
    for name, (inputs, outputs) in LAYERS.items():
        for tokens in HEAD_TOKENS if name == "7b head" else TOKENS:
            call = partial(product, tokens, inputs, outputs)
            rates.append((f"product: {name}", call))
    rates.append(("memory", memory_rates))
    rates += _attentions("default", "flash", "efficient")
    for dtype in (BF16, torch.float32):
        call = partial(adam, dtype, fused=True)
        rates.append(("adam", call))
    return [*rates, ("launches", launches), ("host link", host_link)]


def _attentions(*backends: str) -> list[Rate]:
    calls: list[Rate] = []
    for batch, length in ATTENTION_SHAPES:
        for heads in HEADS:
            for backend in backends:
                call = partial(attention, batch, length, heads, backend)
                calls.append(("attention", call))
    return calls


def _without_speeds(rates: Sequence[Rate]) -> list[Rate]:
    calls: list[Rate] = []
    for name, rate in rates:
        calls.append((name, partial(_without_speed, rate)))
    return calls


def _without_speed(rate: Callable[[], Any]) -> str:
    rate()
    return "ran; an emulated card has no speed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cudnn", action="store_true")
    arguments = parser.parse_args()
    record = Record(arguments.out / FILE)
    is_emulated = basis_here() == "emulated"
    if arguments.cudnn and is_emulated:
        print("Not run: cuDNN looks for an engine on the card itself; an emulated one has none.")
        return 0
    rates = _attentions("cudnn") if arguments.cudnn else all_rates()
    if is_emulated:
        rates = _without_speeds(rates)
    failed = False
    for name, rate in rates:
        failed |= not add_fact(record, f"rate: {name}", rate)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
