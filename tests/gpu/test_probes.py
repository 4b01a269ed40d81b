"""Each of CUDA's paths once, on a real GPU: what most depends on comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.measurement import Measurement
from tests.gpu.runners import WHOLE, candidate, check_well, gpu_request, measured, runner

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 512}


@pytest.fixture(name="adapter", scope="module")
def one_adapter(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The whole probe of an adapter, measured once: others are compared with it."""
    return measured(gpu_request(tmp_path_factory.mktemp("adapter")), WHOLE)


def test_bf16_with_an_adapter(adapter: Measurement) -> None:
    check_well(adapter)
    assert adapter.effective["bf16"] is True
    assert adapter.effective["dtype"] == "bfloat16"
    assert adapter.effective["use_peft"] is True


def test_the_whole_certificate_on_a_gpu(adapter: Measurement) -> None:
    assert adapter.exercised is not None
    assert adapter.exercised.checkpoint_saves == 1
    assert adapter.exercised.optimizer_steps >= 3


def test_a_sleeping_engine_serves_one_candidate_after_the_other(tmp_path: Path) -> None:
    """It sleeps and wakes in every cycle, and all candidates share its load."""
    request = gpu_request(tmp_path, "use_vllm=true")
    with runner(request) as executor:
        for micro_batch in (2, 8, 4):
            probed = candidate(
                request,
                **ENGINE,
                vllm_enable_sleep_mode=True,
                per_device_train_batch_size=micro_batch,
            )
            measurement = executor.open(probed).measure(probed, WHOLE)
            check_well(measurement)
            ran = measurement.exercised
            assert ran is not None and ran.sleeps and ran.wakes
            assert min(ran.sleeps, ran.wakes) >= ran.generations
            assert measurement.memory.torch_reserved_bytes is None
            assert measurement.memory.torch_reserved_why
        assert executor.loads == 1


def test_an_adapter_with_colocated_vllm(tmp_path: Path) -> None:
    request = gpu_request(tmp_path, "use_vllm=true", "vllm_enable_sleep_mode=false")
    measurement = measured(request, WHOLE, **ENGINE)
    check_well(measurement)
    assert measurement.exercised is not None and measurement.exercised.weight_syncs
    assert measurement.exercised.sleeps is None


def test_full_tuning_needs_more_than_an_adapter(tmp_path: Path, adapter: Measurement) -> None:
    full = measured(gpu_request(tmp_path, tuning="full"))
    check_well(full)
    assert (full.memory.torch_allocated_bytes or 0) > 1.5 * (
        adapter.memory.torch_allocated_bytes or 0
    )


def test_four_bit_weights_need_no_download(tmp_path: Path, adapter: Measurement) -> None:
    pytest.importorskip("bitsandbytes")
    measurement = measured(gpu_request(tmp_path, tuning="qlora"))
    check_well(measurement)
    assert (measurement.memory.torch_allocated_bytes or 0) < (
        adapter.memory.torch_allocated_bytes or 0
    )


@pytest.mark.parametrize("configuration", ["expandable_segments:True", None])
def test_expandable_segments(tmp_path: Path, configuration: str | None) -> None:
    measurement = measured(gpu_request(tmp_path), PYTORCH_CUDA_ALLOC_CONF=configuration)
    check_well(measurement)
