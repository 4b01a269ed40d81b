from __future__ import annotations

import msgspec
import pytest

from autotune.core.trace import Trace

pytest.importorskip("torch")

from autotune.worker.tracing.ledger import TRACED_PARTS, Ledger


def written() -> Ledger:
    ledger = Ledger()
    weights = ledger.allocate(100, "weights")
    ledger.enter("forward")
    ledger.enter("forward", layer=0)
    activations = ledger.allocate(40, "activations")
    moment = ledger.allocate(30, "activations")
    ledger.free(moment)
    ledger.enter("backward")
    ledger.free(activations)
    ledger.set_part(weights, "adapters")
    return ledger


def test_events_record_allocations_and_frees() -> None:
    ledger = written()
    assert ledger.events == [1, 2, 3, -3, -2]
    assert ledger.sizes == [100, 40, 30]
    assert (ledger.live, ledger.peak) == (100, 170)


def test_a_mark_begins_with_the_next_event_and_replaces_an_earlier_one_there() -> None:
    marks = [(mark["event"], mark["phase"], mark["layer"]) for mark in written().marks]
    assert marks == [(0, "load", None), (1, "forward", 0), (4, "backward", None)]


def test_frees_after_the_end_are_ignored() -> None:
    ledger = Ledger()
    number = ledger.allocate(10, "activations")
    ledger.close()
    ledger.free(number)
    assert ledger.events == [1]
    assert ledger.live == 10


def test_the_json_is_a_trace() -> None:
    trace_fields = {
        "basis": "traced",
        "versions": {},
        "device": "cpu",
        "layers": 1,
        "work": [],
        "inventory": {
            "parameters": 1,
            "trainable_parameters": 1,
            "weight_bytes": 1,
            "trainable_bytes": 1,
            "layer_bytes": [1],
            "layer_trainable": [1],
            "largest_parameter": 1,
        },
    }
    trace = msgspec.convert({**written().as_json(), **trace_fields}, Trace)
    assert trace.part_names == TRACED_PARTS
    assert trace.peak_bytes == 170
    assert trace.live_parts_at(2) == {"adapters": 100, "activations": 70}
