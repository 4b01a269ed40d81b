"""Between a question and the user's store: what is known already, and what is to be kept for the next time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import autotune
from autotune import detect
from autotune.candidate import fingerprint
from autotune.events import Event, Listener, ProbeEnded
from autotune.question import Question
from autotune.recommendation import FromRecord, Recommendation, Trial
from autotune.stamps import LONGEST_NAME, stamp
from autotune.store import SCHEMA, Answered, Circumstances, Found, Store


class Record:
    """The store, for one question under the present circumstances."""

    def __init__(self, question: Question, versions: Mapping[str, str], store: Store | None = None) -> None:
        self._question, self._versions = question, dict(versions)
        self._store = Store() if store is None else store
        self.here = circumstances(question, versions)

    def answer(self) -> Recommendation | None:
        """What the very same question was answered with; None where it was not asked yet, or is to be measured again."""
        question = self._question
        if question.fresh or question.resume:
            return None
        known = self._store.answer(self.here)
        if known is None or not known.serves(budget_seconds=question.budget_seconds, max_probes=question.max_probes):
            return None
        source = FromRecord(
            when=known.when, where=known.where, versions=self._versions, elapsed_seconds=known.answer.elapsed_seconds
        )
        return replace(known.answer, from_record=source, elapsed_seconds=0.0, probe_seconds=0.0)

    def earlier(self) -> Found:
        """Measurements of other studies that hold here too; none where everything is to be measured again."""
        return Found(trials=()) if self._question.fresh else self._store.measured(self.here)

    def keep_probes(self, listener: Listener) -> Listener:
        """The listener, and every probe that it hears of into the store at once: a search that is killed has lost none."""

        def both(event: Event) -> None:
            if isinstance(event, ProbeEnded) and _is_a_fact(event.trial):
                self._store.remember(self.here, [event.trial], when=_now())
            listener(event)

        return both

    def keep_answer(self, answer: Recommendation) -> None:
        """For the next who asks the same. What was interrupted, or measured nothing, is no answer."""
        if answer.interrupted or not answer.trials or answer.from_record is not None:
            return
        question = self._question
        known = Answered(
            schema=SCHEMA, when=_now(), where=platform.node(), facts=self.here.facts, budget_seconds=question.budget_seconds,
            max_probes=question.max_probes, answer=answer,
        )  # fmt: skip
        if answer.winner is not None or answer.proven == "no better candidate possible":
            self._store.conclude(self.here, known)


def circumstances(question: Question, versions: Mapping[str, str]) -> Circumstances:
    """All that decides what a probe of this question would measure here, and what else decides the answer."""
    workload, hardware = question.job.workload, question.job.hardware
    device = {"kind": hardware.kind, "name": hardware.name, "count": hardware.count, "memory_bytes": hardware.memory_bytes}
    facts: dict[str, object] = {
        "autotune": autotune.__version__,
        "model": workload.model.config,
        "weights": [workload.weights, str(workload.model.folder) if workload.weights == "real" else None],
        "method": workload.method,
        "framework": workload.framework,
        "tuning": workload.tuning,
        "versions": dict(versions),
        "device": {**device, "driver": _drivers() if hardware.kind == "cuda" else detect.processor()},
        "memory_limit_bytes": question.memory_limit_bytes,
        "environment": _variables(),
        "files": files_named(workload.dataset, *strings_in(workload.user_settings)),
    }
    asked = {**question.identity, "seed": workload.seed, "sampler": question.sampler}
    return Circumstances(facts=facts, question=asked)


MATTERING = ("PYTORCH_", "VLLM_", "NCCL_", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_", "XFORMERS_")
"""Beginnings of variables by which allocators, kernels and buffers are chosen."""


def _variables() -> dict[str, str]:
    """Those that are set, without what they are set to: it may be a key."""
    named = {name: value for name, value in os.environ.items() if name.startswith(MATTERING)}
    return {name: fingerprint({name: value}) for name, value in sorted(named.items())}


def _is_a_fact(trial: Trial) -> bool:
    """Whether the outcome is the candidate's own: what a deadline or a signal ended may go otherwise the next time."""
    return trial.verdict.fits or trial.measurement.outcome.is_out_of_memory


def _drivers() -> list[str]:
    return sorted({device.driver_version or "unknown" for device in detect.gpus_here()})


def strings_in(value: object) -> list[str]:
    """Every text in a configuration, however deep."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [text for part in parts for text in strings_in(part)]


def files_named(*names: str | None) -> dict[str, str]:
    """Local files and folders that the question names, a module of rewards among them: an edited one is another, and so is one
    that can't be looked through."""
    paths = [path for name in names if name and len(name) <= LONGEST_NAME for path in (name, f"{name.split('.')[0]}.py")]
    return {
        path: stamp(path) or f"unknown {time.time_ns()}"
        for path in paths
        if path.strip() and "\0" not in path and Path(path).exists()
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
