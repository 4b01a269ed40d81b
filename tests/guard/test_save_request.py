"""The request to save before memory runs out, and a trainer that obeys it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.units import GIB
from autotune.guard.before_the_limit import PeakTrend, handles, hang_seconds
from autotune.guard.save_request import GUARD_VARIABLE, SaveRequest, requested_step
from autotune.guard.step_progress import StepProgress
from autotune.guard.watched import Look


def _look(peak: float) -> Look:
    peak_bytes = round(peak * GIB)
    return Look(
        place="GPU 0",
        used_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        limit_bytes=40 * GIB,
        free_bytes=40 * GIB - peak_bytes,
    )


def test_a_peak_that_grows_by_a_tenth_each_step_reaches_the_limit() -> None:
    # 20 GiB at step 0, 0.1 GiB more each step: 30 GiB at step 100, and 40 GiB at step 200.
    progress = StepProgress(now=0.0)
    trend = PeakTrend()
    for step in range(1, 101):
        progress.feed(f"\r 1%| | {step}/1000 [00:01<00:01]", now=float(step))
        trend.add(step, _look(20 + step / 10))
    assert trend.crossing(progress, _look(30.0)) == pytest.approx(200, abs=1)


def test_a_peak_that_stays_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = StepProgress(now=0.0)
    trend = PeakTrend()
    for step in range(1, 101):
        progress.feed(f"\r 1%| | {step}/1000 [00:01<00:01]", now=float(step))
        trend.add(step, _look(30.0))
    assert trend.crossing(progress, _look(30.0)) is None


def test_the_request_is_due_after_every_rank_has_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SaveRequest(tmp_path)
    monkeypatch.setenv(GUARD_VARIABLE, request.variables[GUARD_VARIABLE])
    assert requested_step() is None
    assert request.make(100, usual_seconds=2.0) == 105, "ten seconds of steps"
    assert requested_step() == 105
    assert request.make(100, usual_seconds=60.0) == 103, "at least three"
    request.clear()
    assert requested_step() is None


def test_a_hang_is_ten_times_the_usual_time() -> None:
    progress = StepProgress(now=0.0)
    for step in range(1, 6):
        progress.feed(f"step:{step} - ", now=20.0 * step)
    assert hang_seconds(progress, now=100.0 + 199.0) is None
    assert hang_seconds(progress, now=100.0 + 201.0) == 201.0


def test_a_signal_is_sent_only_to_a_process_that_handles_it() -> None:
    for program, expected in (
        ("import signal; signal.signal(signal.SIGUSR1, lambda *_: None)", True),
        ("", False),
    ):
        waiting = f"{program}\nprint('ready', flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert handles(process.pid, signal.SIGUSR1) is expected
            process.communicate(b"\n")


def test_memory_watch_saves_and_stops_after_the_requested_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from autotune.integrations.trl import MemoryWatch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).pow(2).mean()}

    request = SaveRequest(tmp_path)
    monkeypatch.setenv(GUARD_VARIABLE, str(tmp_path))
    request.make(1, usual_seconds=60.0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": torch.ones(1)} for _ in range(100)]
    trainer = Trainer(
        model=Model(),
        args=arguments,
        train_dataset=rows,
        callbacks=[MemoryWatch()],
    )
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").is_file()
    assert request.was_obeyed
