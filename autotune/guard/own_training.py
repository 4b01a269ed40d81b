"""A guarded command of the user's own: placeholders take the checkpoint and the values of a ladder,
one rung after the other each time memory runs out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.resuming import Resuming
from autotune.guard.checkpoints import Checkpoint, CheckpointFolder
from autotune.guard.smaller import OWN_VALUES, Choice, Evidence
from autotune.guard.training import Start, Training

CHECKPOINT = "{checkpoint}"
STEP_NUMBER = "{step}"


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """Command with `{checkpoint}`, and a ladder of values for its other placeholders."""

    command_words: tuple[str, ...]
    ladder: Mapping[str, tuple[str, ...]]  # placeholder -> its values, one after the other
    rung: int = 0
    pattern: str | None = None  # of the checkpoints, `{step}` in it

    @property
    def launch_text(self) -> str:
        return " ".join(self.command_words)

    @property
    def key(self) -> str:
        return f"rung {self.rung}"

    @property
    def limits(self) -> str:
        if not any(CHECKPOINT in word for word in self.command_words):
            return "the command names no {checkpoint}, so a restart begins at step 0"
        if self.pattern is None:
            return "--checkpoints does not say where they are, so a restart begins at step 0"
        return ""

    def checkpoints(self, since: float) -> CheckpointFolder | None:
        if self.pattern is None:
            return None
        folder = Path(self.pattern).parent
        layout = Resuming(
            folder_setting="",
            folder=str(folder),
            names=(Path(self.pattern).name,),
            complete=("*",),
            resume={"": CHECKPOINT},
        )
        return CheckpointFolder(
            folder=folder,
            layout=layout,
            since=since,
        )

    def start(
        self,
        folder: Path,
        number: int,
        checkpoint: Checkpoint | None,
        why: str,
    ) -> Start:
        values = {name: values[self.rung] for name, values in self.ladder.items()}
        command_words: list[str] = []
        for word in self.command_words:
            for name, value in values.items():
                word = word.replace(f"{{{name}}}", value)
            if CHECKPOINT not in word:
                command_words.append(word)
            elif checkpoint is not None:
                command_words.append(word.replace(CHECKPOINT, str(checkpoint.path.absolute())))
            elif word == CHECKPOINT and command_words and command_words[-1].startswith("-"):
                del command_words[-1]  # the flag before it
        return Start(
            command_words=tuple(command_words),
            file=None,
            variables={},
        )

    def with_longest_rows(self, shown_prompt: int | None) -> OwnTraining:
        return self

    def with_rows_of(self, later: Training) -> OwnTraining:
        return self

    def smaller(self, evidence: Evidence) -> tuple[OwnTraining, Choice] | None:
        rungs = [len(values) for values in self.ladder.values()]
        if not rungs or self.rung + 1 >= min(rungs):
            return None
        following = replace(self, rung=self.rung + 1)
        change: dict[str, KnobValue] = {}
        for name, values in self.ladder.items():
            change[name] = values[following.rung]
        candidate = Candidate(
            knobs=change,
            settings=change,
            load={},
        )
        choice = Choice(
            candidate=candidate,
            change=change,
            learning=False,
            basis=OWN_VALUES,
        )
        return following, choice


def ladder_of(texts: Sequence[str], command_words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each placeholder from texts like `micro=8,4,2`."""
    ladder = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise BadInput(
                f"--values {text} names no values.",
                way_out="Write --values micro=8,4,2 with {micro} in the command.",
            )
        if not any(f"{{{name}}}" in word for word in command_words):
            raise BadInput(
                f"--values {text}: the command has no {{{name}}}.",
                way_out=f"Write {{{name}}} where its value goes.",
            )
        ladder[name] = tuple(values.split(","))
    lengths = {len(values) for values in ladder.values()}
    if len(lengths) > 1:
        raise BadInput(
            "The lists of --values have different lengths.",
            way_out="They are used one after the other, all at once: give each as many values.",
        )
    return ladder


def check_pattern(pattern: str | None) -> None:
    """Refuse a pattern of checkpoints whose steps could not be distinguished."""
    if pattern is not None and STEP_NUMBER not in Path(pattern).name:
        raise BadInput(
            f"--checkpoints {pattern}: its last part has no {STEP_NUMBER}.",
            way_out="Write {step} where the number of the step is: --checkpoints 'out/step_{step}'",
        )
