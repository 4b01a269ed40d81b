"""From a question to its answer: by the record, by a search, and by a wider one where nothing fits as it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.answering import relaxing
from autotune.answering.recall import Record
from autotune.answering.soaking import soak
from autotune.candidate import Candidate
from autotune.conclude import conclude
from autotune.events import BestChanged, Event, Listener, Note, ProbeEnded
from autotune.executors.base import Executor
from autotune.foresight import foresee
from autotune.question import Question
from autotune.recommendation import Recommendation, Trial
from autotune.space import SearchSpace
from autotune.study import Study, open_study
from autotune.trainers.base import Trainer
from autotune.tune import Clock, baseline_candidate, legal_candidates, tune


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, and what may give way where nothing of it fits."""

    question: Question
    trainer: Trainer
    candidates: tuple[Candidate, ...]
    whole_space: SearchSpace
    """As it was before anything was held."""

    pinned: frozenset[str] = frozenset()
    """What the user pinned with --hold: it never gives way."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The recommendation, and the question that it answers: a wider one than was asked where something had to give way."""

    question: Question
    recommendation: Recommendation


def answer(asked: Asked, executor: Executor, listener: Listener, *, soak_seconds: float | None = None) -> Answer:
    """Everything that `autotune run` does between its flags and its files."""
    question = asked.question
    clock = Clock(question.budget_seconds)
    # The training environment is tried before the study is opened: where it will not do, nothing is left behind.
    versions = executor.prepare()
    found = _from_record(asked, Record(question, versions), listener)
    if found is None:
        if question.storage.startswith(f"sqlite:///{question.out.resolve()}"):
            question.out.mkdir(parents=True, exist_ok=True)
        found = Answer(question=question, recommendation=_search(asked, executor, listener, clock, versions))
        found = _with_less(asked, found, executor, listener, clock, versions)
        Record(question, versions).keep_answer(found.recommendation)
    if soak_seconds is None or found.recommendation.interrupted:
        return found
    soaked = soak(found.question, found.recommendation, executor, listener, soak_seconds)
    return replace(found, recommendation=soaked)


def _from_record(asked: Asked, record: Record, listener: Listener) -> Answer | None:
    known = record.answer()
    if known is None or known.from_record is None:
        return None
    source = known.from_record
    packages = " ".join(f"{name} {version}" for name, version in source.versions.items() if name in ("trl", "torch", "vllm"))
    listener(Note(text=f"From the record: measured {source.when} on {source.where} with {packages}. --fresh measures again."))
    wider = relaxing.relaxed(asked.question, asked.whole_space, asked.pinned, asked.trainer) if known.relaxed else None
    return Answer(question=wider.question if wider else asked.question, recommendation=known)


def _search(
    asked: Asked,
    executor: Executor,
    listener: Listener,
    clock: Clock,
    versions: Mapping[str, str],
    known: Sequence[Trial] = (),
) -> Recommendation:
    question, trainer = asked.question, asked.trainer
    record = Record(question, versions)
    baseline = baseline_candidate(question, trainer)
    foreseen = foresee(question, trainer, [*asked.candidates, *([baseline] if baseline else [])])
    earlier = record.earlier()
    if earlier.unreadable:
        listener(Note(text=f"{earlier.unreadable} lines of the record can't be read, and were passed over."))
    study = open_study(question, asked.candidates, baseline, foreseen, earlier=(*earlier.trials, *known))
    if (others := len(study.agenda.earlier)) and not known:
        listener(Note(text=f"{others} measurements of earlier searches count here as well; --fresh does without them."))
    told = _with_the_best(listener, question, study, executor, clock)
    return tune(question, study=study, executor=executor, listener=record.keep_probes(told), clock=clock)


def _with_the_best(listener: Listener, question: Question, study: Study, executor: Executor, clock: Clock) -> Listener:
    """The listener, which hears of every new best what the answer would be if the search ended with it."""
    best: Candidate | None = None

    def hear(event: Event) -> None:
        nonlocal best
        listener(event)
        if isinstance(event, ProbeEnded) and event.best is not None and event.best.candidate != best:
            best = event.best.candidate
            so_far = conclude(study.view, question, proven=None, loads=executor.loads, elapsed_seconds=clock.elapsed)
            listener(BestChanged(question=question, answer=so_far))

    return hear


def _with_less(
    asked: Asked, found: Answer, executor: Executor, listener: Listener, clock: Clock, versions: Mapping[str, str]
) -> Answer:
    """Where nothing fits as it was asked: the first that does when learning knobs give way in their order."""
    first = found.recommendation
    lacked_memory = first.counts.out_of_memory > 0 and first.proven in ("no better candidate possible", "not proven infeasible")
    if first.winner is not None or first.interrupted or not lacked_memory or not clock.left:
        return found
    wider = relaxing.relaxed(asked.question, asked.whole_space, asked.pinned, asked.trainer)
    if wider is None:
        return found
    names = ", ".join(name for name in wider.question.space.relax if name in wider.question.space)
    listener(Note(text=f"Nothing fits as it was asked. Now with less, in this order: {names}."))
    candidates = legal_candidates(wider.question, asked.trainer)
    again = replace(asked, question=wider.question, candidates=candidates)
    second = _search(again, executor, listener, clock, versions, known=first.trials)
    both = relaxing.with_both(first, second, relaxing.rows_left_out(wider, second, asked.trainer))
    if both.winner is not None:
        listener(Note(text=relaxing.in_words(both, asked.question.space)))
    return Answer(question=wider.question, recommendation=both)
