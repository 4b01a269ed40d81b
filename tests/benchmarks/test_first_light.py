"""Plan, results and setups of `make first-light`, without a card; and its points with a tiny model
on the CPU, where memory limits are real.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import first_light  # noqa: E402
from first_light_steps import plan, seconds_for  # noqa: E402
from gpu_by_hand import JOB  # noqa: E402
from gpu_points import Box, job_of, measure_setups, predict_setups  # noqa: E402
from gpu_record import FAILED, OUT_OF_TIME, Record, read_lines, unstarted_row  # noqa: E402
from gpu_setups import COLOCATED, PARTS, Point, Setup, all_setups  # noqa: E402

from autotune.core.units import GIB  # noqa: E402

H100_GIB = 79.2
A100_GIB = 39.5
LEAVES_A_PROCESS = """
import subprocess, time
subprocess.Popen(["sleep", "307"])
print("up", flush=True)
time.sleep(307)
"""


def started(minutes: float, scale: float = 1) -> list[str]:
    """Return the steps that a program starts if each takes the time that is expected of it."""
    remaining = 60 * minutes * scale
    names = []
    for step in plan(minutes, H100_GIB):
        seconds = seconds_for(step, remaining, scale)
        if seconds is not None:
            names.append(step.name)
            remaining -= min(seconds, step.expected_seconds * scale)
    return names


def test_nine_minutes_hold_what_tells_most() -> None:
    """Expected seconds: 15 + 60 + 135 + 40 + 165 leave 125 for an engine, whose 100 leave 25."""
    assert started(9) == ["identity", "smoke", "sft", "rates", "search", "colocated", "cudnn"]


def test_thirty_minutes_hold_every_step() -> None:
    every = []
    for step in plan(30, H100_GIB):
        every.append(step.name)
    assert started(30) == every


def test_a_scaled_program_starts_the_same_steps() -> None:
    assert started(9, scale=7) == started(9)


def test_a_step_never_gets_more_than_what_is_left() -> None:
    for remaining in (3, 20, 100, 300, 1000):
        for step in plan(9, H100_GIB):
            seconds = seconds_for(step, remaining)
            assert seconds is None or seconds < remaining


def test_a_search_ends_within_its_step() -> None:
    """The budget counts from the command's start, and writing the files comes after it."""
    (search,) = plan(9, H100_GIB, only=["search"])
    command = search.command(
        "python",
        out=Path("/out"),
        work=Path("/searches"),
        seconds=175,
        scale=1,
    )
    values = dict(itertools.pairwise(command))
    assert values["--budget"] == "155s"
    assert values["--memory-limit"] == "40G"
    assert values["--out"] == "/searches/search"


def test_chosen_steps_run_in_the_order_named_with_the_limits_of_a_long_program() -> None:
    search, identity = plan(9, H100_GIB, only=["search", "identity"])
    assert (search.name, identity.name) == ("search", "identity")
    assert search.limit_seconds == 300


def test_on_a_smaller_card_the_search_has_all_of_it() -> None:
    (search,) = plan(9, A100_GIB, only=["search"])
    assert search.arguments[search.arguments.index("--memory-limit") + 1] == "100%"


def test_done_steps_are_left_out() -> None:
    names = []
    for step in plan(9, H100_GIB, done=["identity", "search"]):
        names.append(step.name)
    assert names[:3] == ["smoke", "sft", "rates"]
    assert "search" not in names


def test_results_survive_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    record = Record(path)
    record.append("step", name="identity", outcome="ok")
    with path.open("a") as stream:
        stream.write('{"kind": "step", "name": "smo')  # the machine was given back here
    record.append("step", name="smoke", outcome="ok")
    identity, smoke = read_lines(path)
    assert identity["name"] == "identity"
    assert smoke["name"] == "smoke"
    assert len(path.read_text().splitlines()) == 3


def test_a_point_that_is_there_is_found_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "results.jsonl")
    record.add(unstarted_row("k1", "setup", "first try"))
    record.add(unstarted_row("k1", "setup", "second try"))
    row = Record(tmp_path / "results.jsonl").row("k1")
    assert row is not None
    assert row["why"] == "second try"
    assert record.row("k2") is None


def test_a_step_has_a_limit_and_leaves_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    ended = first_light._ended([sys.executable, "-c", LEAVES_A_PROCESS], seconds=5)
    assert ended.outcome == "timeout"
    assert ended.seconds < 60
    assert "up" in ended.output
    assert "up" in capsys.readouterr().out
    assert any("sleep 307" in text for text in ended.orphans)


def test_the_outcome_of_a_step_is_its_exit_code() -> None:
    failed = first_light._ended([sys.executable, "-c", "raise SystemExit(3)"], seconds=60)
    assert failed.outcome == "failed"
    assert failed.code == 3
    good = first_light._ended([sys.executable, "-c", ""], seconds=60)
    assert good.outcome == "ok"
    early = first_light._ended([sys.executable, "-c", "raise SystemExit(75)"], seconds=60)
    assert early.outcome == "out of time"


def test_the_document_of_a_search_is_taken_out_of_its_output() -> None:
    """A search that ends with an answer prints one line of JSON among its notes."""
    program = """
import json, sys
print("a note", file=sys.stderr)
print(json.dumps({"schema": 1, "status": "ok", "counts": {"probed": 3}, "trials": []}))
"""
    ended = first_light._ended([sys.executable, "-c", program], seconds=60)
    answer = first_light._answer(ended.output)
    assert answer is not None
    assert answer["status"] == "ok"
    assert answer["counts"] == {"probed": 3}
    assert "trials" not in answer
    assert first_light._answer("no document") is None


@pytest.mark.parametrize("gpus", ["A100-40G", "H100", "H200"])
def test_every_setup_can_be_built_on_every_card(gpus: str) -> None:
    """Drivers report 39.5 GiB for an A100 of 40 GB, so that a limit of 40 GiB is none there."""
    for setup in [*all_setups(), JOB]:
        job = job_of(setup, gpus, mode="predict").job
        assert 0 < job.memory_limit_bytes <= job.task.hardware.memory_bytes
        if setup.limit_gib is not None and gpus != "A100-40G":
            assert job.memory_limit_bytes == setup.limit_gib * GIB


def test_points_have_names_of_their_own() -> None:
    names = []
    for setup in all_setups():
        names += [(setup.name, point.name) for point in setup.points]
    assert len(set(names)) == len(names) >= 30


def test_rows_divide_into_whole_micro_batches() -> None:
    for setup in all_setups():
        for point in setup.points:
            assert setup.global_batch % point.micro_batch == 0, (setup.name, point)


def _broken_setup(**changes: Any) -> Setup:
    values = {
        "method": "grpo",
        "model": "Qwen2.5-0.5B",
        "tuning": "lora",
        "limit_gib": None,
        "points": (
            Point(
                micro_batch=1,
                checkpointing=True,
                prompt=64,
                completion=64,
            ),
        ),
        "holds": ("no_such_knob=1",),
        "global_batch": 8,
    }
    return Setup(**{**values, **changes})


def test_a_setup_that_cannot_be_built_is_a_line_and_the_next_one_follows(tmp_path: Path) -> None:
    record = Record(tmp_path / "results.jsonl")
    setups = [_broken_setup(), _broken_setup(model="no-such-model", holds=())]
    assert measure_setups(setups, "cpu", record, Box(minutes=1)) == FAILED
    assert measure_setups(setups, "cpu", record, Box(minutes=0)) == OUT_OF_TIME
    points = record.lines("point")
    knob, model = points
    assert knob["outcome"] == model["outcome"] == "failed to start"
    assert "no_such_knob" in knob["why"]
    assert "no-such-model" in model["why"]


@pytest.mark.slow
def test_predicting_needs_neither_a_gpu_nor_its_tools(tmp_path: Path) -> None:
    """Where neither nvidia-smi nor git can be found."""
    program = (
        "import gpu_points, gpu_setups, pathlib; gpu_points.predict_setups("
        f"gpu_setups.SFT[1:2], 'H100', pathlib.Path({str(tmp_path / 'predicted.json')!r}))"
    )
    environment = {
        "PATH": "/nowhere",
        "PYTHONPATH": f"{ROOT}:{BENCHMARKS}",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    lines = json.loads((tmp_path / "predicted.json").read_text())
    assert len(lines) == 4
    # Half a billion parameters of two bytes, and 16 GiB are allowed.
    for line in lines.values():
        assert 0.9 * GIB < line["torch_peak_allocated_bytes"]["value"] < 16 * GIB
        assert line["limit_bytes"] == 16 * GIB


def test_what_cannot_be_predicted_has_its_reason(tmp_path: Path) -> None:
    predict_setups([_broken_setup()], "H100", tmp_path / "predicted.json")
    (line,) = json.loads((tmp_path / "predicted.json").read_text()).values()
    assert "no_such_knob" in line["why"]


def test_a_machine_without_a_card_is_told_so() -> None:
    command = [sys.executable, str(BENCHMARKS / "first_light.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "No NVIDIA GPU" in result.stderr and "Traceback" not in result.stderr


def test_both_parts_of_an_engine_are_in_its_name() -> None:
    assert "vllm_gpu_memory_utilization=0.3" in COLOCATED[1].name
    for setup in PARTS["sft"]:
        assert setup.model in setup.name


@pytest.fixture(name="tiny", scope="module")
def points_of_a_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("tiny")
    _measure_tiny(folder)
    yield folder


def _measure_tiny(folder: Path) -> float:
    began = time.monotonic()
    command = [sys.executable, str(BENCHMARKS / "gpu_points.py"), "tiny", f"--out={folder}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [*command, "--seconds=600"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_measured_points_and_a_real_out_of_memory_error(tiny: Path) -> None:
    points = Record(tiny / "results.jsonl").lines("point")
    outcomes = set()
    for point in points:
        kind = point["outcome"][:3]
        outcomes.add(kind)
        assert point["basis"] == "measured"
        assert point["fits"] == (point["outcome"] == "ok")
        assert (point["tokens_per_second"] is not None) == (point["outcome"] == "ok")
    assert outcomes == {"ok", "oom"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_started_again_it_measures_nothing_twice(tiny: Path) -> None:
    before = (tiny / "results.jsonl").read_text()
    _measure_tiny(tiny)
    assert (tiny / "results.jsonl").read_text() == before
