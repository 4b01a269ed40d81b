"""A slot on this machine: a worker and its runner. For the local executor and Ray nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from autotune.core.candidate import Candidate
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import ProcessRunner, RequestBuilders
from autotune.probe.worker_process import RunnerSettings, WorkerProcess


@dataclass(frozen=True, kw_only=True)
class SlotPlace:
    """Share of the machine that a slot uses."""

    words: str = "this machine"
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the slot; None leaves it
    cores: frozenset[int] | None = None  # CPU affinity of its processes; None leaves it


class LocalSlot:
    """Owner of a worker and its runner. For one thread, except `interrupt` and `close`."""

    def __init__(
        self,
        settings: RunnerSettings,
        place: SlotPlace,
        requests: RequestBuilders,
        on_load: Callable[[], None],
        open_gpus: Callable[[], Gpus] | None = None,
    ) -> None:
        """`open_gpus` replaces the search by NVML and CUDA_VISIBLE_DEVICES."""
        if open_gpus is None and settings.device_kind == "cuda":
            count = settings.devices or settings.ranks
            open_gpus = partial(Gpus, count, settings.limit_bytes, settings.python, variable=place.visible)
        self._ranks, self._requests, self._on_load = settings.ranks, requests, on_load
        self.worker = WorkerProcess(settings, open_gpus=open_gpus, cores=place.cores)
        self._runner: ProcessRunner | None = None

    def prepare(self) -> Mapping[str, str]:
        """Start the interpreter and return the installed versions; imports nothing."""
        self.worker.start()
        return dict(self.worker.versions)

    def open(self, candidate: Candidate) -> ProcessRunner:
        if self._runner is None or self._runner.load_key != candidate.load_key:
            self.unload()
            # A load may name fewer ranks than GPUs: a server can have GPUs of its own.
            ranks = candidate.load.get("ranks")
            self._runner = ProcessRunner(
                load_key=candidate.load_key, worker=self.worker, ranks=ranks if isinstance(ranks, int) else self._ranks,
                requests=self._requests, on_load=self._on_load,
            )  # fmt: skip
        return self._runner

    def unload(self) -> None:
        """Close the runner; the worker keeps its imports."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def interrupt(self) -> None:
        self.worker.interrupt()

    def close(self) -> None:
        self._runner = None
        self.worker.close()
