"""What must be true after a fault, told by those who saw it: the ranks' own notes, the study's file, /proc."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import optuna
import pytest

from autotune.candidate import Candidate
from autotune.measurement import Measurement, Outcome
from autotune.study.records import CANDIDATE, MEASUREMENT, PURPOSE
from autotune.study.storage import open_storage
from tests.faults.machine import speed_of
from tests.faults.scene import Scene


class Told(msgspec.Struct, frozen=True):
    """A measurement as the study has it."""

    number: int
    candidate: Candidate
    purpose: str
    measurement: Measurement


def told_in(scene: Scene) -> tuple[list[Told], Counter[str]]:
    """What the study holds, and its trials by their state."""
    try:
        trials = optuna.load_study(study_name=scene.folder.name, storage=open_storage(scene.storage)).get_trials()
    except KeyError:  # no driver came as far as to make it: they say so themselves
        return [], Counter()
    found = [
        Told(trial.number, Candidate(**said[CANDIDATE]), said[PURPOSE], msgspec.convert(said[MEASUREMENT], Measurement))
        for trial in trials
        if MEASUREMENT in (said := trial.user_attrs)
    ]
    return found, Counter(trial.state.name for trial in trials)


def lost_measurements(heard: Sequence[dict[str, Any]], study: Sequence[Told]) -> list[str]:
    """What a driver had told, and the study does not have."""
    kept = {told.number: str(told.measurement.outcome) for told in study}
    return [
        f"trial {line['ended']} ended {line['outcome']}, and the study has {kept.get(line['ended'])}"
        for line in heard
        if "ended" in line and kept.get(line["ended"]) != line["outcome"]
    ]


def invented_measurements(scene: Scene, study: Sequence[Told]) -> list[str]:
    """What the study has, and no rank ever did; or did otherwise."""
    begun = Counter(line["candidate"] for line in scene.begun())
    finished = Counter(line["candidate"] for line in scene.finished())
    told, well = Counter[str](), Counter[str]()
    wrong = []
    for one in study:
        told[one.candidate.id] += one.measurement.outcome is not Outcome.TIMEOUT  # which may come while it is still loading
        if one.measurement.outcome is Outcome.OK:
            well[one.candidate.id] += 1
            speed = one.measurement.worst
            if speed is None or speed.tokens_per_second != pytest.approx(scene.ranks * speed_of(one.candidate.knobs)):
                wrong.append(f"trial {one.number} has a speed that was not measured")
    wrong += [f"{name} was told {count} times and begun {begun[name]}" for name, count in told.items() if count > begun[name]]
    twice = [name for name, count in well.items() if count > finished[name]]
    return wrong + [f"{name} was told ok {well[name]} times and done {finished[name]}" for name in twice]


def measured_twice(study: Sequence[Told]) -> list[str]:
    short = Counter(one.candidate.id for one in study if one.purpose != "confirm" and one.measurement.outcome is Outcome.OK)
    return [f"{name} was measured {count} times" for name, count in short.items() if count > 1]


def wrong_answer(heard: Sequence[dict[str, Any]], study: Sequence[Told]) -> list[str]:
    """The search came to its end, and recommends the fastest of what ended well."""
    last = next((line for line in heard if "answer" in line), None)
    if last is None:
        said = next((line["text"] for line in heard if "error" in line), "nothing was said")
        return [f"no answer ({said})"]
    failed = {one.candidate.id for one in study if one.purpose == "confirm" and one.measurement.outcome is not Outcome.OK}
    well = [one for one in study if one.measurement.outcome is Outcome.OK and one.candidate.id not in failed]
    best = max(well, key=lambda one: speed_of(one.candidate.knobs), default=None)
    if best is None or last["answer"] != best.candidate.id:
        return [f"it recommends {last['answer']}, and the fastest is {best and best.candidate.id}"]
    return ["it was not searched to its end"] if last["interrupted"] or last["proven"] == "budget spent" else []


def said_in_one_sentence(heard: Sequence[dict[str, Any]], pattern: str) -> list[str]:
    """Somewhere among what the user is shown; never as a traceback."""
    texts = [str(line[key]) for line in heard for key in ("note", "evidence", "text") if line.get(key)]
    wrong = [f"not one sentence: {text!r}" for text in texts if "\n" in text.strip() or "Traceback" in text]
    return wrong if any(re.search(pattern, text) for text in texts) else [*wrong, f"nobody said {pattern!r}: {texts}"]


def leaked_slots(heard: Sequence[dict[str, Any]], wanted: int) -> list[str]:
    given_up = [line["note"] for line in heard if "Going on without" in line.get("note", "")]
    few = [f"{line['slots']} slots of {wanted}" for line in heard if line.get("slots", wanted) != wanted]
    return [*given_up, *few]
