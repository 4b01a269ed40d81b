"""Foresight: from candidates to Predictions, through traces of the step that each would run.

`predict` follows the one candidate's very step. `screen` answers for thousands: candidates that differ only in their batch
and lengths are one family and share a few short traces, from which every point follows (`predict/pieces`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune import detect
from autotune.candidate import Candidate
from autotune.composition import Composition
from autotune.environment import SUPPORTED
from autotune.errors import CannotPredict
from autotune.prediction import Prediction
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.rig.tracers import Tracers
from autotune.trace import Trace
from autotune.trainers.base import Job, Trainer
from autotune.trainers.generic_step import STAND_IN

if TYPE_CHECKING:
    from autotune.predict.allocator import AllocatorSettings
    from autotune.predict.around import Surroundings
    from autotune.predict.pieces import Pieces
    from autotune.predict.pieces.blocks import Stretch
    from autotune.predict.pieces.family import Family
    from autotune.predict.pieces.points import Point
    from autotune.predict.predictor import Situation
    from autotune.predict.sharding import Sharded, Sharding
    from autotune.predict.usage import Stage
    from autotune.question import Question

Request = Mapping[str, Any]
Members = Sequence[tuple[Candidate, Request]]
"""Candidates of one family, with what is to be followed of each."""

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"

FEW = 3
"""So few members of a family are followed one by one: that takes less than what all of a family would follow from."""


class Foresight:
    """Predicts the candidates of one job. Owner of one tracing process, which starts only when a trace is not known yet."""

    def __init__(self, *, job: Job, trainer: Trainer, limit_bytes: int, tracer: Tracer | Tracers) -> None:
        self._job, self._trainer, self._limit_bytes, self._tracer = job, trainer, limit_bytes, tracer
        self._gpu = detect.gpu_of(job.hardware)
        self._predictions: dict[str, Prediction] = {}
        self._longest: dict[str, Prediction] = {}
        """At the longest rows alone."""
        self._families: dict[str, Family] = {}
        self._lent: Pieces | None = None
        self._batches: tuple[int, ...] = ()

    def predict(self, candidate: Candidate) -> Prediction:
        """One candidate, its very step followed."""
        if candidate.id not in self._predictions:
            self._predictions[candidate.id] = self._with_shortest(candidate)
        return self._predictions[candidate.id]

    def _with_shortest(self, candidate: Candidate) -> Prediction:
        """Where micro-batches follow the data, down to the least that data can make of them."""
        from autotune.predict.between import between

        longest = self._followed(candidate)
        shortest = None if longest.fits else self._trainer.shortest(candidate, self._job)
        return longest if shortest is None else between(longest, self._followed(shortest))

    def screen(self, candidates: Sequence[Candidate], *, seconds: float | None = None) -> Mapping[str, Prediction]:
        """Many candidates at once, by id. Where there are only so many seconds, as many as they are enough for, family by family,
        and one in any case; a step that is being followed is not broken off."""
        from autotune.predict.between import between

        ends = math.inf if seconds is None else time.monotonic() + seconds
        longest = self._screened(candidates, _share(ends, 2))
        unsure = [(one.id, self._trainer.shortest(one, self._job)) for one in candidates if _may_not_fit(longest.get(one.id))]
        shortest = {name: one for name, one in unsure if one is not None}
        least = self._screened(list(dict.fromkeys(shortest.values())), ends)
        sure = {name: one for name, one in longest.items() if name not in shortest}
        return sure | {name: between(longest[name], least[one.id]) for name, one in shortest.items() if one.id in least}

    def _screened(self, candidates: Sequence[Candidate], ends: float) -> Mapping[str, Prediction]:
        """At the longest rows, as far as it gets until then."""
        found = {one.id: self._longest[one.id] for one in candidates if one.id in self._longest}
        families = self._families_of([one for one in candidates if one.id not in found])
        families = self._lender_first(families, _share(ends, 4))
        self._expect(self._first_looks(families))
        for key, members in families.items():
            if found and time.monotonic() > ends:
                break
            for name, one in self._of_family(key, members):
                found[name] = one
                if time.monotonic() > ends:
                    break
        return {one.id: found[one.id] for one in candidates if one.id in found}

    def _of_family(self, key: str, members: Members) -> Iterator[tuple[str, Prediction]]:
        if self._follows(key, members):
            yield from self._predicted(self._families[key], members)
        else:
            yield from ((candidate.id, self._followed(candidate)) for candidate, _ in members)

    def _families_of(self, candidates: Sequence[Candidate]) -> Mapping[str, Members]:
        """The largest first."""
        from autotune.predict.pieces import requests

        found: dict[str, list[tuple[Candidate, Request]]] = {}
        for one in candidates:
            request = self.request(one)
            key = requests.family_key({**request, "allocator": one.settings.get(ALLOCATOR)})
            found.setdefault(key, []).append((one, request))
        return dict(sorted(found.items(), key=lambda item: len(item[1]), reverse=True))

    def _lender_first(self, families: Mapping[str, Members], until: float) -> Mapping[str, Members]:
        """What is found out in one family is lent to the others: that takes most traces, so it is the cheapest to follow of those
        that could be looked at until then."""
        from autotune.predict.pieces import requests
        from autotune.predict.pieces.survey import looks

        several = {key: members for key, members in families.items() if not self._one_by_one(members, lent=False)}
        if self._lent is not None or len(several) < 2:
            return families
        firsts = {
            key: requests.at(several[key][0][1], *looks(_points_of(several[key]), self._stretch(), None)[0])
            for key in _wide(several, several)
        }
        self._expect(firsts.values())
        events: dict[str, int] = {}
        for key, first in firsts.items():
            if not events or time.monotonic() < until:
                events[key] = len(self._trace(first).events)
        lender = min(events, key=lambda key: events[key])
        return {lender: families[lender], **families}

    def _first_looks(self, families: Mapping[str, Members]) -> Iterator[Request]:
        """What will surely be followed, in this order, so that several processes may work on it."""
        from autotune.predict.pieces import requests
        from autotune.predict.pieces.survey import looks

        lent = self._lent is not None
        batches = self._batches
        for key, members in families.items():
            points = _points_of(members)
            if key in self._families:
                continue
            if self._one_by_one(members, lent=lent):
                yield from (request for _, request in members)
                continue
            yield from (requests.at(members[0][1], *look) for look in looks(points, self._stretch(), batches if lent else None))
            batches, lent = batches if lent else tuple(point.micro_batch for point in points), True

    def of(self, question: Question) -> Foresight:
        """The same for another question about the same trainer: what is followed for one is known to the other."""
        if question.job == self._job and question.memory_limit_bytes == self._limit_bytes:
            return self
        return Foresight(job=question.job, trainer=self._trainer, limit_bytes=question.memory_limit_bytes, tracer=self._tracer)

    def predict_all(self, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
        """Every candidate by its id, before anything is measured; none on a CPU, whose limit binds more than a trace knows."""
        return {} if self._job.hardware.kind != "cuda" else self.screen(candidates)

    @property
    def families(self) -> int:
        """How many there were whose members followed from shared traces."""
        return len(self._families)

    def close(self) -> None:
        self._tracer.close()

    def request(self, candidate: Candidate) -> Request:
        """What is to be followed; on a known card, with the kernels that it gets."""
        request = self._trainer.trace_request(candidate, self._job)
        capability = self._gpu.compute_capability if self._gpu else None
        return request if capability is None else {**request, "capability": capability}

    def _followed(self, candidate: Candidate) -> Prediction:
        from autotune.predict.predictor import predict

        if candidate.id not in self._longest:
            request = self.request(candidate)
            self._longest[candidate.id] = predict(self._situation(candidate, request, self._trace(request)))
        return self._longest[candidate.id]

    def _trace(self, request: Request) -> Trace:
        from autotune.predict.pieces import requests

        return self._tracer.trace(requests.followed(request))

    def _expect(self, several: Iterable[Request]) -> None:
        from autotune.predict.pieces import requests

        self._tracer.expect(map(requests.followed, several))

    def _situation(self, candidate: Candidate, request: Request, trace: Trace | Sharded) -> Situation:
        from autotune.predict.predictor import Situation
        from autotune.predict.sharding import Sharded, worst_rank

        sharded = trace if isinstance(trace, Sharded) else worst_rank(trace, self._sharding(request))
        return Situation(
            candidate_id=candidate.id,
            composition=self._trainer.compose(candidate, self._job),
            hardware=self._job.hardware,
            gpu=self._gpu,
            limit_bytes=self._limit_bytes,
            config=self._job.workload.model.config,
            trace=sharded.trace,
            settings=candidate.settings,
            allocator=_allocator([(candidate, request)]),
            host_bytes=sharded.host_bytes,
            notes=sharded.notes,
        )

    def _sharding(self, request: Request) -> Sharding:
        from autotune.predict.sharding import Sharding

        hidden = self._job.workload.model.config.get("hidden_size")
        return Sharding.of(request["sharding"], hidden_size=hidden if isinstance(hidden, int) else None)

    # Families.

    def _follows(self, key: str, members: Members) -> bool:
        """Whether these follow from each other: then they are a family from here on."""
        from autotune.predict.pieces.blocks import NotUniform

        if key not in self._families and self._one_by_one(members, lent=self._lent is not None):
            return False
        try:
            self._look_at(key, members)
        except NotUniform:
            return False
        return True

    def _one_by_one(self, members: Members, *, lent: bool) -> bool:
        return len(members) <= (1 if lent else FEW)

    def _stretch(self) -> Stretch | None:
        from autotune.predict.pieces.survey import stretch_of

        return stretch_of(self._job.workload.model.config)

    def _look_at(self, key: str, members: Members) -> None:
        from autotune.predict.pieces import requests
        from autotune.predict.pieces.family import Family
        from autotune.predict.pieces.survey import survey

        points = _points_of(members)
        known = self._families.get(key)
        if known is not None and known.covers(points):
            return
        points = list(dict.fromkeys([*(known.points if known else ()), *points]))
        base = members[0][1]

        def follow(point: Point, layers: int | None) -> Trace:
            return self._trace(requests.at(base, point, layers))

        pieces = survey(follow, points, self._stretch(), self._lent, self._batches)
        self._batches, self._lent = self._batches if self._lent else tuple(point.micro_batch for point in points), pieces
        self._families[key] = Family(points, pieces, self._sharding(base))

    def _predicted(self, family: Family, members: Members) -> Iterator[tuple[str, Prediction]]:
        """By point and by what stands around the step: what differs otherwise shares a replay, and where all that is resident
        is the same as well, as with groups of another size, all that is said of memory."""
        from autotune.predict.pieces import requests
        from autotune.predict.predictor import memory, surroundings_of, with_speed

        by_point: dict[Point, list[tuple[Candidate, Request]]] = {}
        for member in members:
            by_point.setdefault(requests.point_of(member[1]), []).append(member)
        for point, trace, sizes in family.traces(list(by_point)):
            stages: dict[Surroundings, Stage] = {}
            known: dict[tuple[Surroundings, Composition], Prediction] = {}
            for candidate, request in by_point[point]:
                situation = self._situation(candidate, request, replace(family.sharded, trace=trace))
                around = surroundings_of(situation)
                if around not in stages:
                    stages[around] = family.stage(sizes, around)
                alike = around, situation.composition
                if alike not in known:
                    known[alike] = memory(replace(situation, stage=stages[around]))
                yield candidate.id, with_speed(situation, replace(known[alike], candidate_id=candidate.id))


def open_foresight(question: Question, trainer: Trainer) -> Foresight:
    """For one question, with the traces that are kept on this machine."""
    job = question.job
    return Foresight(job=job, trainer=trainer, limit_bytes=question.memory_limit_bytes, tracer=open_tracers(job, trainer))


def open_tracers(job: Job, trainer: Trainer) -> Tracers:
    """What follows this trainer's steps, none of it started yet."""
    supported = None if trainer.trace_adapter == STAND_IN else SUPPORTED.get(trainer.name)
    cache = TraceCache()

    def make(versions: Mapping[str, str] | None) -> Tracer:
        python, adapter = job.workload.python, trainer.trace_adapter
        return Tracer(python, adapter=adapter, cache=cache, supported=supported, versions=versions)

    return Tracers(make)


def foresee(question: Question, trainer: Trainer, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
    """Every candidate's prediction by its id; none on a CPU, and none where the step cannot be followed."""
    foresight = open_foresight(question, trainer)
    try:
        return foresight.predict_all(candidates)
    except CannotPredict:
        return {}
    finally:
        foresight.close()


def ruled_out(foreseen: Mapping[str, Prediction]) -> Mapping[str, Prediction]:
    """What cannot fit, so that no probe is spent on it; never all, for that nothing fits is to be measured."""
    found = {one: prediction for one, prediction in foreseen.items() if prediction.fits is False}
    if len(found) == len(foreseen) and found:
        found.pop(min(found, key=lambda one: found[one].peak_memory_bytes.value))
    return found


def _share(ends: float, parts: int) -> float:
    """The end of the next of so many equal parts of the time that is left."""
    now = time.monotonic()
    return now + (ends - now) / parts


def _may_not_fit(prediction: Prediction | None) -> bool:
    return prediction is not None and not prediction.fits


def _allocator(members: Members) -> AllocatorSettings:
    """How a family's processes are told to allocate."""
    from autotune.predict.allocator import AllocatorSettings

    return AllocatorSettings.of(str(members[0][0].settings.get(ALLOCATOR) or ""))


def _wide(keys: Iterable[str], families: Mapping[str, Members]) -> list[str]:
    """Those that have at least half as many points as any: a few may all lie far from what fits."""
    points = {key: len(_points_of(families[key])) for key in keys}
    return [key for key, count in points.items() if 2 * count >= max(points.values())]


def _points_of(members: Members) -> list[Point]:
    from autotune.predict.pieces import requests

    return list(dict.fromkeys(requests.point_of(request) for _, request in members))
