"""Facts by phase in the record of guarded runs, and what `predict` and `run` say with them."""

from __future__ import annotations

from pathlib import Path

from autotune.api.predictions import predict_flags
from autotune.core.events import Event, Note
from autotune.core.measurement import Outcome
from autotune.core.units import GIB
from autotune.guard.ending import in_phase
from autotune.guard.history import AttemptRecord
from autotune.guard.learned import device_peak, learn
from autotune.guard.trainer_facts import ShownFacts, TrainingRows
from autotune.guard.watched import AttemptPeaks
from autotune.search.record import Record
from tests.guard.test_learned import a_configuration as a_configuration
from tests.guard.test_learned import attempt, ended, finished, flags, training_of

PEAKS = {"rollout": 20 * GIB, "forward": 30 * GIB, "backward": 38 * GIB}


def _attempt_with(facts: ShownFacts) -> AttemptRecord:
    record = attempt()
    record.ended(finished(), 1.0, AttemptPeaks(), facts)
    record.peak_bytes = max(facts.phase_peak_bytes.values(), default=36 * GIB)
    return record


def _notes_of_predict(config: Path) -> list[str]:
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    predict_flags(flags(config), listener=listen)
    return notes


def test_a_refusal_names_its_phase_and_rows(config: Path) -> None:
    rows = TrainingRows(rows=8, tokens=3214)
    facts = ShownFacts(
        phase_peak_bytes=PEAKS,
        ran_out_in="backward",
        ran_out_rows=rows,
    )
    training = training_of(config)
    learn(training, in_phase(ended(), "backward"), _attempt_with(facts), "guard.json")

    (trial,) = Record(training.request.job, {}).earlier().trials
    assert trial.measurement.outcome is Outcome.OOM_BACKWARD
    assert trial.measurement.memory.phase_peak_bytes == PEAKS
    (note,) = [note for note in _notes_of_predict(config) if "ran out of memory" in note]
    assert "in the phase backward with 8 rows of 3,214 tokens" in note


def test_predict_names_the_peaks_of_a_run_that_finished(config: Path) -> None:
    facts = ShownFacts(phase_peak_bytes=PEAKS)
    learn(training_of(config), finished(), _attempt_with(facts), "guard.json")
    (note,) = [note for note in _notes_of_predict(config) if note.startswith("Measured:")]
    assert "800 steps, with a peak of 38 GiB" in note
    assert "rollout 20 GiB, forward 30 GiB, backward 38 GiB; guard.json" in note


def test_phases_without_memory_watch_are_said_to_be_unknown(config: Path) -> None:
    learn(
        training_of(config),
        finished(),
        _attempt_with(ShownFacts(phase_peak_bytes={})),
        "guard.json",
    )
    (note,) = [note for note in _notes_of_predict(config) if note.startswith("Measured:")]
    assert "a peak of 36 GiB (phases are not known: no MemoryWatch in the trainer" in note


def test_memory_of_a_head_without_gpus_is_no_peak_of_the_run(config: Path) -> None:
    record = _attempt_with(ShownFacts(phase_peak_bytes={}))
    assert device_peak(training_of(config), record) == 36 * GIB
    record.place = "host"
    assert device_peak(training_of(config), record) is None
