"""Before a run is started: does this very configuration fit here, and if not, which one does?

    found = preflight("train.yaml", tune=True)
    if found.use is not None:
        subprocess.run(["trl", "grpo", "--config", str(found.use)])

Answered from the record where it was measured under the same circumstances before, else by one short probe of its worst case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

from autotune import trainers
from autotune.answering.opening import open_executor
from autotune.answering.recall import Record
from autotune.api import Tuned, run_flags
from autotune.asking.flags import Flags, held_by
from autotune.asking.keywords import Common, flags_of
from autotune.asking.understanding import Understood, candidate_in_question, understand
from autotune.candidate import Candidate
from autotune.errors import BadInput, RigError
from autotune.events import Begun, Listener, Note, ProbeEnded, ProbeStarted, unheard
from autotune.executors.base import Executor
from autotune.preflight.proofs import PROOF, Missed, Proof, Proofs, decided, longest_prompt
from autotune.question import Question
from autotune.recommendation import Trial
from autotune.verdict import judge

SCHEMA = 1
RECOMMENDED = "recommended"

Status = Literal["fits", "tuned", "does_not_fit", "nothing_fits", "undecided", "interrupted"]
"""`tuned`: another one was found and certified; `nothing_fits`: none was; `undecided`: it ended otherwise than by fitting or by
running out of memory, or the search's time was over before its best was certified."""

TRIES = 2
"""A fault of the machine is tried once more, and then told."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Whether the configuration fits here, by what, and what to train with."""

    question: Question
    candidate: Candidate
    """The configuration, its longest prompt included."""

    proof: Proof
    from_record: bool
    """Whether it was measured earlier, and not now."""

    missed: str | None
    """Why the record did not answer; None where it did."""

    tuned: Tuned | None
    """What the search found in its place; None where it fits, or nobody asked for one."""

    use: Path | None
    """What to train with: the configuration itself, or the tuned one; None where nothing is known to fit."""

    elapsed_seconds: float

    @property
    def fits(self) -> bool | None:
        """Of the configuration itself; None where it ended otherwise than well or by running out of memory."""
        return decided(self.proof.trial)

    @property
    def status(self) -> Status:
        """The answer in a word."""
        if self.fits is None:
            return "undecided"
        if self.fits:
            return "fits"
        answer = None if self.tuned is None else self.tuned.recommendation
        if self.tuned is None or answer is None:
            return "does_not_fit"
        if answer.interrupted:
            return "interrupted"
        if answer.winner is None:
            return "nothing_fits" if self.tuned.document["status"] == "nothing_fits" else "undecided"
        return "undecided" if self.use is None else "tuned"

    @property
    def document(self) -> dict[str, Any]:
        """All of it as plain data: what `preflight --json` prints."""
        return _document(self)


def preflight(
    config: str | PathLike[str],
    *,
    tune: bool = False,
    out: str | PathLike[str] = "autotune-out",
    budget: str = "20m",
    fresh: bool = False,
    listener: Listener = unheard,
    **asked: Unpack[Common],
) -> Preflight:
    """Prove that a configuration fits on this machine; with `tune`, find one that does where it doesn't.

    What is searched then are settings that leave what is learned alone; `autotune.run` moves more.
    """
    ours = {"config": str(config), "out": str(out), "budget": budget, "fresh": fresh}
    # Nothing else: what is proven must be what the file says.
    flags = flags_of({**asked, **ours}, known={*Common.__annotations__, *ours})
    return preflight_flags(flags, tune=tune, listener=listener)


def preflight_flags(flags: Flags, *, tune: bool = False, listener: Listener = unheard) -> Preflight:
    """The same for flags that are put together already."""
    began = time.monotonic()
    flags = dataclasses.replace(flags, mode="probe")
    understood = understand(flags)
    _refuse_another_number_of_processes(understood.question)
    with contextlib.closing(open_executor(understood.question, understood.trainer)) as executor:
        versions = executor.prepare()
        understood = _at_its_longest(understood, versions)
        candidate = candidate_in_question(understood)
        listener(Begun(question=understood.question, candidates=(candidate,), assumed=understood.assumed, notes=understood.notes))
        proofs = Proofs(understood.question, understood.trainer, candidate, versions)
        found = proofs.find()
        missed = found.why if isinstance(found, Missed) else None
        if isinstance(found, Missed):
            listener(Note(text=f"Not on record: {found.why}. Measuring its worst case."))
            trial = _measured(understood.question, candidate, versions, executor, listener)
            found = proofs.keep(trial, _certificate(understood.question, trial))
    known = Preflight(
        question=understood.question, candidate=candidate, proof=found, from_record=missed is None, missed=missed, tuned=None,
        use=None, elapsed_seconds=0.0,
    )  # fmt: skip
    if known.fits is False and tune:
        known = _tuned(known, flags, f"preflight-{proofs.key}", listener)
    elif known.fits:
        known = dataclasses.replace(known, use=Path(str(flags.config)))
    return dataclasses.replace(known, elapsed_seconds=time.monotonic() - began)


def _refuse_another_number_of_processes(question: Question) -> None:
    """What is proven must be what is then started."""
    named, hardware = question.job.workload.user_settings.get("num_processes"), question.job.hardware
    if isinstance(named, int) and named != hardware.count:
        what = "cpu" if hardware.kind == "cpu" else "local"
        raise BadInput(
            f"The configuration starts {named} processes, and {hardware} are {hardware.count}.",
            way_out=f"Say --gpus {named}x{what}, or correct num_processes.",
        )


def _at_its_longest(understood: Understood, versions: Mapping[str, str]) -> Understood:
    """TRL cuts no prompt: the longest one of the data is the configuration's own, unless it is given."""
    question = understood.question
    workload = question.job.workload
    if "max_prompt_length" in workload.held:
        return understood
    longest = longest_prompt(question, understood.trainer, versions)
    held = {**workload.held, "max_prompt_length": longest}
    job = dataclasses.replace(question.job, workload=dataclasses.replace(workload, held=held))
    return dataclasses.replace(understood, question=dataclasses.replace(question, job=job))


def _alone(question: Question, candidate: Candidate) -> Question:
    """The question about this candidate and no other."""
    only = {name: (value,) for name, value in candidate.knobs.items()}
    return dataclasses.replace(question, space=question.space.with_choices(only))


def _measured(
    question: Question, candidate: Candidate, versions: Mapping[str, str], executor: Executor, listener: Listener
) -> Trial:
    """One probe of the worst case. What it finds is kept for later searches too."""
    told = Record(question, versions).keep_probes(listener)
    told(ProbeStarted(number=0, purpose="confirm", candidate=candidate, loads=True, seconds_left=PROOF.deadline_seconds))
    for attempt in range(TRIES):
        try:
            measurement = executor.open(candidate).measure(candidate, PROOF)
            break
        except RigError as fault:
            if attempt + 1 == TRIES:
                raise
            listener(Note(text=f"{fault} Trying again."))
    trial = Trial(number=0, purpose="confirm", candidate=candidate, measurement=measurement, verdict=judge(measurement))
    told(ProbeEnded(trial=trial, best=trial if trial.verdict.fits else None, seconds_left=0.0))
    return trial


def _certificate(question: Question, trial: Trial) -> Mapping[str, object]:
    from autotune.report import certificate_row

    return certificate_row(question, trial) or {}


def _tuned(known: Preflight, flags: Flags, study: str, listener: Listener) -> Preflight:
    """A search with everything held that is learned, the longest prompt of the data among it."""
    # Of the same study, if there was one before: nothing is measured twice, whatever ended it.
    asked = dataclasses.replace(
        flags, hold=(*flags.hold, *_learning(known, flags)), study=flags.study or study, resume=not flags.fresh
    )
    settings = known.candidate.settings
    found = run_flags(asked, listener=listener, pinned=frozenset(settings) | frozenset(known.question.space.relax))
    answer = found.recommendation
    certified = answer is not None and answer.certificate is not None and not answer.interrupted
    use = next((file for file in found.files if file.stem == RECOMMENDED), None)
    return dataclasses.replace(known, tuned=found, use=use if certified else None)


def _learning(known: Preflight, flags: Flags) -> list[str]:
    """What the configuration says about learning, or takes from the framework's defaults, where no flag says it already."""
    settings, words = known.candidate.settings, trainers.trainer(flags.framework, flags.method).canonical
    given = held_by(flags, words)
    names = {knob.name for knob in known.question.space.learning_knobs(settings)} | {"max_prompt_length"}
    # A knob that is left open follows another one: what it came to here must not hold that one still.
    told = {name: known.candidate.knobs.get(name, settings.get(name)) for name in sorted(names - set(given))}
    return [f"{name}={json.dumps(value)}" for name, value in told.items() if value is not None]


def _document(found: Preflight) -> dict[str, Any]:
    trial, proof = found.proof.trial, found.proof
    memory = trial.measurement.memory
    return {
        "schema": SCHEMA,
        "status": found.status,
        "fits": found.fits,
        "basis": "measured",
        "config": str(found.question.job.workload.config_file),
        "use": None if found.use is None else str(found.use),
        "outcome": str(trial.measurement.outcome),
        "why": trial.verdict.why,
        "peak_memory_bytes": memory.peak_bytes,
        "limit_bytes": memory.limit_bytes,
        "margin_bytes": trial.verdict.margin_bytes,
        "settings": dict(found.candidate.settings),
        "certificate": proof.certificate,
        "from_record": {"when": proof.when, "where": proof.where} if found.from_record else None,
        "missed": found.missed,
        "tuned": None if found.tuned is None else dict(found.tuned.document),
        "versions": dict(trial.measurement.versions),
        "elapsed_seconds": round(found.elapsed_seconds, 3),
    }
