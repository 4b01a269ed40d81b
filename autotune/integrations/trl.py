"""TRL callback for the real run: watches memory, warns early, and reports when memory runs out.

    from autotune.integrations.trl import MemoryWatch

    trainer = GRPOTrainer(..., callbacks=[MemoryWatch()])

Each rank warns when the margin becomes narrow, or when its trend (over steps, or over completion
length) would cross the limit. When memory runs out, the diagnosis and the next smaller
configuration are written to `<output_dir>/out-of-memory/`, and the error propagates unchanged.
Under `autotune guard`, each rank also reports peaks by phase and the lengths of its rows.

transformers does not pass exceptions to callbacks. During training, the memory-critical methods of
this one trainer are therefore wrapped, and `sys.excepthook` covers the rest. `with watch(trainer):
trainer.train()` catches all exceptions inside the block.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from autotune.core.units import MIB
from autotune.guard.save_request import note_obeyed, requested_step
from autotune.guard.trainer_facts import write_facts
from autotune.integrations import oom_report
from autotune.integrations.memory_margin import CpuGauge, CudaGauge, GaugeReading, Margin
from autotune.integrations.oom_report import Running, running
from autotune.integrations.phase_peaks import PHASES_BY_METHOD, PhasePeaks, replaced

log = logging.getLogger("autotune")

RESERVE_BYTES = 16 * MIB  # host memory released when memory runs out: writing the report needs some
FACTS_SECONDS = 2.0  # between two reports to the guard
GUARDED = ("training_step", "evaluate", "_save_checkpoint")
"""Memory-critical methods of the trainer; the optimizer's `step` is guarded as well."""

# TRL's log keys for the longest completion, newest name first
LENGTH_METRICS = (
    "completions/max_length",
    "completion_length",
)
Warn = Callable[[str], None]


class MemoryWatch(TrainerCallback):  # type: ignore[misc]
    """Memory watch of one trainer. `warn` receives warnings; default: logger `autotune`."""

    def __init__(self, *, folder: str | Path | None = None, warn: Warn | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._warn: Warn = warn or log.warning
        self._trainer: Any = None
        self._running: Running | None = None
        self._gauge: CpuGauge | CudaGauge | None = None
        self._margin = Margin(last_step=None, longest=None)
        self._reading: GaugeReading | None = None
        self._reserve: bytearray | None = None
        self._reported: int | None = None
        self._undo = contextlib.ExitStack()
        self._phases: PhasePeaks | None = None
        self._next_facts = 0.0
        self._saves = False  # the guard asked to save and to stop
        self.warnings: list[str] = []  # all warnings so far
        self.written: tuple[Path, ...] = ()  # files of the out-of-memory report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._errors_logged("begin to watch"):
            self._undo.close()
            self._trainer = self._trainer or _trainer_that_calls(self)
            self._gauge = _gauge(args)
            self._reading = self._gauge.read()
            self._margin = Margin(
                last_step=state.max_steps or None,
                longest=getattr(args, "max_completion_length", None),
            )
            self._running = None
            if self._trainer is not None:
                self._running = running(self._trainer, self._reading.limit_bytes)
            self._reserve, self._reported = bytearray(RESERVE_BYTES), None
            self._guard(kwargs.get("optimizer"))
            self._watch_phases(self._gauge, kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._errors_logged("read memory"):
            self._look(state.global_step, None)
        with self._errors_logged("report to the guard"):
            if self._phases is not None:
                self._phases.step_ended()
            self._report_phases()
        with self._errors_logged("read the guard's request"):
            requested = requested_step()
            if requested is not None and state.global_step >= requested:
                self._saves = control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with self._errors_logged("read the log"):
            for name in LENGTH_METRICS:
                length = (logs or {}).get(name)
                if length is not None:
                    self._look(state.global_step, int(length))
                    break

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._undo.close()
        self._reserve = None
        self._report_phases(is_last=True)
        if self._saves and self._rank == 0:
            note_obeyed(state.global_step)

    def out_of_memory(self, error: BaseException) -> None:
        """Write the report for an out-of-memory error. Never raises; handles each error once."""
        if not isinstance(error, Exception) or self._reported == id(error):
            return
        self._reported, self._reserve = id(error), None
        with self._errors_logged("write down what happened"):
            diagnosis = oom_report.diagnosis_of(error)
            if not diagnosis.is_memory:
                return
            if self._phases is not None:
                self._phases.ran_out()
                self._report_phases(is_last=True)
            folder = self._folder
            if folder is None:
                output = "" if self._trainer is None else self._trainer.args.output_dir
                folder = Path(output) / oom_report.REPORT_FOLDER
            moment = oom_report.OomMoment(
                rank=self._rank,
                world_size=getattr(getattr(self._trainer, "args", None), "world_size", 1),
                step=getattr(getattr(self._trainer, "state", None), "global_step", 0),
                reading=self._reading,
            )
            self.written = oom_report.write(folder, error, diagnosis, moment, self._running)
            log.error(
                "Memory ran out (%s). Written: %s",
                diagnosis.cause,
                ", ".join(map(str, self.written)),
            )

    def _look(self, step: int, length: int | None) -> None:
        if self._gauge is None:
            return
        self._reading = self._gauge.read()
        for warning in self._margin.look(step, self._reading, length):
            self.warnings.append(warning)
            self._warn(f"step {step}, rank {self._rank}: {warning}")

    def _guard(self, optimizer: Any) -> None:
        """Wrap the guarded methods and install an exception hook. Undone when the run ends well."""
        guarded = [(self._trainer, name) for name in GUARDED]
        for owner, name in [*guarded, (optimizer, "step")]:
            if callable(getattr(owner, name, None)):
                self._undo.callback(_wrap(owner, name, self.out_of_memory))
        before = sys.excepthook

        def hook(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            self.out_of_memory(error)
            before(kind, error, trace)

        def restore() -> None:
            if sys.excepthook is hook:  # a later hook of another library stays
                sys.excepthook = before

        sys.excepthook = hook
        self._undo.callback(restore)

    def _watch_phases(self, gauge: CpuGauge | CudaGauge, optimizer: Any) -> None:
        """Make the trainer's methods phases whose peaks are read."""
        self._phases = PhasePeaks(gauge.moment)
        watched = [(self._trainer, name, phase) for name, phase in PHASES_BY_METHOD.items()]
        accelerator = getattr(self._trainer, "accelerator", None)
        watched += [(accelerator, "backward", "backward"), (optimizer, "step", "optimizer")]
        for owner, name, phase in watched:
            undo = self._phases.watch(owner, name, phase)
            if undo is not None:
                self._undo.callback(undo)

    def _report_phases(self, *, is_last: bool = False) -> None:
        """Give the guard the facts of this rank, every few seconds."""
        now = time.monotonic()
        if self._phases is None or (now < self._next_facts and not is_last):
            return
        self._next_facts = now + FACTS_SECONDS
        write_facts(self._rank, self._phases.facts())

    @property
    def _rank(self) -> int:
        return int(getattr(getattr(self._trainer, "args", None), "process_index", 0))

    @contextlib.contextmanager
    def _errors_logged(self, action: str) -> Iterator[None]:
        """Log errors of the callback itself; training continues."""
        try:
            yield
        except Exception as trouble:
            log.warning("autotune could not %s: %s: %s", action, type(trouble).__name__, trouble)


@contextlib.contextmanager
def watch(trainer: Trainer, **options: Any) -> Iterator[MemoryWatch]:
    """Watch `trainer` inside the block. Options: MemoryWatch's."""
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


def _gauge(args: Any) -> CpuGauge | CudaGauge:
    if getattr(args.device, "type", "cpu") != "cuda":
        return CpuGauge()
    colocated = (
        bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "colocate"
    )
    return CudaGauge(
        torch,
        args.device,
        sleeps=colocated and bool(getattr(args, "vllm_enable_sleep_mode", False)),
    )


def _trainer_that_calls(callback: TrainerCallback) -> Any:
    """Return the calling trainer from the stack: transformers does not pass it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


def _wrap(
    owner: Any,
    name: str,
    report: Callable[[BaseException], None],
) -> Callable[[], None]:
    """Wrap one object's method: report and re-raise errors. Return the undo function."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            report(error)
            raise

    return replaced(owner, name, reporting)
