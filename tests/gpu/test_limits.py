"""Emulation of a smaller card on a larger one, and its behaviour when it is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.units import GIB
from tests.gpu.runners import SHORT_PROBE, candidate, check_well, gpu_request, measured, runner

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def test_recovery_from_a_real_out_of_memory_error(tmp_path: Path) -> None:
    """Larger batches up to a failure, then smaller ones on the same load; the last measurement
    equals the first.
    """
    request = gpu_request(
        tmp_path, "max_completion_length=1024", memory_limit="12G", global_batch=64
    )
    outcomes, peaks = [], []
    with runner(request) as executor:
        for micro_batch, checkpointing in (
            (2, False),
            (16, False),
            (64, False),
            (8, True),
            (2, False),
        ):
            probed = candidate(
                request,
                per_device_train_batch_size=micro_batch,
                gradient_checkpointing=checkpointing,
                use_vllm=False,
            )
            measurement = executor.open(probed).measure(probed, SHORT_PROBE)
            outcomes.append(str(measurement.outcome))
            peaks.append(measurement.memory.torch_allocated_bytes or 0)
        loads = executor.loads
    assert any(outcome.startswith("oom_") for outcome in outcomes[:3]), outcomes
    assert outcomes[0] == outcomes[3] == outcomes[4] == "ok", outcomes
    assert peaks[4] == pytest.approx(peaks[0], rel=0.02)
    assert loads <= 2  # a process whose memory did not come back is replaced


@pytest.mark.parametrize("limit", ["8G", "16G"])
def test_ballast_emulates_the_requested_size(tmp_path: Path, limit: str) -> None:
    measurement = measured(gpu_request(tmp_path, memory_limit=limit))
    check_well(measurement)
    assert measurement.memory.limit_bytes <= int(limit[:-1]) * GIB
    assert "ballast" in measurement.memory.bound_by or measurement.memory.bound_by in (
        "device",
        "torch",
    )
    assert any(
        "was held back" in caveat or "torch's allocator was held" in caveat
        for caveat in measurement.caveats
    ), measurement.caveats


def test_vllms_share_is_of_the_small_card(tmp_path: Path) -> None:
    measurement = measured(
        gpu_request(tmp_path, "use_vllm=true", memory_limit="16G"),
        use_vllm=True,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=512,
    )
    check_well(measurement)
    assert measurement.effective["vllm_gpu_memory_utilization"] == pytest.approx(0.3)
    assert (measurement.memory.peak_bytes or 0) < 16 * GIB
