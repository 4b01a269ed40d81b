"""Memory of a process outside torch, as public runs measured it."""

from __future__ import annotations

import pytest

from autotune.catalog import bare_context, context, gpus
from autotune.core.units import MIB

GPUS = {gpu.name: gpu for gpu in gpus()}

# Card, MiB of a bare context, MiB with the kernels of a training run (None: not stated).
PUBLISHED = [
    ("T4", 104.875, 140.875),  # fitcheck-llm, twelve runs of QLoRA
    ("RTX3090", 256, None),  # InvokeAI's issue 9413
]


@pytest.mark.parametrize(("card", "bare", "training"), PUBLISHED)
def test_public_contexts_are_inside_the_interval(
    card: str,
    bare: float,
    training: float | None,
) -> None:
    interval = bare_context(GPUS[card])
    assert interval.low <= bare * MIB <= interval.high
    if training is not None:
        with_kernels = context(GPUS[card])
        assert with_kernels.low <= training * MIB <= with_kernels.high
