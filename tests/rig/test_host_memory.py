from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import RigError
from autotune.hardware import DeviceKind
from autotune.rig import cgroups
from autotune.rig.assemble import Kernel, failure_of
from autotune.rig.conversation import Answer
from autotune.rig.host_memory import HostMemory, own_counters

MIB = 2**20


def test_both_versions_of_control_groups_count_under_one_word(tmp_path: Path) -> None:
    v1, v2, neither = tmp_path / "memory.oom_control", tmp_path / "memory.events", tmp_path / "absent"
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    v2.write_text("low 0\nhigh 0\nmax 17\noom 4\noom_kill 2\noom_group_kill 0\n")
    assert HostMemory((v1,), 1).kills() == 3
    assert HostMemory((v2,), 1).kills() == 2
    assert HostMemory((v1, v2), 1).kills() == 3
    machine = next(line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill "))
    assert HostMemory((neither,), 1).kills() >= int(machine.split()[1])


def test_next_to_none_left_is_told_from_little() -> None:
    host = HostMemory((), 1000 * MIB)
    assert host.was_short(985 * MIB)
    assert not host.was_short(900 * MIB)


def test_what_is_used_lies_within_what_there_is() -> None:
    host = HostMemory()
    assert 0 < host.used_bytes() < host.total_bytes
    assert all(file.exists() for file in own_counters())


DRIVER = """
import json, os, sys
from pathlib import Path
from autotune.rig.gpus import Gpus
from tests.rig import toys
from tests.rig.nvml_playback import Playback

open_gpus = lambda: Gpus(1, 40960 * toys.MIB, Path(sys.executable), library=Playback("newcomer"), variable="0")
executor = toys.executor(Path(sys.argv[1]), device_kind="cuda", open_gpus=open_gpus)
candidate = toys.toy({"do": "phase", "name": "backward"}, {"do": "hold", "mib": 600})
found = executor.open(candidate).measure(candidate, toys.plan())
executor.close()
print(json.dumps([found.outcome, found.failure.cause, found.failure.evidence, found.failure.phase]))
"""


def test_a_rank_that_the_kernel_ends_on_a_gpu_rig_is_the_hosts_want_of_memory(tmp_path: Path) -> None:
    try:
        group = cgroups.Group(cgroups.v1_home())
    except (OSError, RigError):
        pytest.skip("no control group of v1 can be made here")
    try:
        group.write("memory.limit_in_bytes", 300 * MIB)
        command = f'echo $$ > {group.path}/cgroup.procs && exec {sys.executable} -c "$CODE" {tmp_path}'
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
        group.remove()
    assert (outcome, cause, phase) == ("oom_host", "host_ram", "backward")
    assert "SIGKILL" in evidence and "machine ran out of memory" in evidence


@pytest.mark.parametrize(("device", "outcome"), [("cuda", "oom_host"), ("cpu", "oom_backward")])
def test_a_peers_complaint_after_a_kill_by_the_kernel_is_memory_of_whoever_the_kernel_counts(
    device: DeviceKind, outcome: str
) -> None:
    complaint = {
        "type": "RuntimeError",
        "text": "[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2345",
    }
    answer = Answer(failures=[{"event": "failed", "rank": 0, "phase": "backward", "error": complaint}])
    kernel = Kernel(out_of_memory=True, own_limit=device == "cpu", full=False)
    assert failure_of(answer, kernel, device, 1.0)[0] == outcome


@pytest.mark.parametrize(("short", "outcome"), [(True, "oom_host"), (False, "crash")])
def test_a_daemon_that_watches_memory_is_known_by_the_want_of_it(short: bool, outcome: str) -> None:
    answer = Answer(failures=[{"event": "lost", "rank": 0, "signal": 9, "exit": None, "phase": "rollout"}])
    kernel = Kernel(out_of_memory=False, own_limit=False, full=False, host_short=short)
    assert failure_of(answer, kernel, "cuda", 1.0)[0] == outcome
