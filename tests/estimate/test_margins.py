"""Margins of a verdict: how far from the limit a configuration surely fits, surely does not, or is
saved by an allocator that empties its cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.core.composition import EngineSettings
from autotune.core.prediction import Prediction
from autotune.core.trace import Trace
from autotune.core.units import MIB
from autotune.estimate.predictor import predict
from tests.estimate.synthetic import Book, composition, situation, training

ENGINE = EngineSettings(
    utilization=0.3,
    max_model_length=1024,
    max_num_seqs=8,
)


def predicted(**changed: Any) -> Prediction:
    return predict(situation(**changed))


def least_sure_limit(**changed: Any) -> int:
    """Return the smallest limit under which the configuration surely fits, to 64 KiB."""
    too_small, enough = 100 * MIB, 10_000 * MIB
    while enough - too_small > MIB // 16:
        middle = (too_small + enough) // 2
        if predicted(limit_bytes=middle, **changed).fits is True:
            enough = middle
        else:
            too_small = middle
    return enough


@pytest.mark.parametrize("extra_mib", [50, 100])
def test_what_data_may_add_is_kept_free(extra_mib: int) -> None:
    """Tokens may concentrate on few experts: to fit surely, that much more must be free."""
    plain = least_sure_limit()
    uneven = least_sure_limit(trace=training(high_extra_bytes=extra_mib * MIB))
    assert uneven - plain == pytest.approx(extra_mib * MIB, abs=MIB / 8)


def growing() -> Trace:
    """A step whose second activation does not fit into the segment that the first one left.

    100 MiB of weights; 100 MiB are freed before 120 MiB are requested: 220 MiB of activations are
    reserved without pressure, and 120 once the cache is emptied.
    """
    book = Book()
    book.enter("load")
    book.make(100 * MIB, "weights")
    for step in range(2):
        book.enter("forward", step)
        book.drop(book.make(100 * MIB, "activations"))
        book.drop(book.make(120 * MIB, "activations"))
        book.enter("backward", step)
        book.drop(book.make(2 * MIB, "gradients"))
        book.enter("optimizer", step)
        book.drop(book.make(2 * MIB, "optimizer"))
    return book.trace()


def test_an_emptied_cache_saves_a_step_that_is_above_the_limit() -> None:
    """The room between both peaks: 100 MiB that were reserved and free."""
    wide = predicted(trace=growing())
    assert wide.torch_peak_reserved_bytes.value >= (100 + 100 + 120) * MIB
    limit = round(wide.peak_memory_bytes.value) - 50 * MIB
    tight = predicted(trace=growing(), limit_bytes=limit)
    assert tight.fits is not False
    assert tight.peak_memory_bytes.value <= limit
    assert any("empty its cache and retry" in text for text in tight.assumptions)
    below_both = predicted(trace=growing(), limit_bytes=limit - 80 * MIB)
    assert below_both.peak_memory_bytes.value > limit - 80 * MIB


@pytest.mark.parametrize(("apart", "counted"), [(False, True), (True, False)])
def test_torch_counts_the_engine_that_shares_its_process(apart: bool, counted: bool) -> None:
    """Weights and cache of an engine in the trainer's process are in its `reserved` figure; those
    of a process of the engine's own are not.
    """
    engine = dataclasses.replace(ENGINE, apart=apart)
    combined = predicted(composition=composition(engine=engine, generation="engine"))
    without = predicted()
    added = combined.torch_peak_reserved_bytes.value - without.torch_peak_reserved_bytes.value
    cache = combined.breakdown["kv_cache"]
    assert cache > 1000 * MIB
    assert (added > cache) is counted
    assert (added < cache / 2) is not counted
