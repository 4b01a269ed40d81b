"""Exchanges between ranks: gathered weights, reduced gradients, and the optimizer that each rank runs
on its share.

cost = max(exposed share · transfer, transfer - backward pass) + units · wait

Transfers overlap with arithmetic and slow it down meanwhile. A sharded unit (a decoder layer) also
waits for each of its exchanges: streams are synchronised, and the slowest rank is last. Under FSDP1
each matrix of an adapter is a unit of its own (PEFT's wrap policy): the device has next to nothing
to do in it while the host gathers the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autotune.catalog.constants import efficiency
from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.core.trace import Trace
from autotune.estimate.model_shape import dtype_bytes
from autotune.estimate.throughput import generation, roofline
from autotune.estimate.throughput.cycle_time import CycleTime
from autotune.estimate.throughput.roofline import MILLI, Ceilings, independent

SHARDS_OPTIMIZER = frozenset({"zero1", "zero2", "zero3", "fsdp1"})
"""Traces of these are made on one rank. FSDP2 is traced with its shards."""


def with_exchanges(
    seconds: Mapping[Phase, Estimate], trace: Trace, composition: Composition, counts: CycleTime, device: Ceilings
) -> dict[Phase, Estimate]:
    """Add the cost of exchanges to the backward pass, and divide the optimizer's work by the ranks."""
    found, inventory = dict(seconds), trace.inventory
    if composition.sharded_by in SHARDS_OPTIMIZER and "optimizer" in found:
        found["optimizer"] = found["optimizer"].scaled(1 / composition.ranks)
    sent = exchanged_bytes(trace, composition, counts)
    spent = roofline.link_seconds(sent, device) if sent else None
    if spent is None or "backward" not in found:
        return found
    # 1. Transfers beyond the backward pass.
    cover, share = found["backward"], efficiency("exposed_exchange_share")
    low = max(share.low * spent.low, spent.low - cover.high)
    value = max(low, share.value * spent.value, spent.value - cover.value)
    exposed = Estimate(value=value, low=low, high=max(value, share.high * spent.high))
    # 2. Waits: micro-steps · units · (2 gathers + 1 reduction, if the weights themselves are trained).
    waits = adapter_waits = Estimate.exactly(0)
    if composition.sharded_by in generation.SHARDS_WEIGHTS:
        exchanged = 2 if inventory.trainable_parameters < inventory.parameters / 2 else 3
        count = counts.micro_steps * (len(inventory.layer_bytes) + 1) * exchanged
        waits = roofline.overhead_seconds(count, efficiency("sharded_unit_milliseconds"), MILLI)
    # 3. The same of units of adapters.
    used, adapted = trace.usage, composition["policy"].adapter_rank is not None
    if composition.sharded_by == "fsdp1" and adapted and used is not None:
        sharded = {index for index, one in enumerate(used.parameters) if one.trains and one.layer is not None}
        units = sum(not sharded.isdisjoint(own) for own in used.modules)
        adapter_waits = roofline.overhead_seconds(counts.micro_steps * units * 3, efficiency("adapter_unit_milliseconds"), MILLI)
    return {**found, "backward": independent(cover, exposed, waits, adapter_waits)}


def exchanged_bytes(trace: Trace, composition: Composition, counts: CycleTime) -> float:
    """Bytes that one rank sends in a cycle.

    w, g: gathered weight and gradient bytes · (ranks - 1) / ranks; m: micro-steps; s: optimizer steps.
    FSDP, ZeRO-3: m · (2w + g), two gathers; ZeRO-2: m · g + s · g; else 2 · s · g.
    """
    ranks, kind = composition.ranks, composition.sharded_by
    ring = (ranks - 1) / ranks
    weights, gradients = _gathered_bytes(trace) * ring, trace.inventory.trainable_bytes * ring
    if ranks == 1:
        return 0.0
    if kind in generation.SHARDS_WEIGHTS:
        return counts.micro_steps * (2 * weights + gradients)
    if kind == "zero2":
        return counts.micro_steps * gradients + counts.optimizer_steps * gradients
    return counts.optimizer_steps * 2 * gradients


def _gathered_bytes(trace: Trace) -> float:
    """Return the bytes of all weights in the precision of their products: float32 weights under mixed
    precision are cast before they are gathered, quantised ones are not."""
    products: Counter[str] = Counter()
    for work in trace.work:
        products.update({dtype: flops for dtype, flops in work.flops.items() if not dtype.startswith(roofline.ATTENTION)})
    inventory, dtype = trace.inventory, max(products, key=lambda name: products[name], default=None)
    held = inventory.weight_bytes / max(1, inventory.parameters)
    return inventory.weight_bytes * (1.0 if dtype is None else min(1.0, dtype_bytes(dtype) / held))
