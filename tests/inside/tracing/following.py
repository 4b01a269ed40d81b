"""A stretch of code on fake tensors, followed: what it held at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


class Peaks:
    """Bytes while the code ran."""

    def __init__(self) -> None:
        self.most = 0
        self.left = 0
        self.flops = 0.0


def followed(code: Callable[[], Any], spec: Mapping[str, Any] | None = None) -> Peaks:
    """Runs it as a CUDA device would, and keeps its result alive until it has been counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autotune.inside.tracing import cuda_choices
    from autotune.inside.tracing.ledger import Ledger
    from autotune.inside.tracing.tracker import Tracker

    asked = {"device": "cuda", "settings": {}, "model": {}, **(spec or {})}
    ledger, peaks = Ledger(), Peaks()
    tracker = Tracker(ledger, workspaces=cuda_choices.workspaces_for(asked))
    with cuda_choices.as_on_cuda(asked), FakeTensorMode(allow_non_fake_inputs=True), tracker:
        result = code()
        peaks.most, peaks.left = ledger.peak, ledger.live
        del result
    peaks.flops = sum(tracker.flops.values())
    return peaks
