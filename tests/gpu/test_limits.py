"""A smaller card on a larger one, and what happens when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.units import GIB
from tests.gpu.rigs import SHORT, asked, candidate, check_well, measured, rig

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_ladder_recovers_from_a_real_out_of_memory_error(tmp_path: Path) -> None:
    """Up to the first failure, then other rungs, all on one load; the last is as the first."""
    understood = asked(tmp_path, "max_completion_length=1024", memory_limit="12G", global_batch=64)
    outcomes, peaks = [], []
    with rig(understood) as executor:
        for micro_batch, checkpointing in ((2, False), (16, False), (64, False), (8, True), (2, False)):
            one = candidate(
                understood, per_device_train_batch_size=micro_batch, gradient_checkpointing=checkpointing, use_vllm=False
            )
            found = executor.open(one).measure(one, SHORT)
            outcomes.append(str(found.outcome))
            peaks.append(found.memory.torch_allocated_bytes or 0)
        loads = executor.loads
    assert any(outcome.startswith("oom_") for outcome in outcomes[:3]), outcomes
    assert outcomes[0] == outcomes[3] == outcomes[4] == "ok", outcomes
    assert peaks[4] == pytest.approx(peaks[0], rel=0.02)
    assert loads <= 2  # a process whose memory did not come back is replaced


@pytest.mark.parametrize("limit", ["8G", "16G"])
def test_a_ballast_makes_the_card_as_small_as_asked(tmp_path: Path, limit: str) -> None:
    found = measured(asked(tmp_path, memory_limit=limit))
    check_well(found)
    assert found.memory.limit_bytes <= int(limit[:-1]) * GIB
    assert "ballast" in found.memory.bound_by or found.memory.bound_by in ("device", "torch")
    assert any("transfer" in caveat or "smaller card" in caveat for caveat in found.caveats), found.caveats


def test_vllms_share_is_of_the_small_card(tmp_path: Path) -> None:
    found = measured(
        asked(tmp_path, "use_vllm=true", memory_limit="16G"), use_vllm=True, vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=512,
    )  # fmt: skip
    check_well(found)
    assert found.effective["vllm_gpu_memory_utilization"] == pytest.approx(0.3)
    assert (found.memory.peak_bytes or 0) < 16 * GIB
