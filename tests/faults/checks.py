"""Invariants after a fault, from independent records: the ranks' own notes, the study's file,
/proc.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import optuna
import pytest

from autotune.core.measurement import Measurement, Outcome
from autotune.core.space import Candidate
from autotune.search.storage import open_storage
from autotune.search.trial_storage import CANDIDATE, MEASUREMENT, PURPOSE
from autotune.search.trial_view import MAX_ATTEMPTS
from tests.faults.machine import speed_of
from tests.faults.scene import Scene


class RecordedTrial(msgspec.Struct, frozen=True):
    """A measurement as the study has it."""

    number: int
    candidate: Candidate
    purpose: str
    measurement: Measurement


def recorded_trials(scene: Scene) -> tuple[list[RecordedTrial], Counter[str]]:
    """Return the trials of the study by state."""
    try:
        trials = optuna.load_study(
            study_name=scene.folder.name, storage=open_storage(scene.storage)
        ).get_trials()
    except KeyError:  # no driver came as far as to make it: they say so themselves
        return [], Counter()
    trials_with_measurement = [
        RecordedTrial(
            trial.number,
            Candidate(**attributes[CANDIDATE]),
            attributes[PURPOSE],
            msgspec.convert(attributes[MEASUREMENT], Measurement),
        )
        for trial in trials
        if MEASUREMENT in (attributes := trial.user_attrs)
    ]
    return trials_with_measurement, Counter(trial.state.name for trial in trials)


def lost_measurements(
    events: Sequence[dict[str, Any]], study: Sequence[RecordedTrial]
) -> list[str]:
    """Return measurements that a driver reported and the study lacks."""
    outcome_by_number = {trial.number: str(trial.measurement.outcome) for trial in study}
    lost = []
    for line in events:
        if "ended" in line and outcome_by_number.get(line["ended"]) != line["outcome"]:
            lost.append(
                f"trial {line['ended']} ended {line['outcome']}, and the study has"
                f" {outcome_by_number.get(line['ended'])}"
            )
    return lost


def invented_measurements(scene: Scene, study: Sequence[RecordedTrial]) -> list[str]:
    """Return measurements of the study that no rank recorded, or recorded differently."""
    begun = Counter(line["candidate"] for line in scene.begun())
    finished = Counter(line["candidate"] for line in scene.finished())
    recorded, well = Counter[str](), Counter[str]()
    wrong = []
    for trial in study:
        # A timeout may come while it is still loading; a signal may end a rank that has the command
        # and not read it yet.
        begins = (
            trial.measurement.outcome is not Outcome.TIMEOUT
            and not trial.measurement.ended_from_outside
        )
        recorded[trial.candidate.id] += begins
        if trial.measurement.outcome is Outcome.OK:
            well[trial.candidate.id] += 1
            speed = trial.measurement.worst
            if speed is None or speed.tokens_per_second != pytest.approx(
                scene.ranks * speed_of(trial.candidate.knobs)
            ):
                wrong.append(f"trial {trial.number} has a speed that was not measured")
    for name, count in recorded.items():
        if count > begun[name]:
            wrong.append(f"{name} was recorded {count} times and begun {begun[name]}")
    twice = [name for name, count in well.items() if count > finished[name]]
    return wrong + [
        f"{name} was recorded ok {well[name]} times and done {finished[name]}" for name in twice
    ]


def fastest_left_out(study: Sequence[RecordedTrial]) -> list[str]:
    """Return the space's fastest candidate if its probe was ended from outside and never measured
    again. A slower one need not be: by then the search may know that it is slower."""
    fastest = max(
        (trial.candidate for trial in study),
        key=lambda candidate: speed_of(candidate.knobs),
        default=None,
    )
    short = []
    for trial in study:
        if trial.candidate == fastest and trial.purpose != "confirm":
            short.append(trial.measurement)
    ended = sum(measurement.ended_from_outside for measurement in short)
    decided = any(measurement.outcome is not Outcome.INTERRUPTED for measurement in short)
    wrong = 0 < ended < MAX_ATTEMPTS and not decided
    return (
        [f"the fastest was ended from outside {ended} times, and not measured again"]
        if wrong
        else []
    )


def measured_twice(study: Sequence[RecordedTrial]) -> list[str]:
    short = Counter(
        trial.candidate.id
        for trial in study
        if trial.purpose != "confirm" and trial.measurement.outcome is Outcome.OK
    )
    return [f"{name} was measured {count} times" for name, count in short.items() if count > 1]


def wrong_answer(events: Sequence[dict[str, Any]], study: Sequence[RecordedTrial]) -> list[str]:
    """The search came to its end, and recommends the fastest of what ended well."""
    last = next((line for line in events if "answer" in line), None)
    if last is None:
        error = next((line["text"] for line in events if "error" in line), "no message")
        return [f"no answer ({error})"]
    failed = set()
    for trial in study:
        if trial.purpose == "confirm" and trial.measurement.outcome is not Outcome.OK:
            failed.add(trial.candidate.id)
    well = []
    for trial in study:
        if trial.measurement.outcome is Outcome.OK and trial.candidate.id not in failed:
            well.append(trial)
    best = max(well, key=lambda trial: speed_of(trial.candidate.knobs), default=None)
    if best is None or last["answer"] != best.candidate.id:
        return [f"it recommends {last['answer']}, and the fastest is {best and best.candidate.id}"]
    return (
        ["it was not searched to its end"]
        if last["interrupted"] or last["proven"] == "budget spent"
        else []
    )


def message_missing(events: Sequence[dict[str, Any]], pattern: str) -> list[str]:
    """Return what is wrong with the messages to the user: none matches, or one is a traceback."""
    texts = []
    for line in events:
        for key in ("note", "evidence", "text", "fault"):
            if line.get(key):
                texts.append(str(line[key]))
    wrong = []
    for text in texts:
        if "\n" in text.strip() or "Traceback" in text:
            wrong.append(f"not one sentence: {text!r}")
    return (
        wrong
        if any(re.search(pattern, text) for text in texts)
        else [*wrong, f"no message {pattern!r}: {texts}"]
    )


def leaked_slots(events: Sequence[dict[str, Any]], slots: int) -> list[str]:
    given_up = [line["note"] for line in events if "Going on without" in line.get("note", "")]
    few = []
    for line in events:
        if line.get("slots", slots) != slots:
            few.append(f"{line['slots']} slots of {slots}")
    return [*given_up, *few]
