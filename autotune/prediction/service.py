"""Prediction service: from candidates to Predictions, through traces of their steps.

`predict` traces the step of one candidate. `screen` predicts thousands: candidates that differ only
in batch and lengths form a family, predicted from a few short traces (`estimate/screening`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.core.composition import Composition
from autotune.core.errors import CannotPredict
from autotune.core.job import Job, Task
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.trace import Trace
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.predictor import memory, stage_of
from autotune.estimate.replay import StepStage
from autotune.estimate.screening import (
    Family,
    LayerRepetition,
    NotUniform,
    Point,
    StepModel,
    family_key,
    initial_traces,
    point_of,
    repetition_of,
    request_at,
    survey,
    traced_request,
)
from autotune.estimate.sharding import Sharding, compared_ranks
from autotune.estimate.throughput import with_speed
from autotune.estimate.trace_context import PredictionInput, TraceContext, step_context
from autotune.estimate.unknown_facts import fullest_rows, with_lower_bound
from autotune.frameworks.base import STAND_IN, Trainer
from autotune.machine import hardware_detection
from autotune.machine.environment import SUPPORTED
from autotune.prediction.trace_cache import TraceCache
from autotune.prediction.tracer import Tracer, TracerPool

Request = Mapping[str, Any]
Members = Sequence[
    tuple[Candidate, Request]
]  # Candidates of one family, each with its trace request
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
MAX_TRACED_ALONE = (
    3  # Family size up to which members are traced alone: fewer traces than a model needs
)


class PredictionService:
    """Predicts the candidates of one job; tracing starts at the first cache miss."""

    def __init__(
        self, *, task: Task, trainer: Trainer, limit_bytes: int, tracer: TracerPool
    ) -> None:
        self._job, self._trainer, self._limit_bytes, self._tracer = (
            task,
            trainer,
            limit_bytes,
            tracer,
        )
        self._gpu = hardware_detection.gpu_of(task.hardware)
        self._predictions: dict[str, Prediction] = {}
        self._longest: dict[str, Prediction] = {}
        """Predictions at the longest rows, by candidate id."""
        self._families: dict[str, Family] = {}
        self._reference: StepModel | None = None
        """Latest model, with the formulas of all before it: they save traces in the next family."""
        self._reference_batches: tuple[int, ...] = ()

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict one candidate from a trace of its own step; as an interval where micro-batches
        depend on the data.
        """
        if candidate.id not in self._predictions:
            longest = self._predict_traced(candidate)
            shortest = (
                None if longest.fits else self._trainer.lower_bound_candidate(candidate, self._job)
            )
            found = (
                longest
                if shortest is None
                else with_lower_bound(longest, self._predict_traced(shortest))
            )
            self._predictions[candidate.id] = self._with_memory_at_lengths(candidate, found)
        return self._predictions[candidate.id]

    def screen(
        self, candidates: Sequence[Candidate], *, seconds: float | None = None
    ) -> Mapping[str, Prediction]:
        """Predict many candidates, by id. After `seconds` and the running trace the rest is
        omitted; one is always predicted.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        longest = self._screen_longest(candidates, _share(deadline, 2))
        unsure = [
            (one.id, self._trainer.lower_bound_candidate(one, self._job))
            for one in candidates
            if one.id in longest and not longest[one.id].fits
        ]
        shortest = {name: one for name, one in unsure if one is not None}
        least = self._screen_longest(list(dict.fromkeys(shortest.values())), deadline)
        sure = {name: one for name, one in longest.items() if name not in shortest}
        return sure | {
            name: with_lower_bound(longest[name], least[one.id])
            for name, one in shortest.items()
            if one.id in least
        }

    def of(self, job: Job) -> PredictionService:
        """Return a service for another job that shares the tracing processes."""
        if job.task == self._job and job.memory_limit_bytes == self._limit_bytes:
            return self
        return PredictionService(
            task=job.task,
            trainer=self._trainer,
            limit_bytes=job.memory_limit_bytes,
            tracer=self._tracer,
        )

    def request(self, candidate: Candidate) -> Request:
        """Return the trace request; a known GPU's compute capability selects the kernels."""
        request = self._trainer.trace_request(candidate, self._job)
        capability = self._gpu.compute_capability if self._gpu else None
        return request if capability is None else {**request, "capability": capability}

    @property
    def families(self) -> int:
        """Number of families predicted from shared traces."""
        return len(self._families)

    def close(self) -> None:
        self._tracer.close()

    # One candidate.

    def _predict_traced(self, candidate: Candidate) -> Prediction:
        if candidate.id not in self._longest:
            request = self.request(candidate)
            given, stage = self._worst_rank(candidate, request, self._trace(request))
            self._longest[candidate.id] = with_speed(given, memory(given, stage))
        return self._longest[candidate.id]

    def _with_memory_at_lengths(self, candidate: Candidate, longest: Prediction) -> Prediction:
        """Add the memory at the lengths given, from a trace of the fullest micro-batch of such
        rows.
        """
        workload = self._job.workload
        if workload.completion_lengths is None or self._job.hardware.kind != "cuda":
            return longest
        composition, request = self._trainer.compose(candidate, self._job), self.request(candidate)
        row = fullest_rows(composition, workload.completion_lengths, workload.prompt_lengths)
        found = longest
        if row is not None:
            prompt, completion = row
            point = point_of(request)._replace(prompt=prompt, completion=completion)
            shorter = request_at(request, point, None)
            given, _ = self._worst_rank(candidate, shorter, self._trace(shorter))
            own = replace(composition, prompt_length=prompt, completion_length=completion)
            given = replace(given, composition=own)
            found = memory(given, stage_of(given))
        return replace(
            longest,
            peak_memory_bytes_at_lengths=found.peak_memory_bytes,
            fits_at_lengths=found.fits,
        )

    def _trace(self, request: Request) -> Trace:
        return self._tracer.trace(traced_request(request))

    def _expect(self, requests: Iterable[Request]) -> None:
        self._tracer.expect(map(traced_request, requests))

    def _worst_rank(
        self, candidate: Candidate, request: Request, trace: Trace
    ) -> tuple[PredictionInput, StepStage]:
        """Return the rank that reserves most in this candidate's context, which decides where
        blocks lie, and its step there.
        """
        hidden = self._job.workload.model.config.get("hidden_size")
        sharding = Sharding.of(
            request["sharding"], hidden_size=hidden if isinstance(hidden, int) else None
        )
        ranks = [
            self._input(candidate, rank.trace, rank.host_bytes)
            for rank in compared_ranks(trace, sharding)
        ]
        each = [(rank, StepStage(rank.trace, step_context(rank))) for rank in ranks]
        return (
            max(each, key=lambda one: (one[1].usage().reserved_bytes, one[0].trace.peak_bytes))
            if len(each) > 1
            else each[0]
        )

    def _input(self, candidate: Candidate, trace: Trace, host_bytes: int) -> PredictionInput:
        return PredictionInput(
            candidate_id=candidate.id,
            composition=self._trainer.compose(candidate, self._job),
            hardware=self._job.hardware,
            gpu=self._gpu,
            limit_bytes=self._limit_bytes,
            config=self._job.workload.model.config,
            trace=trace,
            settings=candidate.settings,
            completions_per_prompt=candidate.settings.get(
                self._trainer.canonical.get("num_generations", "num_generations")
            ),
            allocator=AllocatorSettings.of(str(candidate.settings.get(ALLOCATOR) or "")),
            host_bytes=host_bytes,
            lengths=self._job.workload.completion_lengths,
        )

    # Families.

    def _screen_longest(
        self, candidates: Sequence[Candidate], deadline: float
    ) -> Mapping[str, Prediction]:
        """Predict candidates at their longest rows, family by family, until the deadline."""
        found = {one.id: self._longest[one.id] for one in candidates if one.id in self._longest}
        families = self._group_by_family([one for one in candidates if one.id not in found])
        families = self._reference_first(families, _share(deadline, 4))
        self._expect(self._certain_requests(families))
        for key, members in families.items():
            if found and time.monotonic() > deadline:
                break
            for name, prediction in self._predict_members(key, members):
                found[name] = prediction
                if time.monotonic() > deadline:
                    break
        return {one.id: found[one.id] for one in candidates if one.id in found}

    def _group_by_family(self, candidates: Sequence[Candidate]) -> Mapping[str, Members]:
        """Return the families by key, the largest first."""
        found: dict[str, list[tuple[Candidate, Request]]] = {}
        for one in candidates:
            request = self.request(one)
            key = family_key({**request, "allocator": one.settings.get(ALLOCATOR)})
            found.setdefault(key, []).append((one, request))
        return dict(sorted(found.items(), key=lambda item: len(item[1]), reverse=True))

    def _reference_first(
        self, families: Mapping[str, Members], until: float
    ) -> Mapping[str, Members]:
        """Put the family with the fewest events first, since the others reuse its formulas.
        Compared are families with at least half as many points as any, as far as their first
        traces arrive in time.
        """
        shared = {
            key: members
            for key, members in families.items()
            if not _traced_alone(members, has_reference=False)
        }
        if self._reference is not None or len(shared) < 2:
            return families
        points = {key: _points_of(members) for key, members in shared.items()}
        most = max(map(len, points.values()))
        firsts = {
            key: request_at(shared[key][0][1], *initial_traces(own, self._repetition, None)[0])
            for key, own in points.items()
            if 2 * len(own) >= most
        }
        self._expect(firsts.values())
        events: dict[str, int] = {}
        for key, first in firsts.items():
            if not events or time.monotonic() < until:
                events[key] = len(self._trace(first).events)
        reference = min(events, key=lambda key: events[key])
        return {reference: families[reference], **families}

    def _certain_requests(self, families: Mapping[str, Members]) -> Iterator[Request]:
        """Yield the requests certain to be needed, in order, for processes to work ahead."""
        has_reference, batches = self._reference is not None, self._reference_batches
        for key, members in families.items():
            if key in self._families:
                continue
            if _traced_alone(members, has_reference=has_reference):
                yield from (request for _, request in members)
                continue
            points, base = _points_of(members), members[0][1]
            planned = initial_traces(points, self._repetition, batches if has_reference else None)
            yield from (request_at(base, *one) for one in planned)
            if not has_reference:
                has_reference, batches = True, tuple(point.micro_batch for point in points)

    def _predict_members(self, key: str, members: Members) -> Iterator[tuple[str, Prediction]]:
        family: Family | None = None
        if key in self._families or not _traced_alone(
            members, has_reference=self._reference is not None
        ):
            with contextlib.suppress(
                NotUniform
            ):  # layers or points differ in more than sizes: trace each member
                family = self._family(key, members)
        if family is not None:
            yield from self._predict_from_model(family, members)
        else:
            yield from ((candidate.id, self._predict_traced(candidate)) for candidate, _ in members)

    def _family(self, key: str, members: Members) -> Family:
        """Return the family's model over all points so far. NotUniform if no model fits."""
        points = _points_of(members)
        known = self._families.get(key)
        if known is not None and known.covers(points):
            return known
        points = list(dict.fromkeys([*(known.points if known else ()), *points]))
        base = members[0][1]

        def trace_point(point: Point, layers: int | None) -> Trace:
            return self._trace(request_at(base, point, layers))

        model = survey(
            trace_point, points, self._repetition, self._reference, self._reference_batches
        )
        if self._reference is None:
            self._reference_batches = tuple(point.micro_batch for point in points)
        self._reference = model
        self._families[key] = Family(points, model, *self._worst_rank(*members[0], model.trace))
        return self._families[key]

    def _predict_from_model(
        self, family: Family, members: Members
    ) -> Iterator[tuple[str, Prediction]]:
        """Predict members by point and by trace context: equal ones share an allocator replay.
        Members whose resident bytes are equal too (only the group size differs) share the memory
        prediction.
        """
        by_point: dict[Point, list[Candidate]] = {}
        for candidate, request in members:
            by_point.setdefault(point_of(request), []).append(candidate)
        for point, trace, sizes in family.traces(list(by_point)):
            stages: dict[TraceContext, StepStage] = {}
            predicted: dict[tuple[TraceContext, Composition], Prediction] = {}
            for candidate in by_point[point]:
                given = self._input(candidate, trace, family.rank.host_bytes)
                context = step_context(given)
                if context not in stages:
                    stages[context] = family.stage(sizes, context)
                key = context, given.composition
                if key not in predicted:
                    predicted[key] = memory(given, stages[context])
                yield (
                    candidate.id,
                    with_speed(given, replace(predicted[key], candidate_id=candidate.id)),
                )

    @property
    def _repetition(self) -> LayerRepetition | None:
        return repetition_of(self._job.workload.model.config)


def open_prediction_service(job: Job, trainer: Trainer) -> PredictionService:
    """Return the service for one job, with the trace cache of this machine."""
    return PredictionService(
        task=job.task,
        trainer=trainer,
        limit_bytes=job.memory_limit_bytes,
        tracer=open_tracers(job.task, trainer),
    )


def open_tracers(task: Task, trainer: Trainer) -> TracerPool:
    """Return the pool that traces this trainer's steps; no process is started yet."""
    supported = None if trainer.trace_adapter == STAND_IN else SUPPORTED.get(trainer.name)
    python, adapter, cache = task.workload.python, trainer.trace_adapter, TraceCache()
    return TracerPool(
        lambda versions: Tracer(
            python, adapter=adapter, cache=cache, supported=supported, versions=versions
        )
    )


def predict_candidates(
    job: Job, trainer: Trainer, candidates: Sequence[Candidate]
) -> Mapping[str, Prediction]:
    """Predict every candidate, by id; empty on a CPU, whose limit counts more than a trace, and
    if a step cannot be traced.
    """
    if job.task.hardware.kind != "cuda":
        return {}
    with contextlib.closing(open_prediction_service(job, trainer)) as service:
        try:
            return service.screen(candidates)
        except CannotPredict:
            return {}


def _share(deadline: float, parts: int) -> float:
    """Return the end of the first of `parts` equal shares of the remaining time."""
    now = time.monotonic()
    return now + (deadline - now) / parts


def _traced_alone(members: Members, *, has_reference: bool) -> bool:
    return len(members) <= (1 if has_reference else MAX_TRACED_ALONE)


def _points_of(members: Members) -> list[Point]:
    return list(dict.fromkeys(point_of(request) for _, request in members))
