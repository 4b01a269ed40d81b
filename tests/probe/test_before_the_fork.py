"""Imports that initialise CUDA: prevented where the question has an answer, and no rank is
forked where it happened.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.measurement import Measurement, Outcome
from autotune.worker import cuda_before_fork
from tests.gpu.runners import check_well, gpu_request, measured
from tests.probe.toys import executor, plan, toy


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "fork_shy_driver.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source],
        check=True,
    )
    return str(library)


def probes(
    tmp_path: Path,
    driver: str,
    hint: dict[str, Any],
    times: int = 1,
    ranks: int = 1,
) -> list[Measurement]:
    """Measure a candidate several times; each rank uses the driver."""
    probe_executor = executor(tmp_path, hint=hint, ranks=ranks)
    candidate = toy({"do": "driver", "path": driver}, load=({"do": "driver", "path": driver},))
    try:
        return [probe_executor.open(candidate).measure(candidate, plan()) for _ in range(times)]
    finally:
        probe_executor.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_work_after_imports_that_initialise_the_driver(
    tmp_path: Path,
    driver: str,
    ranks: int,
) -> None:
    measurements = probes(tmp_path, driver, {"driver": driver}, times=2, ranks=ranks)
    assert [measurement.outcome for measurement in measurements] == [Outcome.OK, Outcome.OK], (
        measurements[0].failure
    )
    assert all(
        "CUDA's driver was initialised" in measurement.caveats[-1] for measurement in measurements
    )
    assert measurements[0].effective["pid"] == measurements[1].effective["pid"], (
        "started afresh for every load, not for every probe"
    )


def test_ranks_are_forked_after_imports_without_the_driver(tmp_path: Path, driver: str) -> None:
    (measurement,) = probes(tmp_path, driver, {})
    assert measurement.outcome is Outcome.OK, measurement.failure
    assert measurement.caveats == ()


def test_cpu_rank_is_forked_regardless_of_cuda(tmp_path: Path, driver: str) -> None:
    probe_executor = executor(tmp_path, hint={"driver": driver, "device": "cpu"})
    try:
        measurement = probe_executor.open(toy()).measure(toy(), plan())
    finally:
        probe_executor.close()
    assert (measurement.outcome, measurement.caveats) == (Outcome.OK, ())


class _Cuda:
    """Stand-in for torch with CUDA as imports query it; records the process that reached the
    device.
    """

    def __init__(self, capability: Callable[[], tuple[int, int]]) -> None:
        self.reached = 0
        self._capability = capability
        self._C = SimpleNamespace(_cuda_getDeviceCount=self._count)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: bool(self.reached),
            get_device_properties=self._properties,
            current_device=lambda: 0,
            _utils=SimpleNamespace(
                _get_device_index=lambda device, optional: 0 if device is None else device
            ),
        )

    def _count(self) -> int:
        self.reached = os.getpid()
        return 2

    def _properties(self, index: int) -> SimpleNamespace:
        self.reached = os.getpid()
        assert self._C._cuda_getDeviceCount() == 2  # the real one queries it too
        major, minor = self._capability()
        return SimpleNamespace(
            major=major,
            minor=minor,
            total_memory=(index + 1) * 2**30,
            name=f"card {index}",
        )


def test_queries_of_imports_are_answered_without_the_device() -> None:
    torch = _Cuda(lambda: (9, 0))
    count, properties = torch._C._cuda_getDeviceCount, torch.cuda.get_device_properties
    with cuda_before_fork.query_in_child_process(torch):
        original = torch.cuda.get_device_properties
        assert torch._C._cuda_getDeviceCount() == 2
        properties_queried = [original(index) for index in (0, 1, None)]
        with pytest.raises(AssertionError, match="Invalid device id"):
            original(2)
    assert [(card.major, card.name, card.total_memory) for card in properties_queried[:2]] == [
        (9, "card 0", 2**30),
        (9, "card 1", 2**31),
    ]
    assert properties_queried[2].name == "card 0"
    assert torch.reached == 0
    assert (torch._C._cuda_getDeviceCount, torch.cuda.get_device_properties) == (count, properties)
    assert original(1).name == "card 1" and torch.reached == os.getpid(), (
        "a reference queries the device after imports"
    )


def test_query_goes_to_cuda_if_the_child_fails() -> None:
    launcher = os.getpid()

    def capability() -> tuple[int, int]:
        if os.getpid() != launcher:
            os._exit(1)
        return 8, 0

    torch = _Cuda(capability)
    with cuda_before_fork.query_in_child_process(torch):
        assert torch.cuda.get_device_properties(0).major == 8
    assert torch.reached == launcher


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_bitsandbytes_installed_ranks_are_forked_and_have_its_cuda_kernels(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    for tuning in ("lora", "qlora"):
        measurement = measured(gpu_request(tmp_path / tuning, tuning=tuning))
        check_well(measurement)
        assert not any("each load" in caveat for caveat in measurement.caveats), measurement.caveats
