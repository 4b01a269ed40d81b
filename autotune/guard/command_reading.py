"""From the words of a command to the training that is guarded, and from an earlier guarded run to
where it goes on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autotune.core.errors import AutotuneError, BadInput, HardwareNotHere
from autotune.core.space import setting_text
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.guard.checkpoints import Checkpoint
from autotune.guard.command_settings import as_script, settings_of_flags
from autotune.guard.history import attempts_in
from autotune.guard.own_training import OwnTraining
from autotune.guard.training import YAML_ENDINGS, KnownTraining, Training
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources

PYTHON_ENDING = ".py"
COMMAND_FILE = "command.sh"
PROVEN_METHOD = "grpo"
ROWS_OF_A_STEP = frozenset({MICRO_BATCH, ACCUMULATION})
HALVES_BATCHES = "auto_find_batch_size"


def known_training(
    config: str | None,
    command_words: tuple[str, ...],
    request: Flags,
    out: Path,
) -> KnownTraining | None:
    """Return the training of a framework; None for another command.

    A configuration that is given has to be readable; a command alone may be anybody's.
    """
    if config is not None and config.endswith(YAML_ENDINGS):
        flags = request.replace(config=config, method=method_of(command_words) or request.method)
        training = _opened(flags, Path(config), command_words)
        overridden = overriding_flags(training)
        if overridden:
            training = _opened(flags.replace(set=overridden), Path(config), command_words)
        return training
    if config is not None and not config.endswith(PYTHON_ENDING):
        return _opened(request.replace(from_command=config), Path(config), command_words)
    script = out / COMMAND_FILE
    out.mkdir(parents=True, exist_ok=True)
    script.write_text(as_script(command_words), encoding="utf-8")
    command = ("bash", str(script))
    try:
        training = _opened(request.replace(from_command=str(script)), script, command)
    except BadInput:
        if config is not None:
            raise
        return None
    if training.script is not None:
        return replace(training, command_words=command_words)  # flags go to the command itself
    return training


def overriding_flags(training: Training) -> tuple[str, ...]:
    """Return the knobs that flags of the command set, as in `--set`: they win over CONFIG's."""
    if not isinstance(training, KnownTraining):
        return ()
    stated = settings_of_flags(training.command_words)
    if not stated.keys().isdisjoint(ROWS_OF_A_STEP):
        # One of them alone would be taken for a change at the same global batch.
        for name in training.candidate.settings.keys() & ROWS_OF_A_STEP:
            stated.setdefault(name, training.candidate.settings[name])
    texts = []
    for name, value in stated.items():
        if name in training.request.whole_space or name in ROWS_OF_A_STEP:
            texts.append(f"{name}={setting_text(value)}")
    return tuple(texts)


def _opened(
    flags: Flags,
    config: Path,
    command_words: tuple[str, ...],
) -> KnownTraining:
    request = _read(flags)
    candidate = candidate_of_job(request)
    return KnownTraining(
        request=request,
        original=candidate,
        candidate=candidate,
        config=config,
        command_words=command_words,
    )


def _read(flags: Flags) -> ParsedRequest:
    with contextlib.suppress(HardwareNotHere):
        return read_sources(flags, mode="probe").parse()
    # The head of a cluster may have no GPU.
    return read_sources(flags, mode="predict").parse()


def method_of(command_words: Sequence[str]) -> str | None:
    """Return the method that the command names: `trl sft`, `-m trl.scripts.sft`, `my_sft.py`."""
    from autotune import frameworks

    methods = {method for name, method in frameworks.trainers() if name == "trl"}
    for before, word in pairwise(("", *command_words)):
        parts = [word]
        if before == "-m" or word.endswith(PYTHON_ENDING):
            parts = re.split(r"[./_]", word)
        for part in parts:
            if part in methods:
                return part
    return None


def check_learning(training: Training, may_change: Collection[str]) -> None:
    """Refuse a training that would change by itself what is learned, and names in --may-change of
    settings that change nothing.
    """
    if not isinstance(training, KnownTraining):
        return
    if training.stated.get(HALVES_BATCHES) and HALVES_BATCHES not in may_change:
        raise BadInput(
            f"{HALVES_BATCHES} halves the batch without accumulating more when memory runs out:"
            " from then on another global batch is learned.",
            way_out=f"Remove it from {training.config}. The guard keeps the global batch.",
        )
    request = training.request
    settings = training.candidate.settings
    names = {knob.name for knob in request.whole_space.learning_knobs(settings)}
    for name in sorted(may_change):
        if name not in names | {HALVES_BATCHES}:
            raise BadInput(
                f"--may-change {name}: no setting that the guard could change.",
                way_out=f"Name one of {', '.join(sorted(names))}.",
            )


def can_be_proven(training: Training) -> bool:
    """Return True if preflight reads this configuration."""
    if not isinstance(training, KnownTraining) or training.script is not None:
        return False
    workload = training.request.job.task.workload
    return (
        training.request.trainer.reads_config
        and workload.launch is None
        and (workload.method == PROVEN_METHOD)
    )


def resumed(
    training: Training, earlier: Mapping[str, Any]
) -> tuple[Training, Checkpoint | None, float]:
    """Return the configuration of an earlier guarded run, its last checkpoint and its begin."""
    attempts = attempts_in(earlier)
    since = min((float(attempt["began"]) for attempt in attempts), default=0.0)
    for attempt in attempts:
        training = _with_change(training, attempt.get("change") or {})
    folder = training.checkpoints(since)
    checkpoint = None if folder is None else folder.find().newest
    return training, checkpoint, since


def is_changed(earlier: Mapping[str, Any]) -> bool:
    """Return True if an earlier guarded run went on with another configuration than the file's."""
    return any(attempt.get("change") for attempt in attempts_in(earlier))


def _with_change(training: Training, change: Mapping[str, Any]) -> Training:
    if not change:
        return training
    if isinstance(training, OwnTraining):
        return replace(training, rung=training.rung + 1)
    if not isinstance(training, KnownTraining):
        return training
    request = training.request
    with contextlib.suppress(AutotuneError):
        knobs = request.whole_space.with_remedies({**training.candidate.knobs, **change})
        candidate = request.trainer.complete(knobs, request.job.task)
        return replace(training, candidate=candidate)
    return training
