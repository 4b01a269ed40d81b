"""Facts that a trainer gives its guard: peaks by phase, rows, and where memory ran out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.units import MIB
from autotune.diagnosis import diagnose
from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import Ending, Reason, in_phase
from autotune.guard.save_request import GUARD_VARIABLE
from autotune.guard.trainer_facts import (
    ShownFacts,
    TrainingRows,
    clear_facts,
    read_facts,
    write_facts,
)
from autotune.integrations.phase_peaks import MemoryMoment, PhasePeaks


class Counters:
    """A GPU's counters, set by hand: highest and present memory."""

    def __init__(self) -> None:
        self.mark = self.held = 0

    def hold(self, mebibytes: int) -> None:
        self.held = mebibytes * MIB
        self.mark = max(self.mark, self.held)

    def read(self) -> MemoryMoment:
        return MemoryMoment(mark_bytes=self.mark, held_bytes=self.held)


@pytest.fixture(name="counters")
def some_counters() -> Counters:
    return Counters()


def test_a_phase_that_raises_the_mark_has_it_as_its_peak(counters: Counters) -> None:
    phases = PhasePeaks(counters.read)
    with phases.inside("forward"):
        counters.hold(900)
        counters.hold(400)
    with phases.inside("backward"):  # between 400 at its begin and 100 at its end: below the mark
        counters.hold(100)
    with phases.inside("optimizer"):
        counters.hold(250)
    expected = {"forward": 900 * MIB, "backward": 400 * MIB, "optimizer": 250 * MIB}
    assert phases.facts().phase_peak_bytes == expected


def test_the_highest_of_all_steps_counts_and_the_outermost_phase_owns(counters: Counters) -> None:
    phases = PhasePeaks(counters.read)
    for peak in (300, 700, 500):
        with phases.inside("evaluation"), phases.inside("forward"):
            counters.hold(peak)
        counters.hold(0)
    assert phases.facts().phase_peak_bytes == {"evaluation": 700 * MIB}


def test_memory_runs_out_in_a_phase_with_its_rows(counters: Counters) -> None:
    phases = PhasePeaks(counters.read)
    trainer = SimpleNamespace(compute_loss=_compute_loss, generate=None)
    undo = phases.watch(trainer, "compute_loss", "forward")
    assert undo is not None and phases.watch(trainer, "generate", "rollout") is None
    trainer.compute_loss("model", {"prompt_ids": _Shape(4, 900), "completion_ids": _Shape(4, 64)})
    with pytest.raises(MemoryError):
        trainer.compute_loss("model", {"input_ids": _Shape(2, 800), "labels": "refused"})
    phases.ran_out()
    facts = phases.facts()
    assert (facts.ran_out_in, facts.longest_row) == ("forward", 964)
    assert (facts.longest_prompt, facts.longest_completion) == (900, 64)
    assert facts.ran_out_rows == TrainingRows(rows=2, tokens=800)
    undo()
    assert trainer.compute_loss is _compute_loss


def test_rows_of_a_scoring_pass_are_seen(counters: Counters) -> None:
    phases = PhasePeaks(counters.read)
    trainer = SimpleNamespace(_get_per_token_logps_and_entropies=_refused_score)
    assert phases.watch(trainer, "_get_per_token_logps_and_entropies", "score") is not None
    with pytest.raises(MemoryError):
        trainer._get_per_token_logps_and_entropies(
            "model", _Shape(16, 700), _Shape(16, 700), 300, batch_size=4
        )
    phases.ran_out()
    rows = TrainingRows(
        rows=4,
        tokens=700,
        completion_tokens=300,
    )
    assert phases.facts().ran_out_rows == rows and rows.prompt_tokens == 400


class _Shape:
    """Tensor of which only the shape counts."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def _refused_score(*arguments: object, batch_size: int) -> None:
    raise MemoryError


def _compute_loss(model: str, inputs: dict[str, object]) -> None:
    if inputs.get("labels") == "refused":
        raise MemoryError


def test_an_error_that_was_caught_does_not_hide_later_phases(counters: Counters) -> None:
    phases = PhasePeaks(counters.read)
    with pytest.raises(ValueError), phases.inside("rollout"):
        raise ValueError
    phases.step_ended()
    with phases.inside("forward"):
        counters.hold(10)
    assert phases.facts().phase_peak_bytes == {"rollout": 0, "forward": 10 * MIB}


def test_ranks_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_facts(0, ShownFacts(phase_peak_bytes={"forward": 1}))  # no guard: nothing is written
    assert read_facts(tmp_path) is None
    monkeypatch.setenv(GUARD_VARIABLE, str(tmp_path))
    write_facts(0, ShownFacts(phase_peak_bytes={"forward": 5, "backward": 7}, longest_row=30))
    rows = TrainingRows(rows=8, tokens=40)
    refused = ShownFacts(
        phase_peak_bytes={"forward": 6},
        longest_row=40,
        ran_out_in="forward",
        ran_out_rows=rows,
    )
    write_facts(1, refused)
    assert read_facts(tmp_path) == ShownFacts(
        phase_peak_bytes={"forward": 6, "backward": 7},
        longest_row=40,
        ran_out_in="forward",
        ran_out_rows=rows,
    )
    clear_facts(tmp_path)
    assert read_facts(tmp_path) is None


def test_the_trainers_phase_counts_where_the_output_shows_none() -> None:
    diagnosis = diagnose("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert diagnosis.phase is None
    ending = Ending(
        reason=Reason.MEMORY,
        end=ProcessEnd(exit=1),
        diagnosis=diagnosis,
    )
    stated = in_phase(ending, "backward").diagnosis
    assert stated is not None and stated.phase == "backward"
    assert in_phase(ending, "evaluation") == ending, "no phase of a generation cycle"
    assert in_phase(in_phase(ending, "backward"), "forward") == in_phase(ending, "backward")
