"""Unit tests of the parts of a worker: wire, guard, limits, meter, log and its secrets, folder,
environment.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.machine import host_memory
from autotune.machine.host_memory import place_of
from autotune.probe.assembly import merge_speeds
from autotune.probe.limits import CgroupV1, Rlimit, best_limit
from autotune.probe.message_validation import RankSpeed
from autotune.probe.output_log import MAX_LOG_BYTES, OutputLog
from autotune.probe.process_meter import ProcessMeter, TreeMemory
from autotune.probe.spawn import WorkFolder, environment, marked
from autotune.worker.process_memory import Guard, give_back, own_bytes
from autotune.worker.protocol import Wire

MIB = 2**20


def test_half_a_line_loses_only_itself() -> None:
    near_end, right = socket.socketpair()
    speaker, listener = Wire(near_end), Wire(right)
    near_end.sendall(b'{"event": "ha')
    speaker.send({"event": "whole"})
    near_end.sendall(b"[1]\n\n" + b"[" * 50_000 + b"\n")
    assert listener.take(1) + listener.take_rest() == [{"event": "whole"}]
    assert listener.broken_lines == 3
    speaker.close()
    assert listener.take(1) == []
    assert listener.closed
    assert not listener.send({})


def test_the_guard_refuses_and_lifts() -> None:
    give_back()
    with Guard(64 * MIB), pytest.raises(MemoryError):
        bytearray(128 * MIB)
    assert len(bytearray(128 * MIB)) == 128 * MIB
    with Guard(None):
        assert len(bytearray(128 * MIB)) == 128 * MIB
    before = own_bytes()
    block = b"x" * (32 * MIB)
    assert own_bytes() - before == pytest.approx(len(block), rel=0.02)


def hog(mebibytes: int) -> subprocess.Popen[bytes]:
    hold = f"held = b'x' * ({mebibytes} << 20)"
    code = (
        f"import sys; sys.stdin.read(1); {hold}; sys.stdout.write('.'); sys.stdout.flush();"
        " sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_cgroup_counts_kills_and_is_removed() -> None:
    limit = best_limit(64 * MIB)
    if not isinstance(limit, CgroupV1):
        limit.close()
        pytest.skip(f"the limit here is {limit.name}")
    with hog(30) as small, hog(200) as large:
        assert small.stdin and small.stdout and large.stdin
        for process in (small, large):
            limit.enter(process.pid)
        limit.reset()
        small.stdin.write(b".\n")
        small.stdin.flush()
        small.stdout.read(1)
        used = limit.usage_bytes()
        assert used is not None
        assert (
            29 * MIB <= used <= 48 * MIB
        )  # the kernel counts in batches; the interpreter may be in it
        assert not limit.at_limit()
        large.stdin.write(b".\n")
        large.stdin.flush()
        assert large.wait(timeout=10) == -signal.SIGKILL
        assert limit.oom_kills() >= 1  # the kernel may count one victim twice
        assert limit.at_limit()
        ceiling = limit.ceiling_bytes()
        assert ceiling is not None
        assert 56 * MIB <= ceiling <= 64 * MIB
        limit.kill_all()
        assert small.wait(timeout=5) == -signal.SIGKILL
    path = limit.path
    limit.close()
    limit.close()
    assert not path.exists()


def test_without_a_cgroup_the_limit_is_an_rlimit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_memory, "v1_home", lambda: tmp_path / "absent")
    monkeypatch.setattr(host_memory, "v2_home", lambda: tmp_path / "absent")
    limit = best_limit(64 * MIB)
    assert isinstance(limit, Rlimit)
    assert limit.name == "rlimit"


def test_cgroups_of_a_container_are_found() -> None:
    root_mount = "36 32 0:33 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
    part = "36 32 0:33 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    unified = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
    assert place_of(root_mount, "/user/one", "cgroup", "memory") == Path(
        "/sys/fs/cgroup/memory/user/one"
    )
    assert place_of(part, "/docker/abc/x", "cgroup", "memory") == Path("/sys/fs/cgroup/memory/x")
    assert place_of(part, "/docker/abc", "cgroup", "memory") == Path("/sys/fs/cgroup/memory")
    assert place_of(unified, "/user.slice", "cgroup2", None) == Path("/sys/fs/cgroup/user.slice")


def test_a_page_shared_with_a_fork_is_counted_once() -> None:
    shared = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared.write(b"x" * len(shared))
    give_back()
    before_fork = TreeMemory(os.getpid()).exact()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.05)
        assert TreeMemory(os.getpid()).exact() == pytest.approx(before_fork, abs=8 * MIB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_meter_keeps_peaks_by_phase_and_acts_when_the_limit_is_crossed() -> None:
    figure, acted = [10], []
    meter = ProcessMeter(
        lambda: figure[0],
        limit_bytes=100,
        over=lambda: not acted.append(1),
        interval_seconds=0.001,
    )
    try:
        meter.enter("rollout")
        figure[0] = 50
        meter.now()
        meter.enter("backward")
        figure[0] = 20
        meter.now()
        assert meter.phase_peak_bytes == {"rollout": 50, "backward": 20} or meter.phase_peak_bytes[
            "backward"
        ] in (20, 50)
        assert meter.peak_bytes == 50
        assert not meter.went_over
        figure[0] = 101
        deadline = time.monotonic() + 2
        while not meter.went_over and time.monotonic() < deadline:
            time.sleep(0.001)
        assert acted
        figure[0] = 5
        meter.mark()
        assert meter.now() == 5
        assert meter.peak_bytes in (5, 101)
    finally:
        meter.close()


def test_log_is_bounded_and_its_tail_is_available(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path)
    log = OutputLog(folder.log, folder.older_log)
    writer = subprocess.Popen(
        ["/bin/sh", "-c", "head -c 5000000 /dev/zero; echo; echo last words"], stdout=log.write_end
    )
    mark = log.mark()
    log.start()
    writer.wait()
    log.settle()
    assert log.since(mark).endswith("last words\n")
    assert log.since(log.mark()) == ""
    log.close()
    assert folder.log.stat().st_size <= MAX_LOG_BYTES + 2**17
    folder.close()
    assert not folder.path.exists()


def test_folder_is_removed_only_without_an_owner(tmp_path: Path) -> None:
    own_folder = WorkFolder(tmp_path)
    code = "import os; from pathlib import Path; from autotune.probe.spawn import WorkFolder; "
    code += f"WorkFolder(Path({str(tmp_path)!r})); os._exit(0)"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert len(list(tmp_path.iterdir())) == 2
    assert own_folder.scratch.is_dir()
    second_folder = WorkFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own_folder.path, second_folder.path])
    own_folder.close()
    second_folder.close()


def test_environment_of_a_probe_lacks_launcher_variables(tmp_path: Path) -> None:
    launcher_variables = {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "3",
        "RANK": "1",
        "RANKING": "x",
        "TORCHELASTIC_RUN_ID": "x",
    }
    probe_variables = environment(launcher_variables, tmp_path, "m")
    remaining = {name: probe_variables.get(name) for name in launcher_variables}
    assert remaining == {**launcher_variables, "RANK": None, "TORCHELASTIC_RUN_ID": None}
    assert probe_variables["TMPDIR"] == str(tmp_path)
    assert probe_variables["WANDB_MODE"] == "disabled"


def test_started_processes_are_found_by_their_mark(tmp_path: Path) -> None:
    with subprocess.Popen(
        ["/bin/sleep", "30"], env=environment({}, tmp_path, "abc123"), start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + 2
            while marked("abc123") != [process.pid] and time.monotonic() < deadline:
                time.sleep(0.01)
            assert marked("abc123") == [process.pid]
            assert marked("abc12") == []
        finally:
            process.kill()


def test_ranks_are_merged_by_the_slowest_of_each_cycle() -> None:
    def rank(seconds: tuple[float, float], rollout: float) -> RankSpeed:
        return RankSpeed(
            completion_tokens=8,
            cycle_seconds=list(seconds),
            cycle_loss_tokens=[10, 10],
            prompt_tokens=8,
            phase_seconds={"rollout": rollout, "other": 0.0},
            user_reward_seconds=0.1,
        )

    merged = merge_speeds([rank((1.0, 2.0), 3.0), rank((1.5, 1.0), 2.5)])
    assert merged is not None
    assert merged.cycle_seconds == (1.5, 2.0)
    assert merged.cycle_loss_tokens == (20, 20)
    assert merged.prompt_tokens == 16
    assert merged.phase_seconds == {"rollout": 3.0, "other": 0.5}
    assert merge_speeds([]) is None


KEY = "0123456789abcdef-very-secret"


def printed(tmp_path: Path, *pieces: bytes) -> tuple[str, bytes]:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {"WANDB_API_KEY": KEY})
    end = os.dup(log.write_end)
    log.start()
    for piece in pieces:
        os.write(end, piece)
        time.sleep(0.02)
    while_open = log.since(0)
    os.close(end)
    log.close()
    assert KEY not in while_open
    return log.since(0), (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("cut", [1, 5, len(KEY) - 1, len(KEY)])
def test_a_secret_that_comes_in_two_pieces(tmp_path: Path, cut: int) -> None:
    text, logged = printed(tmp_path, f"key is {KEY[:cut]}".encode(), f"{KEY[cut:]}, yes\n".encode())
    assert text == "key is ***, yes\n" and logged == text.encode()


def test_last_line_without_line_feed_is_written(tmp_path: Path) -> None:
    assert printed(tmp_path, f"dying with {KEY}".encode())[1] == b"dying with ***"


def test_long_line_without_gaps_is_written(tmp_path: Path) -> None:
    text, logged = printed(tmp_path, b"x" * 60000, KEY.encode(), b"y" * 60000)
    assert logged == b"x" * 60000 + b"***" + b"y" * 60000
    assert text.endswith("yyy")


def test_undecodable_bytes_are_unchanged(tmp_path: Path) -> None:
    assert printed(tmp_path, b"\xff\xfe\x00 ok\n")[1] == b"\xff\xfe\x00 ok\n"


def test_since_returns_the_output_after_a_mark(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {})
    end = os.dup(log.write_end)
    log.start()
    os.write(end, b"before")
    log.settle()
    time.sleep(0.05)
    mark = log.mark()
    os.write(end, b"after\n")
    os.close(end)
    log.close()
    assert log.since(mark) == "after\n"


def test_a_private_key_that_comes_line_by_line(tmp_path: Path) -> None:
    lines = [
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
        b"b3BlbnNzaC1rZXktdjEAAAAA\n",
        b"AAtzc2gtZW\n",
        b"-----END OPENSSH PRIVATE KEY-----\n",
    ]
    assert printed(tmp_path, b"before\n", *lines, b"after\n") == (
        "before\n***\nafter\n",
        b"before\n***\nafter\n",
    )


def test_a_password_with_other_letters(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {"DB_PASS": "pässwörter"})
    end = os.dup(log.write_end)
    log.start()
    for piece in ("a päs".encode()[:-2], "a päs".encode()[-2:], "swörter b\n".encode()):
        os.write(end, piece)
        time.sleep(0.02)
    os.close(end)
    log.close()
    assert (tmp_path / "log").read_text() == "a *** b\n"
