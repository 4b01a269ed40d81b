"""`autotune run` as a person or a program meets it: real probes of the real trainer on a tiny
model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, autotune, environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

SMALL = [
    "--gpus",
    "cpu",
    "--space",
    "demo",
    "--hold",
    "use_vllm=false",
    "--max-completion-length",
    "24",
    "--memory-limit",
    "2G",
]
FEW = [
    "--search",
    "per_device_train_batch_size=8,16",
    "--search",
    "gradient_accumulation_steps=1,2",
    "--hold",
    "gradient_checkpointing=true",
]


def _run(
    model: Path,
    *arguments: str,
    cwd: Path,
    timeout: float = 280,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "run", "--model", str(model), *SMALL, *FEW, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env=environment(),
    )


def test_a_whole_run_and_its_follow_ups(tiny_model: Path, tmp_path: Path) -> None:
    done = _run(tiny_model, "--budget", "3m", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert (
        document["status"] == "ok"
        and document["recommendation"]["certificate"]["optimizer_steps"] >= 4
    )
    assert document["counts"]["candidates"] == document["counts"]["probed"] == 2
    assert "assumed  full fine-tuning, global batch 16" in done.stderr
    assert re.search(r"^probe 1 \(baseline, loading first\): .*left\]$", done.stderr, re.MULTILINE)
    names = {"recommended.yaml", "accelerate.yaml", "launch.sh"}
    assert names <= {Path(file).name for file in document["recommendation"]["files"]}
    assert all((tmp_path / file).exists() for file in document["recommendation"]["files"])
    assert str(tmp_path / "out") in (tmp_path / "out" / "recommended.yaml").read_text()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]

    again = _run(tiny_model, "--budget", "3m", "--out", "out", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "From the record: measured" in again.stderr and "--fresh measures again" in again.stderr
    assert "probe 1" not in again.stderr and "Confirmed by" in again.stdout

    resumed = _run(tiny_model, "--budget", "3m", "--out", "out", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "already measured" in resumed.stderr and "probe 1" not in resumed.stderr, (
        "a finished candidate was measured again"
    )
    assert "Confirmed by" in resumed.stdout and "baseline" in resumed.stdout


def test_nothing_fits_is_3(tiny_model: Path, tmp_path: Path) -> None:
    done = _run(
        tiny_model, "--budget", "2m", "--out", "out", "--memory-limit", "420M", cwd=tmp_path
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Nothing fits into 420 MiB" in done.stdout and "Nearest miss" in done.stdout
    document = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert document["status"] == "nothing_fits" and document["counts"]["out_of_memory"] >= 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "recommendation.json",
        "report.html",
        "study.db",
    ]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        # Both signals at once are a row of tests/faults.
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_it_resumably(
    tiny_model: Path,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    mark = f"mark-{uuid.uuid4()}"
    flags = ["run", "--model", str(tiny_model), *SMALL, *FEW, "--budget", "4m", "--out", "out"]
    with subprocess.Popen(
        [*PROGRAM, *flags],
        cwd=tmp_path,
        env=environment(AUTOTUNE_TEST_MARK=mark),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job, which a CI may be, has SIGINT ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("probe 2"):
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (
        "Interrupted after 1 probe, which is kept. Go on with: autotune run" in err
        and "--resume" in err
    )
    assert "Traceback" not in err
    assert _still_running(mark) == []
    so_far = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert so_far["status"] == "interrupted" and "--resume" in so_far["resume_with"]
    assert so_far["recommendation"]["certificate"] is None, "one short probe certifies nothing"
    assert (tmp_path / "out" / "recommended.yaml").exists()

    resumed = autotune(*flags, "--resume", "--json", cwd=tmp_path, timeout=280)
    assert resumed.code == 0, resumed.err
    assert "1 already measured" in resumed.err
    assert resumed.document["counts"]["probed"] == 2


def test_two_cpu_ranks(tiny_model: Path, tmp_path: Path) -> None:
    flags = [
        "--gpus",
        "2xcpu",
        "--search",
        "per_device_train_batch_size=4,8",
        "--budget",
        "4m",
        "--out",
        "out",
        "--json",
    ]
    done = subprocess.run(
        [
            *PROGRAM,
            "run",
            "--model",
            str(tiny_model),
            *SMALL[2:],
            *flags,
            "--hold",
            "gradient_checkpointing=true",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=290,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["question"]["hardware"] == "2xcpu"
    knobs = document["recommendation"]["knobs"]
    assert knobs["per_device_train_batch_size"] * knobs["gradient_accumulation_steps"] * 2 == 16


def _still_running(mark: str) -> list[str]:
    """Processes that inherited our mark, given a moment to end."""
    deadline = time.monotonic() + 10
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes


def _marked(mark: str) -> list[str]:
    command_lines = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (
                mark.encode() in (entry / "environ").read_bytes()
                and "State:\tZ" not in (entry / "status").read_text()
            ):
                command_lines.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return command_lines


def test_the_mark_is_seen_where_there_is_a_process() -> None:
    # The test above would pass on a machine where it can see nothing.
    mark = f"mark-{uuid.uuid4()}"
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env=environment(AUTOTUNE_TEST_MARK=mark),
    ) as process:
        time.sleep(0.5)
        assert len(_marked(mark)) == 1
        process.kill()
