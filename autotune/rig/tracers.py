"""Several tracing processes side by side, so that the traces of a whole space take a part of the time.

What will be needed is said in advance (`expect`); each step is followed once, by whichever process is free, while the caller
works on what is there already. One trace alone starts one process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from autotune.candidate import fingerprint
from autotune.rig.tracer import Tracer
from autotune.trace import Trace

Specification = Mapping[str, object]

MOST_PROCESSES = 2
"""Each imports a framework, which takes most of a GiB."""


class Tracers:
    """Owner of tracing processes. Used from one thread; each process has one of its own that waits for it."""

    def __init__(self, make: Callable[[Mapping[str, str] | None], Tracer], *, most: int | None = None) -> None:
        """`make` gives a tracing process that is not started yet, from what another one of them said of its versions."""
        self._make, self._most = make, most or min(MOST_PROCESSES, os.cpu_count() or 1)
        self._workers: list[_Worker] = []
        self._asked: dict[str, Future[Trace]] = {}
        self._todo: deque[tuple[Specification, Future[Trace]]] = deque()
        self._change = threading.Condition()
        self._over = False

    @property
    def traced(self) -> int:
        """Steps that were followed, and not found in the cache."""
        return sum(worker.tracer.traced for worker in self._workers)

    def expect(self, specifications: Iterable[Specification]) -> None:
        """These will be asked for, in this order. What fails is told to whom asks for it."""
        for specification in specifications:
            self._submit(specification)

    def trace(self, specification: Specification) -> Trace:
        """The step that was asked for; CannotPredict where it cannot be followed. It is forgotten once it was handed out."""
        future = self._submit(specification, first=True)
        try:
            return future.result()
        finally:
            self._asked.pop(fingerprint(specification), None)

    def close(self) -> None:
        """End the processes; what is still expected is not followed. A later `trace` starts new ones."""
        with self._change:
            self._over = True
            waiting, self._todo = list(self._todo), deque()
            self._change.notify_all()
        for _, future in waiting:
            future.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        self._asked.clear()
        self._over = False

    def _submit(self, specification: Specification, *, first: bool = False) -> Future[Trace]:
        key = fingerprint(specification)
        if key not in self._asked:
            future: Future[Trace] = Future()
            self._asked[key] = future
            with self._change:
                (self._todo.appendleft if first else self._todo.append)((specification, future))
                self._change.notify()
            self._man()
        elif first:
            self._advance(self._asked[key])
        return self._asked[key]

    def _advance(self, wanted: Future[Trace]) -> None:
        """Somebody waits for it: nothing that is only expected goes before it."""
        with self._change:
            waiting = next((work for work in self._todo if work[1] is wanted), None)
            if waiting is not None:
                self._todo.remove(waiting)
                self._todo.appendleft(waiting)

    def _man(self) -> None:
        """As many processes as there is work for, and no more than may be."""
        with self._change:
            idle = sum(worker.idle for worker in self._workers)
            if len(self._todo) > idle and len(self._workers) < self._most:
                tracer = self._make(self._workers[0].tracer.versions if self._workers else None)
                _ = tracer.versions  # asked before a thread of its own may ask
                self._workers.append(_Worker(tracer, self._next))

    def _next(self, worker: _Worker) -> tuple[Specification, Future[Trace]] | None:
        """What is to be followed next, waited for; None when it is over."""
        with self._change:
            worker.idle = True
            self._change.wait_for(lambda: self._over or worker.ends or self._todo)
            if self._over or worker.ends:
                return None
            worker.idle = False
            return self._todo.popleft()


class _Worker:
    """One tracing process, and the thread that waits for its answers."""

    def __init__(self, tracer: Tracer, following: Callable[[_Worker], tuple[Specification, Future[Trace]] | None]) -> None:
        self.tracer, self._following = tracer, following
        self.idle, self.ends = True, False
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.ends = True
        self.tracer.give_up()
        self._thread.join()
        self.tracer.close()

    def _run(self) -> None:
        while (work := self._following(self)) is not None:
            specification, future = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.tracer.trace(specification))
            except BaseException as error:  # whatever it is, it belongs to whom asked
                future.set_exception(error)
