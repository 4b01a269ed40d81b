"""A callback for the real run: it watches memory, warns while there is time, and leaves more behind than a traceback.

    from autotune.integrations.trl import MemoryWatch

    trainer = GRPOTrainer(..., callbacks=[MemoryWatch()])

While the run trains it warns, on each rank, when the margin gets narrow or when its trend (with steps, or with completions that
get longer) would cross the limit. When memory runs out, `<output_dir>/out-of-memory/` gets the diagnosis and the next smaller
configuration, and the error goes on its way as it was.

transformers tells callbacks nothing of exceptions. So while a run trains, those methods of its trainer in which memory is taken
are wrapped, on this one trainer, and `sys.excepthook` hears of the rest. `with watch(trainer): trainer.train()` catches whatever
goes through it, and is for whoever has the trainer in hand.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from autotune.integrations import aftermath
from autotune.integrations.gauges import CpuGauge, CudaGauge, Gauge, Reading
from autotune.integrations.margin import Margin
from autotune.integrations.running import Running, running
from autotune.units import MIB

log = logging.getLogger("autotune")

RESERVE_BYTES = 16 * MIB
"""Held from the start and given back when memory ran out: writing down why takes some."""

GUARDED = ("training_step", "evaluate", "_save_checkpoint")
"""Methods of the trainer in which memory is taken, beside the optimizer's step."""

LENGTHS = ("completions/max_length", "completion_length")
"""What TRL logs of how long completions got, newest name first."""

Warn = Callable[[str], None]


class MemoryWatch(TrainerCallback):  # type: ignore[misc]
    """Watches one trainer's run. `warn` gets each warning as a sentence; the logger `autotune` does otherwise."""

    def __init__(self, *, folder: str | Path | None = None, warn: Warn | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._warn: Warn = warn or log.warning
        self._trainer: Any = None
        self._running: Running | None = None
        self._gauge: Gauge | None = None
        self._margin = Margin(last_step=None, longest=None)
        self._reading: Reading | None = None
        self._reserve: bytearray | None = None
        self._told: int | None = None
        self._undo = contextlib.ExitStack()
        self.warnings: list[str] = []
        """Everything that was warned of so far."""

        self.written: tuple[Path, ...] = ()
        """The files that were written when memory ran out."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        with self._no_trouble("begin to watch"):
            self._undo.close()
            self._trainer = self._trainer or _trainer_that_calls(self)
            self._gauge = _gauge(args)
            self._reading = self._gauge.read()
            self._margin = Margin(last_step=state.max_steps or None, longest=getattr(args, "max_completion_length", None))
            self._running = None if self._trainer is None else running(self._trainer, self._reading.limit_bytes)
            self._reserve, self._told = bytearray(RESERVE_BYTES), None
            self._guard(rest.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        with self._no_trouble("read memory"):
            self._look(state.global_step, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **rest: Any) -> None:
        with self._no_trouble("read the log"):
            length = next((logs[name] for name in LENGTHS if name in (logs or {})), None) if logs else None
            if length is not None:
                self._look(state.global_step, int(length))

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._undo.close()
        self._reserve = None

    def out_of_memory(self, error: BaseException) -> None:
        """Write down what is to be known, if it is memory that ran out; never raises. Called for every error, once for each."""
        if not isinstance(error, Exception) or self._told == id(error):
            return
        self._told, self._reserve = id(error), None
        with self._no_trouble("write down what happened"):
            diagnosis = aftermath.diagnosis_of(error)
            if diagnosis.is_memory:
                self.written = aftermath.write(self._place(), error, diagnosis, self._moment(), self._running)
                log.error("Memory ran out (%s). Written: %s", diagnosis.cause, ", ".join(map(str, self.written)))

    def _look(self, step: int, length: int | None) -> None:
        if self._gauge is None:
            return
        self._reading = self._gauge.read()
        for said in self._margin.look(step, self._reading, length):
            self.warnings.append(said)
            self._warn(f"step {step}, rank {self._rank}: {said}")

    def _guard(self, optimizer: Any) -> None:
        """Wrap what takes memory, and listen for what nobody catches; all of it is undone when the run ends well."""
        owners = [(self._trainer, name) for name in GUARDED] if self._trainer is not None else []
        for owner, name in [*owners, (optimizer, "step")]:
            if callable(getattr(owner, name, None)):
                self._undo.callback(_wrap(owner, name, self.out_of_memory))
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.out_of_memory(error)
            before(kind, error, trace)

        sys.excepthook = hook
        self._undo.callback(_restore_hook, hook, before)

    def _place(self) -> Path:
        if self._folder is not None:
            return self._folder
        output = Path(self._trainer.args.output_dir) if self._trainer is not None else Path()
        return output / aftermath.FOLDER

    def _moment(self) -> aftermath.Moment:
        state = getattr(self._trainer, "state", None)
        world = getattr(getattr(self._trainer, "args", None), "world_size", 1)
        return aftermath.Moment(rank=self._rank, world_size=world, step=getattr(state, "global_step", 0), reading=self._reading)

    @property
    def _rank(self) -> int:
        return int(getattr(getattr(self._trainer, "args", None), "process_index", 0))

    @contextlib.contextmanager
    def _no_trouble(self, what: str) -> Iterator[None]:
        """Whatever is wrong here, the run goes on as without it."""
        try:
            yield
        except Exception as trouble:
            log.warning("autotune could not %s: %s: %s", what, type(trouble).__name__, trouble)


@contextlib.contextmanager
def watch(trainer: Trainer, **options: Any) -> Iterator[MemoryWatch]:
    """Within it `trainer` is watched, whatever it does: `with watch(trainer): trainer.train()`. Takes MemoryWatch's options."""
    callback = MemoryWatch(**options)
    callback._trainer = trainer
    trainer.add_callback(callback)
    try:
        yield callback
    except BaseException as error:
        callback.out_of_memory(error)
        raise
    finally:
        callback.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.remove_callback(callback)


def _gauge(args: Any) -> Gauge:
    if getattr(args.device, "type", "cpu") != "cuda":
        return CpuGauge()
    colocated = bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "colocate"
    return CudaGauge(torch, args.device, sleeps=colocated and bool(getattr(args, "vllm_enable_sleep_mode", False)))


def _trainer_that_calls(callback: TrainerCallback) -> Any:
    """The trainer is not among what a callback is given; it is who called: the first one up the stack that has this callback."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


def _wrap(owner: Any, name: str, told: Callable[[BaseException], None]) -> Callable[[], None]:
    """Put a method in the place of one object's own that tells of errors and lets them go on; what is returned undoes that."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def telling(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except BaseException as error:
            told(error)
            raise

    had = vars(owner).get(name, telling)
    setattr(owner, name, telling)

    def undo() -> None:
        if vars(owner).get(name) is telling:  # whoever wrapped it after us keeps what they wrapped
            setattr(owner, name, had) if had is not telling else delattr(owner, name)

    return undo


def _restore_hook(ours: Any, before: Any) -> None:
    if sys.excepthook is ours:
        sys.excepthook = before
