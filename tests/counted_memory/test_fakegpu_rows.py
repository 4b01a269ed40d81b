"""The runs of FakeGPU's page: their 4-bit layers have the published sizes, each row has a trace
of its own kind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fakegpu  # noqa: E402
import fakegpu_step  # noqa: E402

from autotune.worker.stand_in.step import build_model  # noqa: E402

ROWS = json.loads(fakegpu.ROWS.read_text())["rows"]


@pytest.mark.parametrize(
    ("nested", "stored"),
    [(False, 280_098_816), (True, 257_085_816)],
    ids=["direct", "nested scales"],
)
def test_packed_layers_store_what_the_page_lists(nested: bool, stored: int) -> None:
    row = next(row for row in ROWS if row["method"] == "qlora" and row["nested"] is nested)
    specification = fakegpu.expressed(1, row).specification
    model = fakegpu_step.packed_nf4(
        build_model(specification, specification["model"].get("attn_implementation")), specification
    )
    layers = [module for module in model.modules() if isinstance(module, fakegpu_step._Layer)]
    assert len(layers) == 186
    stored_bytes = 0
    for layer in layers:
        for buffer in layer.buffers():
            stored_bytes += buffer.numel() * buffer.element_size()
    assert stored_bytes == stored
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert sum(trained) == 5_411_328


def test_rows_that_differ_in_what_runs_have_different_traces() -> None:
    keys = {}
    for number, row in enumerate(ROWS, 1):
        step = tuple(
            row[name]
            for name in (
                "model",
                "method",
                "nested",
                "sharding",
                "gpus",
                "checkpointing",
                "accumulation",
                "length",
            )
        )
        keys.setdefault(step, fakegpu.expressed(number, row).key)
    assert len(set(keys.values())) == len(keys)
