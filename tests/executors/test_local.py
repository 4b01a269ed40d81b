"""Real processes, ended in every known way: each end is classified, and the next candidate runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.core.errors import ProbeError, TrainingEnvironmentError
from autotune.core.measurement import Measurement, Outcome
from autotune.probe.executors.local import LocalExecutor
from tests.executors.measuring import hold, measured, phase, sleep
from tests.probe.toys import MIB, executor, gone, running, toy, tree_of

WELL = toy(phase("rollout"), hold(8))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalExecutor]:
    local_executor = executor(tmp_path)
    yield local_executor
    local_executor.close()


def pid_of(measurement: Measurement) -> int:
    return int(str(measurement.effective["pid"]))


def still_works(local_executor: LocalExecutor) -> Measurement:
    again = measured(local_executor, WELL)
    assert again.outcome is Outcome.OK
    return again


def test_the_peak_is_what_was_held_and_each_phase_has_its_own(local: LocalExecutor) -> None:
    small = still_works(local)
    large = measured(
        local,
        toy(
            phase("rollout"),
            hold(40),
            phase("backward"),
            hold(60),
        ),
    )
    assert large.memory.peak_bytes is not None
    assert small.memory.peak_bytes is not None
    grown = large.memory.peak_bytes - small.memory.peak_bytes
    assert 90 * MIB < grown < 96 * MIB  # 100 MiB held against 8
    by_phase = large.memory.phase_peak_bytes
    assert 58 * MIB < by_phase["backward"] - by_phase["rollout"] < 62 * MIB


def test_timeline_and_output_are_recorded(local: LocalExecutor) -> None:
    load = (
        hold(60),
        {"do": "say", "text": "loading"},
        sleep(0.3),
    )
    steps = (phase("rollout"), hold(10), sleep(0.3))
    backward_steps = (
        phase("backward"),
        hold(50),
        sleep(0.3),
        {"do": "say", "text": "done"},
    )
    first = measured(local, toy(*steps, *backward_steps, load=load))
    again = measured(local, toy(*steps, load=load))
    course = first.memory.timeline
    assert [moment.seconds for moment in course] == sorted(moment.seconds for moment in course)
    met = [moment.phase for moment in course if moment.phase]
    assert list(dict.fromkeys(met)) == ["load", "rollout", "backward"]
    peak = {
        name: max(moment.peak_bytes for moment in course if moment.phase == name)
        for name in ("rollout", "backward")
    }
    assert peak["backward"] - peak["rollout"] > 40 * MIB
    assert first.printed.split() == ["loading", "done"]
    assert {moment.phase for moment in again.memory.timeline} <= {
        "rollout",
        None,
    } and again.printed == ""


def test_refused_allocation_keeps_the_runner(local: LocalExecutor) -> None:
    before = still_works(local)
    failed = measured(local, toy(phase("backward"), hold(900, piece=900)))
    assert failed.outcome is Outcome.OOM_BACKWARD
    assert failed.failure is not None
    assert failed.failure.phase == "backward"
    assert failed.failure.cause == "activations"
    after = still_works(local)
    assert pid_of(after) == pid_of(before)
    assert local.loads == 1
    assert after.memory.peak_bytes == pytest.approx(before.memory.peak_bytes, abs=8 * MIB)


def test_refused_load_is_the_measurement_of_its_candidate(local: LocalExecutor) -> None:
    failed = measured(local, toy(load=(hold(400),)))
    assert failed.outcome is Outcome.OOM_LOAD
    assert failed.failure is not None
    assert failed.failure.cause == "weights"
    still_works(local)


def test_a_rank_that_exited_before_a_command_is_no_result_of_it(local: LocalExecutor) -> None:
    """The worker, which is stopped here, notices the exit together with the command."""
    rank, worker = pid_of(still_works(local)), local.worker.pid
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    go_on = threading.Timer(0.3, os.kill, (worker, signal.SIGCONT))
    go_on.start()
    assert pid_of(still_works(local)) != rank
    go_on.join()
    assert local.loads == 2


def test_cgroup_kills_what_no_allocator_refuses(local: LocalExecutor) -> None:
    worker = still_works(local) and local.worker.pid
    if not local.worker.alive or "cgroup" not in local.worker.bound_by:
        pytest.skip("no memory cgroup can be made here")
    failed = measured(
        local,
        toy(
            phase("rollout"),
            hold(10),
            phase("optimizer"),
            {"do": "share", "mib": 400},
        ),
    )
    assert failed.outcome is Outcome.OOM_OPTIMIZER
    assert failed.failure is not None
    assert "SIGKILL" in failed.failure.evidence
    assert failed.memory.peak_bytes is not None
    assert 0.9 * failed.memory.limit_bytes < failed.memory.peak_bytes <= failed.memory.limit_bytes
    still_works(local)
    assert local.worker.pid == worker  # its imports stay
    assert local.loads == 2


def test_without_a_cgroup_the_meter_kills_what_the_guard_cannot_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.probe import worker_process
    from autotune.probe.limits import Rlimit

    monkeypatch.setattr(worker_process, "best_limit", Rlimit)
    local_executor = executor(tmp_path)
    try:
        before = still_works(local_executor)
        assert before.memory.bound_by == "rlimit"
        refused = measured(local_executor, toy(phase("forward"), hold(400)))
        assert refused.outcome is Outcome.OOM_FORWARD
        assert pid_of(still_works(local_executor)) == pid_of(before)
        ended = measured(local_executor, toy(phase("sync"), {"do": "share", "mib": 2000}))
        assert ended.outcome is Outcome.OOM_SYNC
        still_works(local_executor)
        with_cgroup = 8 * MIB
        assert before.memory.peak_bytes is not None
        assert with_cgroup < before.memory.peak_bytes < 60 * MIB
    finally:
        local_executor.close()


def test_untouched_mappings_do_not_count(local: LocalExecutor) -> None:
    touched = still_works(local)
    if not touched.memory.bound_by.startswith("cgroup"):
        return  # there the guard is all there is, and it counts what is mapped
    mapped = measured(local, toy(phase("forward"), {"do": "map", "mib": 250}))
    assert mapped.outcome is Outcome.OK
    assert mapped.memory.peak_bytes == pytest.approx(touched.memory.peak_bytes, abs=16 * MIB)


def test_torch_reports_a_refused_allocation_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    local_executor = executor(tmp_path, limit_mib=700)
    try:
        first = measured(local_executor, toy(phase("forward"), {"do": "torch", "mib": 16}))
        assert first.outcome is Outcome.OK
        failed = measured(local_executor, toy(phase("forward"), {"do": "torch", "mib": 1500}))
        assert failed.outcome is Outcome.OOM_FORWARD
        assert failed.failure is not None
        assert "DefaultCPUAllocator" in failed.failure.evidence
        assert failed.failure.numbers == {"asked_bytes": 1500 * MIB}
        again = measured(local_executor, toy(phase("forward"), {"do": "torch", "mib": 300}))
        assert again.outcome is Outcome.OK
        assert pid_of(again) == pid_of(first)
    finally:
        local_executor.close()


def test_a_rank_that_keeps_its_memory_is_replaced(local: LocalExecutor) -> None:
    before = still_works(local)
    assert measured(local, toy(phase("forward"), {"do": "leak", "mib": 150})).outcome is Outcome.OK
    after = still_works(local)
    assert pid_of(after) != pid_of(before)
    assert gone(pid_of(before))
    assert after.memory.peak_bytes == pytest.approx(before.memory.peak_bytes, abs=8 * MIB)


def test_result_of_a_rank_that_exits_afterwards_is_valid(tmp_path: Path) -> None:
    """It has measured before it goes, and its peer still measures then."""
    with contextlib.closing(executor(tmp_path, ranks=2, limit_mib=512)) as two:
        measurement = measured(
            two,
            toy(
                phase("forward"),
                {"do": "leak", "mib": 150, "rank": 1},
                sleep(1, rank=0),
            ),
        )
        assert measurement.outcome is Outcome.OK, measurement.failure
        assert measured(two, toy(phase("forward"))).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("last_words", "outcome", "evidence"),
    [
        ({"do": "exit", "code": 0}, Outcome.CRASH, "exit code 0 and no result"),
        ({"do": "exit", "code": 7}, Outcome.CRASH, "exit code 7"),
        ({"do": "kill", "signal": "SIGKILL"}, Outcome.INTERRUPTED, "SIGKILL, sent from outside"),
        ({"do": "kill", "signal": "SIGTERM"}, Outcome.INTERRUPTED, "SIGTERM, sent from outside"),
        ({"do": "kill", "signal": "SIGSEGV"}, Outcome.CRASH, "SIGSEGV"),
        ({"do": "raise", "type": "SystemExit", "text": "bye"}, Outcome.CRASH, "SystemExit: bye"),
        (
            {"do": "raise", "type": "RuntimeError", "text": "something new"},
            Outcome.CRASH,
            "RuntimeError: something new",
        ),
        (
            {
                "do": "raise",
                "type": "ValueError",
                "text": "generation_batch_size (6) must be divisible by num_generations (4).",
            },
            Outcome.ILLEGAL,
            "must be divisible",
        ),
        (
            {
                "do": "raise",
                "type": "ValueError",
                "text": "No available memory for the cache blocks.",
            },
            Outcome.OOM_LOAD,
            "cache blocks",
        ),
    ],
    ids=lambda value: str(value.get("do")) if isinstance(value, dict) else "",
)
def test_every_exit_is_classified(
    local: LocalExecutor,
    last_words: dict[str, object],
    outcome: Outcome,
    evidence: str,
) -> None:
    failed = measured(local, toy(phase("score"), last_words))
    assert failed.outcome is outcome
    assert failed.failure is not None
    assert evidence in failed.failure.evidence
    assert failed.worst is None
    still_works(local)


def test_a_disturbed_machine_is_no_fault_of_the_candidate(local: LocalExecutor) -> None:
    text = (
        "Error in memory profiling. Initial free memory 39.01 GiB, current free memory 41.55 GiB."
    )
    with pytest.raises(ProbeError, match="disturbed"):
        measured(local, toy({"do": "raise", "type": "RuntimeError", "text": text}))
    still_works(local)


def test_native_out_of_memory_abort_is_recognised_by_its_output(local: LocalExecutor) -> None:
    text = "terminate called after throwing an instance of 'std::bad_alloc'"
    failed = measured(
        local,
        toy(phase("score"), {"do": "say", "text": text}, {"do": "kill", "signal": "SIGABRT"}),
    )
    assert failed.outcome is Outcome.OOM_SCORE


def test_a_hang_is_ended_at_its_deadline(local: LocalExecutor) -> None:
    still_works(local)
    worker = local.worker.pid
    started = time.monotonic()
    hung = measured(local, toy(phase("reward"), {"do": "spin"}), seconds=0.7)
    assert 0.7 <= time.monotonic() - started < 3.0
    assert hung.outcome is Outcome.TIMEOUT
    assert hung.failure is not None
    assert hung.failure.phase == "reward"
    still_works(local)
    assert local.worker.pid == worker


@pytest.mark.slow
def test_slow_and_hung_differ_at_the_deadline(local: LocalExecutor) -> None:
    still_works(local)
    slow = measured(local, toy(phase("rollout"), {"do": "write"}), seconds=4.0)
    hung = measured(local, toy(phase("rollout"), {"do": "spin"}), seconds=4.0)
    assert slow.outcome is hung.outcome is Outcome.TIMEOUT
    assert slow.failure is not None and hung.failure is not None
    assert "slow and not hung" in slow.failure.evidence and "(token " in slow.failure.evidence
    assert (
        "hung, or in one step" in hung.failure.evidence
        and "phase rollout began" in hung.failure.evidence
    )


def test_a_grandchild_of_its_own_session_does_not_outlive_its_rank(
    local: LocalExecutor, tmp_path: Path
) -> None:
    orphan, second = tmp_path / "orphan", tmp_path / "second"
    measured(local, toy({"do": "grandchild", "pid_file": str(orphan)}, {"do": "exit", "code": 1}))
    assert gone(int(orphan.read_text()))
    measured(local, toy({"do": "grandchild", "pid_file": str(second)}))
    assert running(int(second.read_text()))
    local.close()
    assert gone(int(second.read_text()))


@pytest.mark.slow
def test_much_output_is_read_and_bounded(local: LocalExecutor, tmp_path: Path) -> None:
    chatty = measured(local, toy({"do": "print", "mib": 256}), seconds=120.0)
    assert chatty.outcome is Outcome.OK
    assert sum(file.stat().st_size for file in tmp_path.rglob("log*")) < 3 * MIB


def test_malformed_lines_are_skipped(local: LocalExecutor) -> None:
    garbled = measured(
        local,
        toy(phase("forward"), {"do": "garble"}, sleep(0.05)),
        seconds=3.0,
    )
    assert garbled.outcome is Outcome.OK
    assert garbled.worst is not None


def test_rank_killed_between_candidates_is_replaced(local: LocalExecutor) -> None:
    os.kill(pid_of(still_works(local)), signal.SIGKILL)
    time.sleep(0.2)
    still_works(local)
    assert local.loads == 2


def test_killed_worker_is_a_fault_and_its_ranks_exit(local: LocalExecutor, tmp_path: Path) -> None:
    still_works(local)
    orphan = tmp_path / "orphan"
    worker = local.worker.pid
    assert worker is not None
    tree: list[int] = []

    def kill() -> None:
        while not orphan.exists() or not orphan.read_text():
            time.sleep(0.01)
        tree.extend([*tree_of(worker), int(orphan.read_text())])
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ProbeError, match="worker process exited"):
        measured(
            local,
            toy({"do": "grandchild", "pid_file": str(orphan)}, sleep(30)),
        )
    killer.join()
    assert len(tree) >= 3
    assert gone(*tree)
    still_works(local)


def test_two_ranks_are_measured_as_one(tmp_path: Path) -> None:
    local_executor = executor(tmp_path, ranks=2)
    try:
        script = (
            phase("rollout"),
            hold(20),
            {"do": "meet"},
            sleep(0.2, rank=1),
        )
        measurement = measured(local_executor, toy(*script))
        assert measurement.outcome is Outcome.OK
        assert measurement.worst is not None
        assert measurement.worst.cycle_loss_tokens == (200, 200)
        assert all(seconds >= 0.2 for seconds in measurement.worst.cycle_seconds)
        assert measurement.memory.phase_peak_bytes["rollout"] > 40 * MIB
        assert measurement.effective["rank"] == "0"
    finally:
        local_executor.close()


def test_wrong_world_size_is_a_fault(tmp_path: Path) -> None:
    local_executor = executor(tmp_path, ranks=2)
    try:
        with pytest.raises(ProbeError, match="world size"):
            measured(local_executor, toy(world_size=1))
    finally:
        local_executor.close()


def test_one_rank_out_of_memory_ends_both_at_once(tmp_path: Path) -> None:
    local_executor = executor(tmp_path, ranks=2)
    try:
        for too_much in ("hold", "share"):
            started = time.monotonic()
            failed = measured(
                local_executor,
                toy(phase("backward"), {"do": "peer"}, {"do": too_much, "mib": 400, "rank": 1}),
            )
            assert failed.outcome is Outcome.OOM_BACKWARD, too_much
            assert failed.failure is not None
            assert failed.failure.rank == 1
            assert time.monotonic() - started < 5.0
        assert local_executor.worker.pid is not None
        assert tree_of(local_executor.worker.pid) == [local_executor.worker.pid]
        still_works(local_executor)
    finally:
        local_executor.close()


def test_thirty_runners_leave_no_open_file(tmp_path: Path) -> None:
    local_executor = executor(tmp_path)
    counts: set[int] = set()
    for turn in range(30):
        assert measured(local_executor, toy(load=(hold(turn % 3),))).outcome is Outcome.OK
        if turn % 10 == 9:
            local_executor.close()
            counts.add(len(list(Path("/proc/self/fd").iterdir())))
    assert len(counts) == 1
    assert local_executor.loads == 30


def test_bad_interpreter_is_an_environment_error(tmp_path: Path) -> None:
    for python, expected in (
        (tmp_path / "nothing", "cannot be started"),
        (Path("/bin/true"), "did not start the worker"),
    ):
        local_executor = executor(tmp_path, python=python)
        with pytest.raises(TrainingEnvironmentError, match=expected):
            local_executor.prepare()
        local_executor.close()


def test_unsupported_framework_is_reported_with_a_command(tmp_path: Path) -> None:
    for package, span, expected in (
        (
            "no-such-framework",
            ("1.0", "2"),
            r"has no no-such-framework.*pip install 'no-such-framework>=1.0,<2'",
        ),
        ("pytest", ("0.1", "0.2"), r"has pytest \d.*supports pytest from 0.1 to below 0.2"),
    ):
        local_executor = executor(tmp_path, supported={package: span})
        with pytest.raises(TrainingEnvironmentError, match=expected):
            local_executor.prepare()
        local_executor.close()


def test_import_error_of_a_framework_is_quoted(tmp_path: Path) -> None:
    local_executor = executor(
        tmp_path, hint={"warm_fails": True}, supported={"pytest": ("1", "99")}
    )
    try:
        with pytest.raises(
            TrainingEnvironmentError,
            match=r"No module named 'framework'.*pip install framework ",
        ):
            measured(local_executor, WELL)
    finally:
        local_executor.close()


def test_a_limit_below_the_imports_themselves_is_an_out_of_memory_load(tmp_path: Path) -> None:
    local_executor = executor(tmp_path, limit_mib=12)
    try:
        assert measured(local_executor, toy(load=(hold(50),))).outcome is Outcome.OOM_LOAD
    finally:
        local_executor.close()


def test_nothing_is_left_behind(local: LocalExecutor, tmp_path: Path) -> None:
    inside = still_works(local)
    assert str(inside.effective["tmp"]).startswith(str(tmp_path))
    worker = local.worker.pid
    assert worker is not None
    tree = tree_of(worker)
    limit = local.worker.limit
    local.close()
    assert gone(*tree)
    assert list(tmp_path.iterdir()) == []
    group = getattr(limit, "_group", None)
    assert group is None or not group.path.exists()
