"""Helper that runs code on fake tensors and returns its peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


class Peaks:
    """Bytes and FLOPs of the traced code."""

    def __init__(self) -> None:
        self.most = 0
        self.left = 0
        self.flops = 0.0


def traced(code: Callable[[], Any], spec: Mapping[str, Any] | None = None) -> Peaks:
    """Run the code as on a CUDA device; its result is live until it has been counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autotune.worker.tracing import cuda_choices
    from autotune.worker.tracing.ledger import Ledger
    from autotune.worker.tracing.tracker import Tracker
    from autotune.worker.tracing.workspaces import workspaces_for

    specification = {
        "device": "cuda",
        "settings": {},
        "model": {},
        **(spec or {}),
    }
    ledger, peaks = Ledger(), Peaks()
    tracker = Tracker(ledger, workspaces=workspaces_for(specification))
    with (
        cuda_choices.as_on_cuda(specification),
        FakeTensorMode(allow_non_fake_inputs=True),
        tracker,
    ):
        result = code()
        peaks.most, peaks.left = ledger.peak, ledger.live
        del result
    peaks.flops = sum(ledger.flops.values())
    return peaks
