"""Guarded trainings: each gives the words of the next start, and the next smaller configuration.

`KnownTraining` is one of a supported framework, `OwnTraining` (`own_training.py`) any command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import yaml

from autotune.core.errors import AutotuneError
from autotune.core.files import TO_BE_RUN, comments, write_atomically
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.core.user_script import LaunchScript, UserScript
from autotune.core.yaml_document import read_document
from autotune.frameworks.changed_launch import changed_script, changes_of
from autotune.frameworks.configuration_files import unshare
from autotune.frameworks.resuming import Resuming
from autotune.frameworks.trl.output_files import with_changes
from autotune.guard.checkpoints import Checkpoint, CheckpointFolder
from autotune.guard.command_settings import (
    as_script,
    settings_of_flags,
    with_flags,
    with_settings,
)
from autotune.guard.own_script import flags_of, is_in, limits_of, takes_checkpoint
from autotune.guard.smaller import Choice, Evidence, next_choice, same_learning
from autotune.prediction.guarded_runs import with_prompts_of
from autotune.preflight.command_words import VARIABLE, with_file
from autotune.request.job_builder import ParsedRequest
from autotune.request.measured_data import (
    PROMPT_KNOB,
    hold_longest_prompt,
    with_longest_prompt,
)

YAML_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of one attempt."""

    command_words: tuple[str, ...]
    file: Path | None  # configuration that it reads
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ChangedText:
    """File of a restart, and the settings that it changes."""

    text: str
    changed: Mapping[str, object]


class Training(Protocol):
    """Guarded training in one configuration."""

    @property
    def command_words(self) -> tuple[str, ...]:
        """The user's command."""

    @property
    def launch_text(self) -> str:
        """The command, and the script that it starts."""

    @property
    def key(self) -> str:
        """Identity of the configuration."""

    @property
    def limits(self) -> str:
        """Parts that a restart does not continue; empty: none."""

    def checkpoints(self, since: float) -> CheckpointFolder | None:
        """Return where this run's checkpoints are; None: unknown."""

    def start(
        self,
        folder: Path,
        number: int,
        checkpoint: Checkpoint | None,
        why: str,
    ) -> Start:
        """Write the configuration of an attempt, and return its command.

        An unchanged one without a checkpoint is the user's own file.
        """

    def with_longest_rows(self, shown_prompt: int | None) -> Training:
        """Return it with the longest prompt of its data, which predictions need; at least as long
        as the run has shown.
        """

    def with_rows_of(self, later: Training) -> Training:
        """Return it with the longest prompt of a later configuration, to compare both."""

    def smaller(self, evidence: Evidence) -> tuple[Training, Choice] | None:
        """Return the next configuration that learns the same; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class KnownTraining:
    """Training by a configuration file or a launch script."""

    request: ParsedRequest
    original: Candidate  # of the user's file
    candidate: Candidate
    config: Path
    command_words: tuple[str, ...]

    @property
    def launch_text(self) -> str:
        launch = self.request.job.task.workload.launch
        script = "" if launch is None else launch.text
        return f"{' '.join(self.command_words)}\n{script}"

    @property
    def key(self) -> str:
        return self.candidate.id

    @property
    def layout(self) -> Resuming | None:
        return self.request.trainer.resuming

    @property
    def limits(self) -> str:
        limits = []
        if self.script is not None:
            limits.append(limits_of(self.command_words, self.script))
        if self.layout is None:
            limits.append(f"how {self.request.trainer.name} stores checkpoints is not known")
        elif self.layout.limits:
            limits.append(self.layout.limits)
        if not self.has_its_gpus_here:
            limits.append("its GPUs are not on this machine, so their memory is not seen")
        return "; ".join(filter(None, limits))

    @property
    def script(self) -> UserScript | None:
        """The user's own script of TRL."""
        return self.request.job.task.workload.script

    @property
    def has_its_gpus_here(self) -> bool:
        """Return False at the head of a cluster without the GPUs of the run."""
        return self.request.job.task.hardware.here

    @property
    def stated(self) -> dict[str, object]:
        """Return all settings of the user's file and of the command's flags, with the values that
        the framework would use.
        """
        workload = self.request.job.task.workload
        of_script = {} if workload.launch is None else _values_of(workload.launch)
        of_job = {**workload.user_settings, **workload.stated}
        settings = {**of_script, **self.candidate.settings, **of_job}
        if workload.launch is None:
            settings |= settings_of_flags(self.command_words)
        return settings

    def checkpoints(self, since: float) -> CheckpointFolder | None:
        if self.layout is None or not self.layout.resume:
            return None
        if not self._is_resumed:
            return None
        folder = self.layout.folder_of(self.stated)
        return CheckpointFolder(
            folder=folder,
            layout=self.layout,
            since=since,
        )

    def start(
        self,
        folder: Path,
        number: int,
        checkpoint: Checkpoint | None,
        why: str,
    ) -> Start:
        is_changed = self.candidate != self.original
        if checkpoint is None and not is_changed:
            return Start(
                command_words=self.command_words,
                file=self.config,
                variables={VARIABLE: str(self.config)},
            )
        if self.script is not None:
            return self._start_of_script(self.script, folder / f"attempt-{number}.sh", checkpoint)
        file, changed = self._write(folder, number, checkpoint, why)
        command_words = with_file(self.command_words, str(self.config), file)
        command_words = with_settings(command_words, changed)
        return Start(
            command_words=tuple(command_words),
            file=file,
            variables={VARIABLE: str(file)},
        )

    @property
    def _is_resumed(self) -> bool:
        """Return False for a script that no checkpoint reaches."""
        if self.script is None:
            return True
        return is_in(self.command_words, self.script) and takes_checkpoint(self.script)

    def _start_of_script(
        self,
        script: UserScript,
        file: Path,
        checkpoint: Checkpoint | None,
    ) -> Start:
        """Return the command with the flags of an attempt; the file is for the reader."""
        task = self.request.job.task
        flags: dict[str, KnobValue] = dict(self._settings_to_resume(checkpoint))
        flags |= flags_of(self.candidate, task, script) or {}
        command_words = with_flags(self.command_words, flags)
        write_atomically(file, as_script(command_words).encode(), mode=TO_BE_RUN)
        return Start(
            command_words=tuple(command_words),
            file=file,
            variables={},
        )

    def _write(
        self,
        folder: Path,
        number: int,
        checkpoint: Checkpoint | None,
        why: str,
    ) -> tuple[Path, Mapping[str, object]]:
        """Write the configuration of an attempt; return it, and the settings that changed."""
        added = self._settings_to_resume(checkpoint)
        launch = self.request.job.task.workload.launch
        if launch is None:
            file = folder / f"attempt-{number}.yaml"
            changed = self._yaml(added, why)
            write_atomically(file, changed.text.encode())
        else:
            # Beside the original: its paths may be relative to its own folder.
            name = f"{self.config.stem}.attempt-{number}{self.config.suffix}"
            file = self.config.with_name(name)
            changed = self._script(launch, added, folder)
            write_atomically(file, changed.text.encode(), mode=TO_BE_RUN)
        return file, changed.changed

    def with_longest_rows(self, shown_prompt: int | None) -> KnownTraining:
        request = self.request
        with contextlib.suppress(AutotuneError):
            request = with_longest_prompt(request)
        if shown_prompt is not None and shown_prompt > self._longest_prompt(request):
            request = hold_longest_prompt(request, shown_prompt)
        return self._with_prompts_of(request)

    def _longest_prompt(self, request: ParsedRequest) -> int:
        """Return the longest prompt by the data or, without them, by the settings."""
        of_settings = self.candidate.settings.get(PROMPT_KNOB)
        longest = request.job.task.workload.held_values.get(PROMPT_KNOB, of_settings)
        if not isinstance(longest, int):
            return 0
        return longest

    def with_rows_of(self, later: Training) -> KnownTraining:
        if not isinstance(later, KnownTraining):
            return self
        return self._with_prompts_of(later.request)

    def _with_prompts_of(self, request: ParsedRequest) -> KnownTraining:
        return replace(
            self,
            request=request,
            original=with_prompts_of(request.job, self.original),
            candidate=with_prompts_of(request.job, self.candidate),
        )

    def smaller(self, evidence: Evidence) -> tuple[KnownTraining, Choice] | None:
        choice = next_choice(
            self.request, self.candidate, evidence, keeps_batches=self.keeps_batches
        )
        if choice is None:
            return None
        if not same_learning(self.request, self.original, choice.candidate, evidence.may_change):
            return None
        if not self._can_become(choice.candidate):
            return None
        return replace(self, candidate=choice.candidate), choice

    def _can_become(self, candidate: Candidate) -> bool:
        """Return False for a script that flags don't turn into the candidate."""
        if self.script is None:
            return True
        if not is_in(self.command_words, self.script):
            return False
        flags = flags_of(candidate, self.request.job.task, self.script)
        return flags is not None

    @property
    def keeps_batches(self) -> bool:
        """Return True if another micro-batch would change the number of steps."""
        if self.layout is None:
            return False
        for name, allowed in self.layout.batch_changes.items():
            if self.stated.get(name) not in allowed and not self.stated.get("max_steps"):
                return True
        return False

    def _settings_to_resume(self, checkpoint: Checkpoint | None) -> dict[str, KnobValue]:
        if self.layout is None:
            return {}
        settings: dict[str, KnobValue] = {}
        for name, value in self.layout.also.items():
            stated = self.stated.get(name, value)
            if stated != value:
                settings[name] = value
        if checkpoint is not None:
            settings |= self.layout.settings_for(checkpoint.path, checkpoint.step)
        return settings

    def _yaml(self, added: Knobs, why: str) -> ChangedText:
        """Return the user's file with nothing changed but these settings."""
        # 1. What changes: the settings to go on, and those that differ from the user's file.
        task = self.request.job.task
        before = with_changes(self.original, task)
        after = with_changes(self.candidate, task)
        changed: dict[str, object] = dict(added)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                changed[name] = after.get(name)

        # 2. The rest of the file as it is.
        content = dict(read_document(self.config).content)
        content |= changed
        for name, value in changed.items():
            if value is None:
                del content[name]
        head = comments([f"{self.config.name}, changed by autotune guard.", why])
        body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        return ChangedText(text=head + body, changed=changed)

    def _script(
        self,
        launch: LaunchScript,
        added: Knobs,
        folder: Path,
    ) -> ChangedText:
        """Return the user's launch script with these settings."""
        workload = self.request.job.task.workload
        changed: dict[str, KnobValue] = {}
        if self.candidate != self.original:
            knobs = dict(self.candidate.knobs)
            for name, value in self.candidate.settings.items():
                if value != self.original.settings.get(name):
                    knobs[name] = value
            fields = self.request.trainer.fields()
            changed = changes_of(workload.stated, workload.defaults, knobs, fields)
        changed |= added
        _, edits = unshare(launch, changed, self.candidate.settings, folder)
        text = changed_script(launch, changed, edits)
        return ChangedText(text=text, changed={})


def _values_of(launch: LaunchScript) -> dict[str, object]:
    """Return the settings of a launch script: the job has only those that memory depends on."""
    values: dict[str, object] = {}
    for name, setting in launch.stated.items():
        values[name] = setting.text
        with contextlib.suppress(yaml.YAMLError):
            values[name] = True if setting.text is None else yaml.safe_load(setting.text)
    return values
