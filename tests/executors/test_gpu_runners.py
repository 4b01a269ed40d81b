"""Rigs on GPUs that a recording plays: real keepers, ranks and ballasts; only the driver's
answers are not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from autotune.core.errors import ProbeError
from autotune.core.measurement import Measurement, Outcome, judge
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.gpu_set import Gpus
from autotune.worker.processes import descendants
from tests.executors.measuring import hold, measured, phase, sleep
from tests.probe.ballasts import SmallCards
from tests.probe.nvml_playback import Playback
from tests.probe.toys import executor, gone, plan, toy

MIB = 2**20
IDLE_MIB = 4
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of"
    " which 1.00 GiB is free. Process 4242 has 21.00 GiB memory in use. Including non-PyTorch"
    " memory, this process has 17.00 GiB memory in use. Of the allocated memory 16.00 GiB is"
    " allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
)


@contextmanager
def runner(
    tmp_path: Path,
    library: Playback,
    *,
    limit_mib: int = 40960,
    cards: SmallCards | None = None,
    ranks: int = 1,
) -> Iterator[LocalExecutor]:
    def open_gpus() -> Gpus:
        make = {} if cards is None else {"make_ballast": cards}
        return Gpus(
            ranks,
            limit_mib * MIB,
            Path(sys.executable),
            library=library,
            variable=None,
            patience_seconds=0.5,
            **make,
        )

    running = executor(
        tmp_path,
        ranks=ranks,
        limit_mib=limit_mib,
        device_kind="cuda",
        open_gpus=open_gpus,
    )
    try:
        yield running
    finally:
        running.close()


@contextmanager
def meanwhile(act: Callable[[int], None], running: LocalExecutor) -> Iterator[None]:
    """Run `act` with the process id of a rank as soon as there is one."""

    def watch() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pid = running.worker.pid
            ranks = descendants(pid) if pid is not None else []
            if ranks:
                act(ranks[0])
                return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def steps(seconds: float = 0.8) -> tuple[dict[str, object], ...]:
    return (phase("backward"), sleep(seconds))


def test_measurement_contains_every_gpu(tmp_path: Path) -> None:
    library = Playback("two_a100")

    def use(rank: int) -> None:
        library.put(0, 3080 + 9000, [{"pid": 9004711, "mib": 3072}, {"pid": rank, "mib": 8900}])

    with runner(tmp_path, library, ranks=2) as running:
        with meanwhile(use, running):
            measurement = measured(running, toy(*steps()))
        pids = [running.worker.pid]
    memory = measurement.memory
    first, second = memory.devices
    assert measurement.outcome is Outcome.OK
    assert (first.peak_bytes, first.processes_peak_bytes, first.measured_by) == (
        9000 * MIB,
        8900 * MIB,
        "nvml-processes",
    )
    assert memory.peak_bytes == memory.phase_peak_bytes["backward"] == 9000 * MIB
    assert first.others_bytes == 3080 * MIB and "pid 9004711" in first.others[0]
    assert second.measured_by == "nvml-device" and second.why is not None
    assert memory.limit_bytes == (40960 - 3080) * MIB
    assert memory.bound_by == "device"
    assert any("others hold memory" in caveat for caveat in measurement.caveats)
    assert measurement.cost.device_seconds == pytest.approx(2 * measurement.cost.total_seconds)
    assert judge(measurement).margin_bytes == (40960 - 3080 - 9000) * MIB
    assert (
        msgspec.convert(msgspec.to_builtins(measurement, str_keys=True), Measurement) == measurement
    )
    assert gone(*(pid for pid in pids if pid is not None))


def test_ballast_enforces_the_limit_and_is_no_cause(tmp_path: Path) -> None:
    cards, library = SmallCards(64), Playback("newcomer")
    failing = toy(phase("backward"), {"do": "raise", "type": "RuntimeError", "text": OOM})
    with runner(tmp_path, library, limit_mib=640, cards=cards) as running:
        measurement = measured(running, failing)
        assert measurement.outcome is Outcome.OOM_BACKWARD
        assert measurement.failure is not None and measurement.failure.cause == "activations"
        assert "Process 4242" not in measurement.failure.evidence
        assert measurement.memory.bound_by == "ballast"
        assert measurement.memory.devices[0].ballast_bytes == 24 * MIB
        assert any("speeds are this GPU's" in caveat for caveat in measurement.caveats)
        again = measured(running, toy())
        assert again.outcome is Outcome.OK and len(cards.made) == 1
    assert gone(cards.made[0].pid)


def test_ballast_that_exits_during_a_probe_voids_it(tmp_path: Path) -> None:
    cards = SmallCards(64)
    candidate = toy(*steps())
    with runner(tmp_path, Playback("newcomer"), limit_mib=640, cards=cards) as running:
        with (
            meanwhile(lambda rank: os.kill(cards.made[0].pid, signal.SIGKILL), running),
            pytest.raises(ProbeError, match="is void"),
        ):
            measured(running, candidate)
        assert measured(running, candidate).outcome is Outcome.OK
        assert len(cards.made) == 2


def test_out_of_memory_caused_by_a_newcomer_is_a_fault(tmp_path: Path) -> None:
    library = Playback("newcomer")
    failing = toy(*steps(), {"do": "raise", "type": "RuntimeError", "text": OOM})

    def come(rank: int) -> None:
        library.put(
            0, IDLE_MIB + 30720, [{"pid": rank, "mib": 10240}, {"pid": 9008080, "mib": 20480}]
        )

    with runner(tmp_path, library) as running:
        with (
            meanwhile(come, running),
            pytest.raises(ProbeError, match=r"GPU 0 was taken by others.*pid 9008080\): 20 GiB"),
        ):
            measured(running, failing)
        library.at(0)
        assert measured(running, toy()).outcome is Outcome.OK


def test_memory_left_on_a_gpu_is_reported_before_the_next_load(tmp_path: Path) -> None:
    library = Playback("newcomer")
    first, second = toy(), toy(load=(hold(1),))
    with runner(tmp_path, library) as running:
        measured(running, first)
        library.at(3)
        with pytest.raises(ProbeError, match=r"not as empty as it was.*pid 9008080"):
            measured(running, second)


def test_a_gpu_that_is_lost_is_no_failure_of_the_candidate(tmp_path: Path) -> None:
    library, candidate = Playback("lost"), toy(*steps())
    with (  # noqa: SIM117
        runner(tmp_path, library) as running,
        meanwhile(lambda rank: library.at(1), running),
    ):
        with pytest.raises(ProbeError, match="stopped answering"):
            measured(running, candidate)


def test_without_nvml_figures_of_the_ranks_carry_a_caveat(tmp_path: Path) -> None:
    cards = SmallCards(1024)
    with runner(tmp_path, Playback("library_not_found"), limit_mib=1024, cards=cards) as running:
        measurement = running.open(toy()).measure(toy(phase("forward"), hold(4)), plan())
    (device,) = measurement.memory.devices
    assert (device.measured_by, device.uuid, device.others_bytes) == ("torch", None, None)
    assert device.why == "NVML: NVML Shared Library Not Found"
    assert measurement.memory.peak_bytes is not None
    assert any("NVML was not in use" in caveat for caveat in measurement.caveats)


def test_rank_killed_with_free_host_memory_is_no_out_of_memory(tmp_path: Path) -> None:
    candidate = toy(phase("rollout"), {"do": "kill", "signal": "SIGKILL"})
    with runner(tmp_path, Playback("newcomer")) as running:
        measurement = measured(running, candidate)
    assert measurement.ended_from_outside
    assert (
        measurement.failure is not None
        and "sent from outside the probe" in measurement.failure.evidence
    )
