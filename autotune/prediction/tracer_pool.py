"""Tracing processes that compute the traces of a space side by side.

Nothing is imported that starts a process: most requests need none.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from autotune.core.progress import WorkProgress, report
from autotune.core.space import fingerprint
from autotune.core.trace import Trace

if TYPE_CHECKING:
    from autotune.prediction.tracer import Specification, Tracer

Work: TypeAlias = "tuple[Specification, Future[Trace]]"

MAX_PROCESSES = 2  # each imports a framework, nearly a GiB


class OutOfTime(Exception):
    """A trace is not there in the time that it may take."""


class TracerPool:
    """Owner of tracing processes, used from one thread; a thread waits for each process.

    The service announces the traces that it will need (`expect`); each is computed once, by the
    next idle process, while the service works on those that are there. A single trace starts a
    single process.
    """

    def __init__(
        self, make: Callable[[Mapping[str, str] | None], Tracer], *, most: int | None = None
    ) -> None:
        """`make` returns a Tracer not started, given package versions if known."""
        self._make = make
        self._max_processes = most or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._workers: list[_Worker] = []
        self._requested: dict[str, Future[Trace]] = {}
        self._queue: deque[Work] = deque()
        self._change = threading.Condition()
        self._closing = False
        # For the display of progress.
        self._submitted = 0
        self._finished = 0

    @property
    def traced(self) -> int:
        """Traces computed, without those from the cache."""
        return sum(worker.tracer.traced for worker in self._workers)

    def expect(self, specifications: Iterable[Specification]) -> None:
        """Announce traces needed later, in order. Errors are raised by the `trace` that needs
        them.
        """
        for specification in specifications:
            self._submit(specification)

    def trace(self, specification: Specification, *, until: float = math.inf) -> Trace:
        """Return the trace and drop it from the pool. CannotPredict if it cannot be traced,
        OutOfTime if it is not there at `until`, of the monotonic clock.
        """
        future = self._submit(specification, first=True)
        if until < math.inf:
            remaining_seconds = max(0.0, until - time.monotonic())
            finished, _ = wait([future], remaining_seconds)
            if not finished:
                raise OutOfTime
        self._requested.pop(fingerprint(specification), None)
        return future.result()

    def close(self) -> None:
        """End the processes and cancel announced traces. A later `trace` starts new processes."""
        with self._change:
            self._closing = True
            waiting, self._queue = list(self._queue), deque()
            self._change.notify_all()
        for _, future in waiting:
            future.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.tracer.cancel()
            worker.thread.join()
            worker.tracer.close()
        self._requested.clear()
        self._closing = False

    def _submit(self, specification: Specification, *, first: bool = False) -> Future[Trace]:
        """Queue a trace once; `first` moves it before all that are only announced."""
        key = fingerprint(specification)
        with self._change:
            if key in self._requested:
                future = self._requested[key]
                if first:
                    self._move_first(future)
                return future
            future = self._requested[key] = Future()
            self._submitted += 1
            if first:
                self._queue.appendleft((specification, future))
            else:
                self._queue.append((specification, future))
            self._change.notify()
            self._start_worker_if_needed()
        return future

    def _move_first(self, future: Future[Trace]) -> None:
        for work in self._queue:
            if work[1] is future:
                self._queue.remove(work)
                self._queue.appendleft(work)
                return

    def _start_worker_if_needed(self) -> None:
        """Start another process if there is more work than idle processes."""
        idle = sum(worker.idle for worker in self._workers)
        if len(self._queue) <= idle or len(self._workers) >= self._max_processes:
            return
        versions = None
        if self._workers:
            versions = self._workers[0].tracer.versions
        tracer = self._make(versions)
        _ = tracer.versions  # read here: later only the worker's thread may use the tracer
        worker = _Worker(tracer)
        worker.thread = threading.Thread(
            target=self._compute,
            args=(worker,),
            name="tracer",
            daemon=True,
        )
        self._workers.append(worker)
        worker.thread.start()

    def _compute(self, worker: _Worker) -> None:
        """Compute queued traces until the pool closes: the work of one thread."""
        while True:
            with self._change:
                worker.idle = True
                self._change.wait_for(lambda: self._closing or self._queue)
                if self._closing:
                    return
                worker.idle = False
                specification, future = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(worker.tracer.trace(specification))
            except BaseException as error:  # raised again in the thread that needs the trace
                future.set_exception(error)
            self._count_finished()

    def _count_finished(self) -> None:
        with self._change:
            self._finished += 1
            progress = WorkProgress(
                done=self._finished,
                expected=self._submitted,
                unit="trace",
            )
        report(progress)


@dataclass
class _Worker:
    """A tracing process, and the thread that waits for its answers."""

    tracer: Tracer
    thread: threading.Thread = field(init=False)
    idle: bool = True
