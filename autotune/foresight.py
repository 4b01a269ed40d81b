"""Foresight: from candidates to Predictions, through traces of the step that each would run.

`predict` follows the one candidate's very step. `screen` answers for thousands: candidates that differ only in their batch
and lengths are one family and share a few short traces, from which every point follows (`predict/pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune import detect
from autotune.candidate import Candidate
from autotune.catalogue import Gpu
from autotune.environment import SUPPORTED
from autotune.errors import CannotPredict, UnknownName
from autotune.hardware import Hardware
from autotune.measurement import Measurement, Phase
from autotune.prediction import Prediction
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.rig.tracers import Tracers
from autotune.trace import Trace
from autotune.trainers.base import Job, Trainer

if TYPE_CHECKING:
    from autotune.predict.allocator import AllocatorSettings
    from autotune.predict.pieces import Pieces
    from autotune.predict.pieces.blocks import Stretch
    from autotune.predict.pieces.points import Point
    from autotune.predict.pieces.screening import Anchor
    from autotune.predict.predictor import Situation
    from autotune.question import Question

Request = Mapping[str, Any]
Members = Sequence[tuple[Candidate, Request]]
"""Candidates of one family, with what is to be followed of each."""

STAND_IN = "generic_trace"
"""Follows the plain step of frameworks whose own can't be, one by one: their spaces are small."""

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"

FEW = 3
"""So few members of a family are followed one by one: that takes less than what all of a family would follow from."""


class Foresight:
    """Predicts the candidates of one job. Owner of one tracing process, which starts only when a trace is not known yet."""

    def __init__(self, *, job: Job, trainer: Trainer, limit_bytes: int, tracer: Tracer | Tracers) -> None:
        from autotune.calibrate import Calibrations

        self._job, self._trainer, self._limit_bytes, self._tracer = job, trainer, limit_bytes, tracer
        self._gpu = _gpu_of(job.hardware)
        self._predictions: dict[str, Prediction] = {}
        self._families: dict[str, _Family] = {}
        self._anchors: dict[str, _Anchored] = {}
        self._lent: Pieces | None = None
        self._batches: tuple[int, ...] = ()
        self._calibrations = Calibrations()

    def predict(self, candidate: Candidate) -> Prediction:
        """One candidate, its very step followed."""
        if candidate.id not in self._predictions:
            self._predictions[candidate.id] = self._with_shortest(candidate, self._followed(candidate))
        return self._predictions[candidate.id]

    def _with_shortest(self, candidate: Candidate, longest: Prediction) -> Prediction:
        """Where micro-batches follow the data, down to the least that data can make of them."""
        from autotune.predict.between import between

        shortest = None if longest.fits else self._trainer.shortest(candidate, self._job)
        return longest if shortest is None else between(longest, self._followed(shortest))

    def screen(self, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
        """Many candidates at once, by id."""
        if self._trainer.trace_adapter == STAND_IN:
            return {one.id: self.predict(one) for one in candidates}
        found = {one.id: self._predictions[one.id] for one in candidates if one.id in self._predictions}
        families = self._lender_first(self._families_of([one for one in candidates if one.id not in found]))
        self._tracer.expect(self._first_looks(families))
        following = {key: members for key, members in families.items() if self._follows(key, members)}
        self._anchor(following)
        for key, members in families.items():
            if key in following:
                found.update(self._predicted(key, members))
            else:
                found.update({candidate.id: self.predict(candidate) for candidate, _ in members})
        return {one.id: found[one.id] for one in candidates}

    def _families_of(self, candidates: Sequence[Candidate]) -> Mapping[str, Members]:
        """The largest first."""
        from autotune.predict.pieces import requests

        found: dict[str, list[tuple[Candidate, Request]]] = {}
        for one in candidates:
            request = self._request(one)
            key = requests.family_key({**request, "allocator": one.settings.get(ALLOCATOR)})
            found.setdefault(key, []).append((one, request))
        return dict(sorted(found.items(), key=lambda item: len(item[1]), reverse=True))

    def _lender_first(self, families: Mapping[str, Members]) -> Mapping[str, Members]:
        """What is found out in one family is lent to the others: that takes most traces, so it is the cheapest to follow."""
        from autotune.predict.pieces import requests
        from autotune.predict.pieces.survey import looks

        several = {key: members for key, members in families.items() if not self._one_by_one(members, lent=False)}
        if self._lent is not None or len(several) < 2:
            return families
        firsts = {
            key: requests.at(several[key][0][1], *looks(_points_of(several[key]), self._stretch(), None)[0])
            for key in _wide(several, several)
        }
        self._tracer.expect(firsts.values())
        events = {key: len(self._tracer.trace(first).events) for key, first in firsts.items()}
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

    def predict_all(self, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
        """Every candidate by its id, before anything is measured; none on a CPU, whose limit binds more than a trace knows."""
        return {} if self._job.hardware.kind != "cuda" else self.screen(candidates)

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Predictions of the same load are corrected from here on by what was measured. Nothing on a CPU."""
        if self._job.hardware.kind != "cuda":
            return
        self._calibrations.learn(candidate.load_key, self._followed(candidate, calibrated=False), measurement)
        self._predictions.clear()

    @property
    def families(self) -> int:
        """How many there were whose members followed from shared traces."""
        return len(self._families)

    def close(self) -> None:
        self._tracer.close()

    def _request(self, candidate: Candidate) -> Request:
        """What is to be followed; on a known card, with the kernels that it gets."""
        request = self._trainer.trace_request(candidate, self._job)
        capability = self._gpu.compute_capability if self._gpu else None
        return request if capability is None else {**request, "capability": capability}

    def _followed(self, candidate: Candidate, *, calibrated: bool = True) -> Prediction:
        from autotune.predict.predictor import predict

        request = self._request(candidate)
        situation = self._situation(candidate, request, self._tracer.trace(request))
        return predict(situation if calibrated else replace(situation, calibration=None))

    def _situation(self, candidate: Candidate, request: Request, trace: Trace, *, bare: bool = False) -> Situation:
        """`bare` traces have no events that could be changed."""
        from autotune.predict.predictor import Situation
        from autotune.predict.sharding import Sharded, Sharding, worst_rank

        config = self._job.workload.model.config
        hidden = config.get("hidden_size")
        sharding = Sharding.of(request["sharding"], hidden_size=hidden if isinstance(hidden, int) else None)
        sharded = Sharded(trace=trace) if bare else worst_rank(trace, sharding)
        return Situation(
            candidate_id=candidate.id,
            composition=self._trainer.compose(candidate, self._job),
            hardware=self._job.hardware,
            gpu=self._gpu,
            limit_bytes=self._limit_bytes,
            config=config,
            trace=sharded.trace,
            settings=candidate.settings,
            allocator=_allocator([(candidate, request)]),
            host_bytes=sharded.host_bytes,
            notes=sharded.notes,
            calibration=self._calibrations.of(candidate.load_key),
        )

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
        from autotune.predict.pieces.survey import survey

        points = _points_of(members)
        known = self._families.get(key)
        if known is not None and known.covers(points):
            return
        points = list(dict.fromkeys([*(known.points if known else ()), *points]))
        base = members[0][1]

        def follow(point: Point, layers: int | None) -> Trace:
            return self._tracer.trace(requests.at(base, point, layers))

        pieces = survey(follow, points, self._stretch(), self._lent, self._batches)
        self._batches, self._lent = self._batches if self._lent else tuple(point.micro_batch for point in points), pieces
        self._families[key] = _Family(points, pieces)

    def _anchor(self, families: Mapping[str, Members]) -> None:
        """Two members followed in full, for what their replays show. Where nothing of the model is cut up, those of one
        family, the cheapest to follow, serve all."""
        wanted = self._to_anchor(families)
        ends = {key: self._ends(families[key], self._families[key].pieces) for key in wanted}
        self._tracer.expect(request for members in ends.values() for _, request in members)
        for key, members in ends.items():
            small, large = (self._replayed(*member) for member in members)
            self._anchors[key] = _Anchored((small[0], large[0]), large[1])

    def _to_anchor(self, families: Mapping[str, Members]) -> list[str]:
        missing = [key for key in families if key not in self._anchors]
        if not missing or families[missing[0]][0][1]["sharding"]["kind"] not in ("none", "ddp"):
            return missing
        known = {anchored.situation.allocator for anchored in self._anchors.values()}
        alike: dict[AllocatorSettings, list[str]] = {}
        for key in missing:
            alike.setdefault(_allocator(families[key]), []).append(key)
        return [self._cheapest(keys, families) for settings, keys in alike.items() if settings not in known]

    def _cheapest(self, keys: Sequence[str], families: Mapping[str, Members]) -> str:
        return min(_wide(keys, families), key=lambda key: self._families[key].events)

    def _predicted(self, key: str, members: Members) -> dict[str, Prediction]:
        family, anchored = self._families[key], self._anchors.get(key)
        if anchored is None:
            settings = _allocator(members)
            lent = next(one for one in self._anchors.values() if one.situation.allocator == settings)
            anchored = replace(lent, situation=self._situation(*members[0], family.pieces.shell, bare=True))
        return family.predictions(self, members, anchored)

    def _ends(self, members: Members, pieces: Pieces) -> list[tuple[Candidate, Request]]:
        """The smallest member, and the largest that may fit: what an allocator adds should be best known where it decides."""
        from autotune.predict.pieces import requests

        peaks = pieces.at([requests.point_of(request) for _, request in members]).highest()
        smallest = min(range(len(peaks)), key=lambda place: peaks[place])
        below = [place for place, peak in enumerate(peaks) if peak <= self._limit_bytes]
        return [members[smallest], members[max(below, key=lambda place: peaks[place], default=smallest)]]

    def _replayed(self, candidate: Candidate, request: Request) -> tuple[Anchor, Situation]:
        """What a replay of this member shows, and its situation without events."""
        from autotune.predict.pieces.screening import Anchor
        from autotune.predict.predictor import use_of

        trace = self._tracer.trace(request)
        situation = self._situation(candidate, request, trace)
        bare = replace(situation.trace, sizes=(), parts=(), events=(), usage=None)
        return Anchor.of(use_of(situation), trace), replace(situation, trace=bare)


@dataclass(frozen=True)
class _Anchored:
    """What replays showed, of a small member and of a large one, and the situation of their family without events."""

    anchors: tuple[Anchor, Anchor]
    situation: Situation


class _Family:
    """Candidates that differ only in their points."""

    def __init__(self, points: Sequence[Point], pieces: Pieces) -> None:
        self.points, self.pieces, self.events = list(points), pieces, pieces.events

    def covers(self, points: Sequence[Point]) -> bool:
        """Whether these lie where the family was looked at."""
        known, asked = zip(*(one.row for one in self.points), strict=True), zip(*(one.row for one in points), strict=True)
        return all(min(ours) <= min(theirs) and max(theirs) <= max(ours) for ours, theirs in zip(known, asked, strict=True))

    def requested(self, request: Request) -> dict[Phase, int]:
        """Bytes that are requested at most in each phase of this member's step."""
        from autotune.predict.pieces import requests

        heights = self.pieces.at([requests.point_of(request)])
        return {phase: int(rows[0].sum()) for phase, rows in heights.phases.items()}

    def predictions(self, foresight: Foresight, members: Members, anchored: _Anchored) -> dict[str, Prediction]:
        from autotune.predict.pieces import requests
        from autotune.predict.pieces.points import rows_of
        from autotune.predict.pieces.screening import usage_at
        from autotune.predict.predictor import predict, surroundings_of

        points = [requests.point_of(request) for _, request in members]
        heights, works = self.pieces.at(points), self.pieces.works.at(rows_of(points))
        found: dict[str, Prediction] = {}
        for row, (candidate, _) in enumerate(members):
            situation = replace(
                anchored.situation,
                candidate_id=candidate.id,
                composition=foresight._trainer.compose(candidate, foresight._job),
                trace=replace(anchored.situation.trace, work=works[row]),
                settings=candidate.settings,
                calibration=foresight._calibrations.of(candidate.load_key),
            )
            usage = usage_at(heights, row, anchored.anchors, surroundings_of(situation), self.pieces.residual)
            found[candidate.id] = predict(replace(situation, usage=usage))
        return found


def open_foresight(question: Question, trainer: Trainer) -> Foresight:
    """For one question, with the traces that are kept on this machine."""
    job = question.job
    supported = SUPPORTED.get(trainer.name)
    cache = TraceCache()

    def make(versions: Mapping[str, str] | None) -> Tracer:
        python, adapter = job.workload.python, trainer.trace_adapter
        return Tracer(python, adapter=adapter, cache=cache, supported=supported, versions=versions)

    tracer = Tracers(make)
    return Foresight(job=job, trainer=trainer, limit_bytes=question.memory_limit_bytes, tracer=tracer)


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


def _gpu_of(hardware: Hardware) -> Gpu | None:
    """What the catalogue knows of it; None for a CPU and for a card that it does not have."""
    if hardware.kind == "cpu":
        return None
    try:
        return detect.gpu_named(hardware.name)
    except UnknownName:
        return None
