"""Gathering for generation: seconds of bringing spread weights together, where the trainer's own model writes completions.

Once for a rollout, all of them; or, where they would not fit (`ds3_gather_for_generation=false`), layer by layer for every token
that is written: then the link decides, and not the device.
"""

from __future__ import annotations

import math

from autotune.catalogue.efficiency import efficiency
from autotune.composition import Composition
from autotune.predict.speed.ceilings import Ceilings, crossing, each, longer
from autotune.predict.speed.decoding import MICRO, Writing
from autotune.prediction import Estimate
from autotune.trace import Inventory

SPREADS_WEIGHTS = frozenset({"zero3", "fsdp1", "fsdp2"})


def with_gathering(
    rollout: Estimate, inventory: Inventory, composition: Composition, writing: Writing, layers: int, device: Ceilings
) -> Estimate | None:
    """The rollout's seconds with it; None where it happens for every token over a link that is not known."""
    ranks = composition.ranks
    if composition.generation != "trainer" or ranks < 2 or composition.sharded_by not in SPREADS_WEIGHTS:
        return rollout
    passes = passes_of(writing) if composition.gathers_each_token else 1
    sent = crossing(passes * inventory.weight_bytes * (ranks - 1) / ranks, device)
    if sent is None:
        return None if composition.gathers_each_token else rollout
    whole = sent + each(passes * layers, efficiency("exchange_microseconds"), MICRO)
    # At best the next layer comes while this one works.
    return Estimate(value=rollout.value + whole.value, low=longer(rollout, whole).low, high=rollout.high + whole.high)


def passes_of(writing: Writing) -> int:
    """Over the model: one for the prompts, and one for every token after the first, of each batch that is written together."""
    batches = math.ceil(writing.sequences / max(1, writing.at_a_time))
    return batches * max(1, writing.completion_length)
