"""The guard's loop: start, watch, classify the end, choose how to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.core.files import FOR_ITS_OWNER, write_atomically
from autotune.core.secrets import Secrets, without_secret_arguments
from autotune.core.space import KnobValue
from autotune.diagnosis import Diagnosis
from autotune.guard.attempt import Attempt, signals_forwarded
from autotune.guard.checkpoints import Checkpoint, CheckpointFolder, FoundCheckpoints
from autotune.guard.ending import Ending, Reason, ending_of, in_phase
from autotune.guard.history import (
    AttemptRecord,
    History,
    indented,
    lines_of_end,
    lines_of_restart,
    summary,
)
from autotune.guard.learned import device_peak, learn, shown_step_rows
from autotune.guard.save_request import SaveRequest
from autotune.guard.smaller import Choice, Evidence
from autotune.guard.trainer_facts import clear_facts, read_facts
from autotune.guard.training import Start, Training
from autotune.guard.watch import AttemptWatch, GuardOptions, NoCheckpoints, Print
from autotune.guard.watched import MemoryWatcher, unseen_nodes

RESTARTED = frozenset({Reason.MEMORY, Reason.MACHINE, Reason.EARLY, Reason.HANG})
RELIEVED = frozenset({Reason.MEMORY, Reason.EARLY})  # ends after which less memory is needed

PEAK_GROWS = Diagnosis(
    known=True,
    is_memory=True,
    cause="activations",
    evidence="the peak grew towards the limit",
)
"""Diagnosis of a run that saved before memory ran out."""


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """Result of a guarded run."""

    ending: Ending
    history: History
    nothing_fits: bool = False  # memory ran out, and nothing that learns the same is left


@dataclass
class RunGuard:
    """Guarded run."""

    training: Training
    options: GuardOptions
    history: History
    say: Print
    since: float  # checkpoints written earlier are not this run's
    _watcher: MemoryWatcher = field(default_factory=MemoryWatcher)
    _refuted: list[Training] = field(default_factory=list)
    _changed_from: tuple[Training, Evidence] | None = None  # before our last change

    def run(self, checkpoint: Checkpoint | None = None) -> Guarded:
        """Guard the command until it ends for good. `checkpoint`: of an earlier guarded run."""
        if self._watcher.unseen:
            self._note(f"GPU memory can't be watched here: {self._watcher.unseen}.")
        if self.training.limits:
            self._note(f"{self.training.limits}.")
        nodes = unseen_nodes(self.training.launch_text, os.environ)
        if nodes:
            self._note(f"{nodes}.")
        start = self._start(checkpoint, "Goes on where an earlier guarded run ended.")
        choice: Choice | None = None
        while True:
            # 1. One attempt.
            ending, record = self._attempt(start, checkpoint)

            # 2. What follows from its end.
            learn(self.training, ending, record, str(self.history.file.absolute()))
            is_ours = self._is_by_our_change(ending, choice, record)
            if ending.reason not in RESTARTED and not is_ours:
                return self._conclude(ending)
            if self.history.restarts >= self.options.restarts:
                reason = f"none: --restarts {self.options.restarts} are used up"
                return self._conclude(ending, record, reason)
            before = _settings_of(self.training)
            choice = None
            if ending.reason in RELIEVED or is_ours:
                choice = self._next(ending, record, is_ours=is_ours)
            if choice is None and (ending.is_out_of_memory or is_ours):
                reason = "nothing that learns the same is left to try"
                return self._conclude(ending, record, reason, nothing_fits=True)

            # 3. The next attempt.
            available = self._checkpoints().find()
            checkpoint = available.newest
            start = self._start(checkpoint, _why(ending, record))
            self._report(ending, record, choice, available, before, start.file)

    def _start(self, checkpoint: Checkpoint | None, why: str) -> Start:
        number = len(self.history.attempts) + 1
        return self.training.start(self.options.out, number, checkpoint, why)

    # 1. One attempt.

    def _attempt(
        self,
        start: Start,
        checkpoint: Checkpoint | None,
    ) -> tuple[Ending, AttemptRecord]:
        """Start the command, watch it to its end, and classify the end."""
        # 1.1 On record before it starts.
        number = len(self.history.attempts) + 1
        folder = self._checkpoints()
        if checkpoint is not None:
            folder.point_to(checkpoint)
        record = AttemptRecord(
            number=number,
            config=None if start.file is None else str(start.file),
            command=without_secret_arguments(list(start.command_words)),
            began=time.time(),
            from_step=None if checkpoint is None else checkpoint.step,
            checkpoint=None if checkpoint is None else str(checkpoint.path),
        )
        self.history.attempts.append(record)
        self._write()
        clear_facts(self.options.out)
        self._watcher.begin()

        # 1.2 From its start to its end.
        save = SaveRequest(self.options.out)
        environment = {**os.environ, **start.variables, **save.variables}
        began = time.monotonic()
        attempt = Attempt(start.command_words, environment)
        with signals_forwarded(attempt):
            watch = AttemptWatch(
                attempt=attempt,
                watcher=self._watcher,
                record=record,
                folder=folder,
                save=save,
                options=self.options,
                note=self._note,
            )
            end = watch.to_the_end()
        seconds = time.monotonic() - began

        # 1.3 What ended it.
        ending = ending_of(
            end,
            attempt.tail.text(),
            self._watcher.host_evidence(),
            stop_requested=attempt.stop_requested,
            requested=watch.requested,
        )
        facts = read_facts(self.options.out)
        if facts is not None:
            ending = in_phase(ending, facts.ran_out_in)
        record.ended(ending, seconds, self._watcher.peaks(), facts)
        if ending.reason not in (Reason.FINISHED, Reason.STOPPED):
            record.output = self._keep_output(attempt, number)
        self._write()
        return ending, record

    def _keep_output(self, attempt: Attempt, number: int) -> str | None:
        """Keep the last output of an attempt that failed, without secrets."""
        path = self.options.out / f"attempt-{number}.log"
        text = Secrets(os.environ).hide(attempt.tail.text())
        try:
            write_atomically(path, text.encode(errors="replace"), mode=FOR_ITS_OWNER)
        except OSError:
            return None
        return str(path)

    def _checkpoints(self) -> CheckpointFolder | NoCheckpoints:
        return self.training.checkpoints(self.since) or NoCheckpoints()

    # 2. What follows.

    def _is_by_our_change(
        self,
        ending: Ending,
        choice: Choice | None,
        record: AttemptRecord,
    ) -> bool:
        """Return True if the script failed before its first step, with a change of ours alone."""
        has_stepped = record.last_step is not None and record.last_step > (record.from_step or 0)
        return choice is not None and ending.reason == Reason.SCRIPT and not has_stepped

    def _next(
        self,
        ending: Ending,
        record: AttemptRecord,
        *,
        is_ours: bool,
    ) -> Choice | None:
        """Choose the next configuration; the failed one is never tried again.

        `is_ours`: the failed one is a change that does not work here. Another one is chosen for the
        configuration before it, by what that one has shown.
        """
        self.training = self.training.with_longest_rows(record.longest_prompt)
        self._refuted.append(self.training)
        if is_ours and self._changed_from is not None:
            self.training, evidence = self._changed_from
        else:
            evidence = Evidence(
                diagnosis=ending.diagnosis or PEAK_GROWS,
                peak_bytes=device_peak(self.training, record),
                refuted=frozenset(),
                may_change=self.options.may_change,
                rows=shown_step_rows(record),
            )
        keys = set()
        for refuted in self._refuted:
            comparable = refuted.with_rows_of(self.training)
            keys.add(comparable.key)
        evidence = replace(evidence, refuted=frozenset(keys))
        self._changed_from = (self.training, evidence)
        following = self.training.smaller(evidence)
        if following is None:
            return None
        self.training, choice = following
        record.change = dict(choice.change)
        record.basis = choice.basis
        return choice

    def _report(
        self,
        ending: Ending,
        record: AttemptRecord,
        choice: Choice | None,
        available: FoundCheckpoints,
        before: Mapping[str, KnobValue],
        file: Path | None,
    ) -> None:
        """Print the block of an intervention."""
        resumed_at = record.began if available.newest is None else available.newest.written
        self.history.lost_seconds += max(0.0, time.time() - max(resumed_at, record.began))
        remaining = self.options.restarts - self.history.restarts - 1
        lines = lines_of_end(ending, record)
        lines += lines_of_restart(choice, before, available, file, remaining)
        self.say(indented(lines))
        self._write()

    def _conclude(
        self,
        ending: Ending,
        record: AttemptRecord | None = None,
        reason: str = "",
        *,
        nothing_fits: bool = False,
    ) -> Guarded:
        """Print how it ended for good. `reason`: why it is not started again."""
        if record is not None:
            lines = lines_of_end(ending, record)
            lines.append(f"next     {reason}")
            newest = self._checkpoints().find().newest
            if newest is not None:
                lines.append(f"saved    step {newest.step}, {newest.path}")
            self.say(indented(lines))
        self.history.status = "nothing_fits" if nothing_fits else str(ending.reason)
        self.history.exit_code = ending.end.shell_code
        guarded = Guarded(
            ending=ending,
            history=self.history,
            nothing_fits=nothing_fits,
        )
        self._write()
        self.history.write_page()
        self.say(indented([summary(self.history)]))
        return guarded

    # Messages.

    def _note(self, text: str) -> None:
        self.history.notes.append(text)
        self.say(indented([text]))

    def _write(self) -> None:
        problem = self.history.write()
        if problem is not None and problem not in self.history.notes:
            self._note(problem)


def _why(ending: Ending, record: AttemptRecord) -> str:
    """Return the reason of a restart, for the head of its file."""
    place = "before the first step"
    if record.last_step is not None:
        place = f"after step {record.last_step}"
    return f"Attempt {record.number} ended {place}: {ending.reason} ({ending.evidence or '-'})."


def _settings_of(training: Training) -> Mapping[str, KnobValue]:
    candidate = getattr(training, "candidate", None)
    return {} if candidate is None else candidate.settings
