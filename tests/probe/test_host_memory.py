from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.errors import ProbeError
from autotune.core.job import DeviceKind
from autotune.machine.host_memory import HostMemory, own_counters
from autotune.probe.command_reply import CommandReply
from autotune.probe.limits import CgroupV1
from autotune.probe.root_failure import KernelReport, failure_of

MIB = 2**20


def test_both_cgroup_versions_count_kills(tmp_path: Path) -> None:
    v1, v2, neither = (
        tmp_path / "memory.oom_control",
        tmp_path / "memory.events",
        tmp_path / "absent",
    )
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    v2.write_text("low 0\nhigh 0\nmax 17\noom 4\noom_kill 2\noom_group_kill 0\n")
    assert HostMemory((v1,), 1).kills() == 3
    assert HostMemory((v2,), 1).kills() == 2
    assert HostMemory((v1, v2), 1).kills() == 3
    machine = next(
        line
        for line in Path("/proc/vmstat").read_text().splitlines()
        if line.startswith("oom_kill ")
    )
    assert HostMemory((neither,), 1).kills() >= int(machine.split()[1])


def test_exhausted_memory_differs_from_little_memory() -> None:
    host = HostMemory((), 1000 * MIB)
    assert host.was_short(985 * MIB)
    assert not host.was_short(900 * MIB)


def test_used_memory_is_within_the_total() -> None:
    host = HostMemory()
    assert 0 < host.used_bytes() < host.total_bytes
    assert all(file.exists() for file in own_counters())


DRIVER = (Path(__file__).parent / "programs/host_driver.py.txt").read_text()


def test_rank_killed_by_the_kernel_on_a_gpu_probe_is_host_memory(tmp_path: Path) -> None:
    try:
        group = CgroupV1(300 * MIB)
    except (OSError, ProbeError):
        pytest.skip("no control group of v1 can be made here")
    try:
        command = (
            f'echo $$ > {group.path}/cgroup.procs && exec {sys.executable} -c "$CODE" {tmp_path}'
        )
        root = str(Path(__file__).parents[2])
        run = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=root,
            env={"CODE": DRIVER, "PATH": "/bin:/usr/bin"},
        )
        assert run.returncode == 0, run.stderr
        outcome, cause, evidence, phase = json.loads(run.stdout)
    finally:
        group.kill_all()
        group.close()
    assert (outcome, cause, phase) == ("oom_host", "host_ram", "backward")
    assert "SIGKILL" in evidence and "machine ran out of memory" in evidence


@pytest.mark.parametrize(("device", "outcome"), [("cuda", "oom_host"), ("cpu", "oom_backward")])
def test_peer_error_after_a_kernel_kill_counts_as_out_of_memory(
    device: DeviceKind, outcome: str
) -> None:
    complaint = {
        "type": "RuntimeError",
        "text": (
            "[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2345"
        ),
    }
    answer = CommandReply(
        failures=[{"event": "failed", "rank": 0, "phase": "backward", "error": complaint}]
    )
    kernel = KernelReport(
        out_of_memory=True,
        own_limit=device == "cpu",
        full=False,
    )
    assert failure_of(answer, kernel, device, 1.0)[0] == outcome


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_machine_that_others_filled_is_no_verdict(device: DeviceKind) -> None:
    answer = CommandReply(
        failures=[{"event": "lost", "rank": 0, "signal": 9, "exit": None, "phase": "rollout"}]
    )
    report_of_others = KernelReport(
        out_of_memory=True,
        own_limit=False,
        full=False,
        mostly_own=False,
    )
    outcome, failure = failure_of(answer, report_of_others, device, 1.0)
    assert (
        outcome == "interrupted"
        and failure.from_outside
        and "used up by others" in failure.evidence
    )
    own_report = KernelReport(
        out_of_memory=True,
        own_limit=False,
        full=False,
    )
    assert failure_of(answer, own_report, device, 1.0)[0] == "oom_host"


def test_a_message_about_a_killed_process_needs_the_kernels_counter() -> None:
    text = "[2026-11-23] Signal 9 (SIGKILL) received by PID 7"
    failed = {
        "event": "failed",
        "rank": 0,
        "phase": "forward",
        "error": {"type": "RuntimeError", "text": text},
    }
    answer = CommandReply(failures=[failed])
    unseen = KernelReport(
        out_of_memory=False,
        own_limit=False,
        full=False,
    )
    outcome, failure = failure_of(answer, unseen, "cuda", 1.0)
    assert outcome == "interrupted" and failure.from_outside and "Signal 9" in failure.evidence
    assert (
        failure_of(
            answer,
            KernelReport(
                out_of_memory=True,
                own_limit=False,
                full=False,
            ),
            "cuda",
            1.0,
        )[0]
        == "oom_host"
    )


def test_an_end_from_outside_comes_before_what_its_peers_report() -> None:
    peer = {"type": "RuntimeError", "text": "something new"}
    answer = CommandReply(
        failures=[
            {"event": "failed", "rank": 1, "phase": "rollout", "error": peer},
            {"event": "lost", "rank": 0, "signal": 15, "exit": None, "phase": "rollout"},
        ]
    )
    unseen = KernelReport(
        out_of_memory=False,
        own_limit=False,
        full=False,
    )
    assert failure_of(answer, unseen, "cuda", 1.0)[0] == "interrupted"


@pytest.mark.parametrize(("short", "outcome"), [(True, "oom_host"), (False, "interrupted")])
def test_kill_by_an_oom_daemon_is_recognised_by_short_memory(short: bool, outcome: str) -> None:
    answer = CommandReply(
        failures=[{"event": "lost", "rank": 0, "signal": 9, "exit": None, "phase": "rollout"}]
    )
    kernel = KernelReport(
        out_of_memory=False,
        own_limit=False,
        full=False,
        host_short=short,
    )
    assert failure_of(answer, kernel, "cuda", 1.0)[0] == outcome
