"""autotune from Python, in the words of the command line: `run`, `predict`, `diagnose`. The commands call these.

    tuned = autotune.run(model="Qwen2.5-0.5B", budget="20m", listener=print)
    if tuned.winner is not None:
        print(tuned.files, tuned.document["recommendation"]["tokens_per_second"])

Nothing is printed: a listener hears what happens, as the events of `autotune.events`. Errors are those of `autotune.errors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autotune.asking.flags import Flags
from autotune.asking.keywords import Asking, Predicting, Searching, flags_of, typed
from autotune.candidate import Candidate, KnobValue
from autotune.errors import BadInput, IllegalConfiguration
from autotune.events import Begun, Foretold, Listener, unheard
from autotune.forecast import Forecast, WayToFit
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.recommendation import Recommendation

if TYPE_CHECKING:
    from autotune.asking.understanding import Understood
    from autotune.diagnose import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What `run` answers."""

    question: Question
    """The one that is answered: a wider one than was asked where something had to give way."""

    recommendation: Recommendation | None
    """The answer from measurements; None where nothing could be measured here."""

    forecast: Forecast | None
    """The answer from predictions alone; None where it was measured."""

    document: Mapping[str, Any]
    """All of it as plain data: what `run --json` prints and `recommendation.json` holds."""

    @property
    def winner(self) -> Candidate | None:
        """The recommended configuration; None where nothing fits, or it can't be decided."""
        best = self.recommendation.winner if self.recommendation else self.forecast.winner if self.forecast else None
        return None if best is None else best.candidate

    @property
    def files(self) -> tuple[Path, ...]:
        """The winner in the framework's own files, ready to train with."""
        recommended = self.document["recommendation"]
        return tuple(Path(file) for file in recommended["files"]) if recommended else ()


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What `predict` answers."""

    question: Question
    candidate: Candidate
    prediction: Prediction
    ways: tuple[WayToFit, ...]
    """What would make it fit, the cheapest first; none for what fits."""

    document: Mapping[str, Any]
    """All of it as plain data: what `predict --json` prints."""


def run(*, listener: Listener = unheard, soak: str | None = None, **asked: Unpack[Searching]) -> Tuned:
    """Measure candidates on this machine, or predict them where its GPUs are not those asked about, and recommend the fastest
    that fits. Writes the same files as the command, into `out`. Ctrl-C ends the search and not the answer: what was measured
    so far is concluded from, and `recommendation.interrupted` says so.

    `soak`, like "5m", runs the winner that much longer.
    """
    return run_flags(flags_of(asked), listener=listener, soak=soak)


def run_flags(
    flags: Flags, *, listener: Listener = unheard, soak: str | None = None, pinned: frozenset[str] = frozenset()
) -> Tuned:
    """The same for flags that are put together already. What is `pinned` gives way to nothing, as if --hold named it."""
    from autotune.asking.command import understand
    from autotune.asking.understanding import possible_candidates
    from autotune.report import check_folder
    from autotune.tune import legal_candidates
    from autotune.units import parse_seconds

    understood = understand(flags)
    understood = dataclasses.replace(_with_data(understood), pinned=understood.pinned | pinned)
    check_folder(understood.question.out)
    seconds = None if soak is None else parse_seconds(soak)
    candidates = possible_candidates(understood, legal_candidates)
    listener(_begun(understood, candidates))
    words = _typed(flags, soak)
    if understood.question.mode == "predict":
        return _forecast(understood, candidates, confirm_with=shlex.join(_typed(dataclasses.replace(flags, mode="probe"), soak)))
    return _search(understood, candidates, words, listener, seconds)


def predict(*, listener: Listener = unheard, **asked: Unpack[Predicting]) -> Predicted:
    """Say without a GPU whether one configuration fits, by how much, what takes the memory, and what would help."""
    return predict_flags(flags_of(asked), listener=listener)


def predict_flags(flags: Flags, *, listener: Listener = unheard) -> Predicted:
    """The same for flags that are put together already."""
    from autotune.advice import Adviser
    from autotune.foresight import open_foresight
    from autotune.predict.unknown import Way, agreed, worst
    from autotune.report import prediction_document

    possible, notes = _possible(dataclasses.replace(flags, mode="predict"))
    first = possible[0][1]
    with contextlib.closing(open_foresight(first.question, first.trainer)) as foresight:
        ways = [
            Way(facts=facts, candidate=candidate, prediction=foresight.of(understood.question).predict(candidate))
            for facts, understood, candidate in possible
        ]
        most, prediction = worst(ways), agreed(ways)
        understood = next(one for facts, one, _ in possible if facts == most.facts)
        question, trainer, candidate = understood.question, understood.trainer, most.candidate
        understood = _with_data(dataclasses.replace(understood, notes=(*understood.notes, *notes)))
        question = understood.question
        listener(_begun(understood, (candidate,)))
        listener(Foretold(candidate=candidate, prediction=prediction))
        adviser = Adviser(question=question, space=understood.whole_space, trainer=trainer, foresight=foresight.of(question))
        fitting = () if prediction.fits else adviser.ways_to_fit(candidate, most.prediction)
    document = prediction_document(question, candidate, prediction, fitting, unknown=ways if most.facts else ())
    return Predicted(question=question, candidate=candidate, prediction=prediction, ways=fitting, document=document)


def _with_data(understood: Understood) -> Understood:
    """With what the user's own rows are like, where there are any. That they can't be read is said, and stops nothing."""
    question = understood.question
    try:
        found = understood.trainer.row_lengths(question.job)
    except BadInput as error:
        return dataclasses.replace(understood, notes=(*understood.notes, error.what))
    return dataclasses.replace(understood, question=dataclasses.replace(question, data=found)) if found else understood


def _possible(flags: Flags) -> tuple[list[tuple[Mapping[str, KnobValue], Understood, Candidate]], tuple[str, ...]]:
    """Every way in which what is unknown can be, and what is said of those that cannot: an illegal one was never run."""
    from autotune.asking.command import understand
    from autotune.asking.flags import ways_of
    from autotune.asking.understanding import candidate_in_question

    found, notes, refusal = [], [], None
    for facts, given in ways_of(flags):
        understood = understand(given)
        try:
            found.append((facts, understood, candidate_in_question(understood)))
        except IllegalConfiguration as error:
            refusal = refusal or error
            notes.append(f"{' '.join(f'{name}={value}' for name, value in facts.items())} is left out: {error.what}")
    if refusal is not None and not found:
        raise refusal
    return found, tuple(notes)


def diagnose(log: str | PathLike[str] | Iterable[str], **asked: Unpack[Asking]) -> Diagnosis:
    """Say what failed first in a training log, a file or its lines, and what helps.

    With `config` (the file that failed) and `gpus` (where it ran; this machine's otherwise) each remedy says what it would do.
    """
    from autotune.diagnose import diagnose_lines
    from autotune.diagnose.files import lines_of_file

    found = diagnose_lines(lines_of_file(str(log)) if isinstance(log, str | PathLike) else log)
    return with_effects(found, flags_of(asked)) if asked.get("config") else found


def with_effects(diagnosis: Diagnosis, flags: Flags) -> Diagnosis:
    """Each remedy with what it would do to the configuration that failed; one that can't be predicted says so, and the rest
    stands."""
    from autotune import detect
    from autotune.asking.understanding import candidate_in_question, understand
    from autotune.diagnose.effects import Effects
    from autotune.foresight import open_foresight

    if flags.gpus == "local" and detect.hardware("local").kind != "cuda":
        raise BadInput(
            "--config is predicted for GPUs, and this machine has none.", way_out="Say where it ran: --gpus 2xA100-40G"
        )
    if not Path(str(flags.config)).is_file():
        raise BadInput(
            f"--config {flags.config} is no file.", way_out="Name the YAML file that was given to `trl grpo --config`."
        )
    try:
        understood = understand(dataclasses.replace(flags, mode="predict"))
        question, trainer = understood.question, understood.trainer
        candidate = candidate_in_question(understood)
        with contextlib.closing(open_foresight(question, trainer)) as foresight:
            effects = Effects(
                question=question, space=understood.whole_space, trainer=trainer, foresight=foresight, candidate=candidate
            )
            return effects.on(diagnosis)
    except BadInput as error:
        why = f"nothing could be predicted for {flags.config}: {error}"
        return dataclasses.replace(diagnosis, remarks=(*diagnosis.remarks, why))


def _typed(flags: Flags, soak: str | None) -> list[str]:
    return ["autotune", "run", *([] if soak is None else ["--soak", soak]), *typed(flags)]


def _begun(understood: Understood, candidates: tuple[Candidate, ...]) -> Begun:
    return Begun(question=understood.question, candidates=candidates, assumed=understood.assumed, notes=understood.notes)


def _search(
    understood: Understood, candidates: tuple[Candidate, ...], words: list[str], listener: Listener, soak_seconds: float | None
) -> Tuned:
    """Measured here."""
    from autotune.answering.answer import Asked, answer
    from autotune.answering.opening import open_executor
    from autotune.report import keeping_the_best

    asked = Asked(
        question=understood.question,
        trainer=understood.trainer,
        candidates=candidates,
        whole_space=understood.whole_space,
        pinned=understood.pinned,
    )
    keep = keeping_the_best(
        listener, lambda question, best: _written(dataclasses.replace(understood, question=question), best, words)
    )
    with contextlib.closing(open_executor(understood.question, understood.trainer)) as executor:
        found = answer(asked, executor, keep, soak_seconds=soak_seconds)
    understood = dataclasses.replace(understood, question=found.question)
    described = _written(understood, found.recommendation, words)
    return Tuned(question=found.question, recommendation=found.recommendation, forecast=None, document=described)


def _written(understood: Understood, answer: Recommendation, words: list[str]) -> Mapping[str, Any]:
    """The winner's files and the page, in the output folder; the document that describes them."""
    from autotune.report import annotate, document, head_lines, publish, render

    question, trainer, winner = understood.question, understood.trainer, answer.winner
    head = head_lines(question, answer)
    commands = _commands(question.out, answer, words)
    return publish(
        question.out,
        None if winner is None else lambda folder: annotate(trainer.write_files(winner.candidate, question.job, folder), head),
        lambda files: document(question, answer, files, warnings=understood.notes, commands=commands),
        render,
    )


def _commands(out: Path, answer: Recommendation, words: list[str]) -> dict[str, str]:
    """What to type next."""
    asked = [word for word in words if word not in ("--fresh", "--resume")]
    train = {} if answer.winner is None else {"train": shlex.join(["bash", str(out / "launch.sh")])}
    return {**train, "measure again": _with(asked, "--fresh"), "go on": _with(asked, "--resume")}


def _with(words: list[str], *more: str) -> str:
    """Flags go before what follows a bare `--`."""
    end = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:end], *more, *words[end:]])


def _forecast(understood: Understood, candidates: tuple[Candidate, ...], *, confirm_with: str) -> Tuned:
    """Nothing is measured: every candidate is predicted, and what to run on the target is said."""
    from autotune.forecasting import forecast
    from autotune.foresight import open_foresight
    from autotune.report import forecast_document, publish, render
    from autotune.tune import baseline_candidate

    question, trainer = understood.question, understood.trainer
    with contextlib.closing(open_foresight(question, trainer)) as foresight:
        answer = forecast(question, foresight, candidates, baseline_candidate(question, trainer))
    winner = answer.winner
    described = publish(
        question.out,
        None if winner is None else lambda folder: trainer.write_files(winner.candidate, question.job, folder),
        lambda files: forecast_document(question, answer, files, confirm_with=confirm_with, warnings=understood.notes),
        render,
    )
    return Tuned(question=question, recommendation=None, forecast=answer, document=described)
