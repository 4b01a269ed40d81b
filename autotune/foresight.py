"""Foresight: from candidates to Predictions, through traces of the step that each would run.

`predict` follows the one candidate's very step. `screen` answers for thousands: candidates that differ only in their batch
and lengths are one family and share a few short traces, from which every point follows (`predict/pieces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune import detect
from autotune.candidate import Candidate, fingerprint
from autotune.catalogue import Gpu
from autotune.environment import SUPPORTED
from autotune.errors import CannotPredict, UnknownName
from autotune.hardware import Hardware
from autotune.measurement import Measurement, Phase
from autotune.prediction import Prediction
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.trace import Trace
from autotune.trainers.base import Job, Trainer

if TYPE_CHECKING:
    from autotune.predict.pieces import Pieces, Point
    from autotune.predict.pieces.screening import Anchor
    from autotune.predict.predictor import Situation
    from autotune.question import Question

Request = Mapping[str, Any]

STAND_IN = "generic_trace"
"""Follows the plain step of frameworks whose own can't be, one by one: their spaces are small."""

FEW = 3
"""So few members of a family are followed one by one: that takes less than what all of a family would follow from."""

POINT_SETTINGS = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "max_completion_length", "max_length",
    "num_generations",
})  # fmt: skip
"""What moves inside a family. A group's size moves nothing but a few numbers per prompt."""


class Foresight:
    """Predicts the candidates of one job. Owner of one tracing process, which starts only when a trace is not known yet."""

    def __init__(self, *, job: Job, trainer: Trainer, limit_bytes: int, tracer: Tracer) -> None:
        from autotune.calibrate import Calibrations

        self._job, self._trainer, self._limit_bytes, self._tracer = job, trainer, limit_bytes, tracer
        self._gpu = _gpu_of(job.hardware)
        self._predictions: dict[str, Prediction] = {}
        self._families: dict[str, _Family] = {}
        self._anchors: dict[str, _Anchored] = {}
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
        families: dict[str, list[tuple[Candidate, Request]]] = {}
        for one in candidates:
            if one.id not in found:
                request = self._request(one)
                families.setdefault(_family_key(request), []).append((one, request))
        for key, members in families.items():
            found.update(self._screened(key, members))
        return {one.id: found[one.id] for one in candidates}

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Predictions of the same load are corrected from here on by what was measured."""
        self._calibrations.learn(candidate.load_key, self._followed(candidate, calibrated=False), measurement)
        self._predictions.clear()

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

    def _situation(self, candidate: Candidate, request: Request, trace: Trace) -> Situation:
        from autotune.predict.predictor import Situation
        from autotune.predict.sharding import Sharding, worst_rank

        config = self._job.workload.model.config
        hidden = config.get("hidden_size")
        sharded = worst_rank(trace, Sharding.of(request["sharding"], hidden_size=hidden if isinstance(hidden, int) else None))
        return Situation(
            candidate_id=candidate.id,
            composition=self._trainer.compose(candidate, self._job),
            hardware=self._job.hardware,
            gpu=self._gpu,
            limit_bytes=self._limit_bytes,
            config=config,
            trace=sharded.trace,
            settings=candidate.settings,
            host_bytes=sharded.host_bytes,
            notes=sharded.notes,
            calibration=self._calibrations.of(candidate.load_key),
        )

    # Families.

    def _screened(self, key: str, members: Sequence[tuple[Candidate, Request]]) -> dict[str, Prediction]:
        """All members of one family; one by one where their steps don't follow from each other."""
        from autotune.predict.pieces.blocks import NotUniform

        if key not in self._families and len(members) <= FEW:
            return {candidate.id: self.predict(candidate) for candidate, _ in members}
        try:
            family = self._family(key, members)
        except NotUniform:
            return {candidate.id: self.predict(candidate) for candidate, _ in members}
        return family.predictions(self, members)

    def _family(self, key: str, members: Sequence[tuple[Candidate, Request]]) -> _Family:
        from autotune.predict.pieces.survey import stretch_of, survey

        points = list(dict.fromkeys(_point_of(request) for _, request in members))
        known = self._families.get(key)
        if known is not None and known.covers(points):
            return known
        points = list(dict.fromkeys([*(known.points if known else ()), *points]))
        base = members[0][1]

        def follow(point: Point, layers: int | None) -> Trace:
            return self._tracer.trace(_at(base, point, layers))

        pieces = survey(follow, points, stretch_of(self._job.workload.model.config))
        self._families[key] = _Family(points, pieces, self._anchored(key, members, pieces))
        return self._families[key]

    def _anchored(self, key: str, members: Sequence[tuple[Candidate, Request]], pieces: Pieces) -> _Anchored:
        """Two members followed in full, for what their replays show. On one device, where nothing is cut up or exchanged,
        another family's serve as well."""
        alone = members[0][1]["sharding"]["kind"] == "none"
        if key in self._anchors:
            return self._anchors[key]
        if alone and self._anchors:
            lent = next(iter(self._anchors.values()))
            return replace(lent, situation=self._situation(*members[0], pieces.shell))
        small, large = (self._replayed(*member) for member in self._ends(members, pieces))
        self._anchors[key] = _Anchored((small[0], large[0]), large[1])
        return self._anchors[key]

    def _ends(self, members: Sequence[tuple[Candidate, Request]], pieces: Pieces) -> list[tuple[Candidate, Request]]:
        """The smallest member, and the largest that may fit: what an allocator adds should be best known where it decides."""
        peaks = pieces.at([_point_of(request) for _, request in members]).highest()
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

    def __init__(self, points: Sequence[Point], pieces: Pieces, anchored: _Anchored) -> None:
        self.points = list(points)
        self._pieces, self._situation, self._anchors = pieces, anchored.situation, anchored.anchors

    def covers(self, points: Sequence[Point]) -> bool:
        """Whether these lie where the family was looked at."""
        known, asked = zip(*(one.row for one in self.points), strict=True), zip(*(one.row for one in points), strict=True)
        return all(min(ours) <= min(theirs) and max(theirs) <= max(ours) for ours, theirs in zip(known, asked, strict=True))

    def requested(self, request: Request) -> dict[Phase, int]:
        """Bytes that are requested at most in each phase of this member's step."""
        heights = self._pieces.at([_point_of(request)])
        return {phase: int(rows[0].sum()) for phase, rows in heights.phases.items()}

    def predictions(self, foresight: Foresight, members: Sequence[tuple[Candidate, Request]]) -> dict[str, Prediction]:
        from autotune.predict.pieces import rows_of
        from autotune.predict.pieces.screening import usage_at
        from autotune.predict.predictor import predict, surroundings_of

        points = [_point_of(request) for _, request in members]
        heights, works = self._pieces.at(points), self._pieces.works.at(rows_of(points))
        found: dict[str, Prediction] = {}
        for row, (candidate, _) in enumerate(members):
            situation = replace(
                self._situation,
                candidate_id=candidate.id,
                composition=foresight._trainer.compose(candidate, foresight._job),
                trace=replace(self._situation.trace, work=works[row]),
                settings=candidate.settings,
                calibration=foresight._calibrations.of(candidate.load_key),
            )
            usage = usage_at(heights, row, self._anchors, surroundings_of(situation), self._pieces.residual)
            found[candidate.id] = predict(replace(situation, usage=usage))
        return found


def open_foresight(question: Question, trainer: Trainer) -> Foresight:
    """For one question, with the traces that are kept on this machine."""
    job = question.job
    supported = SUPPORTED.get(trainer.name)
    tracer = Tracer(job.workload.python, adapter=trainer.trace_adapter, cache=TraceCache(), supported=supported)
    return Foresight(job=job, trainer=trainer, limit_bytes=question.memory_limit_bytes, tracer=tracer)


def screened_out(question: Question, trainer: Trainer, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
    """The candidates that cannot fit, so that no probe is spent on them; never all, for that nothing fits is to be measured.

    Nothing on a CPU, whose limit binds the whole tree, and nothing where the step cannot be followed.
    """
    if question.job.hardware.kind != "cuda":
        return {}
    foresight = open_foresight(question, trainer)
    try:
        foreseen = foresight.screen(candidates)
    except CannotPredict:
        return {}
    finally:
        foresight.close()
    ruled_out = {one: prediction for one, prediction in foreseen.items() if prediction.fits is False}
    if len(ruled_out) == len(foreseen) and ruled_out:
        ruled_out.pop(min(ruled_out, key=lambda one: ruled_out[one].peak_memory_bytes.value))
    return ruled_out


def _family_key(request: Request) -> str:
    """Everything but the point, and the course that the number of micro-steps leads to."""
    from autotune.predict.pieces.survey import course_of

    settings = request["settings"]
    accumulation, steps = settings.get("gradient_accumulation_steps"), settings.get("steps_per_generation")
    stale = None if steps in (None, accumulation) else (accumulation, steps)
    fixed = {name: value for name, value in settings.items() if name not in POINT_SETTINGS}
    rest = {name: value for name, value in request.items() if name not in ("settings", "lengths")}
    return fingerprint({**rest, "settings": fixed, "course": course_of(_point_of(request).micro_steps), "stale": stale})


def _point_of(request: Request) -> Point:
    from autotune.predict.pieces import Point

    settings, lengths = request["settings"], request["lengths"]
    return Point(
        micro_batch=settings["per_device_train_batch_size"],
        prompt=lengths["prompt"],
        completion=lengths["completion"],
        micro_steps=settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps") or 1,
    )


def _at(request: Request, point: Point, layers: int | None) -> Request:
    """The same request at another point."""
    settings = dict(request["settings"])
    before = settings.get("steps_per_generation")
    settings["per_device_train_batch_size"] = point.micro_batch
    if before in (None, settings.get("gradient_accumulation_steps")):
        settings["gradient_accumulation_steps"] = point.micro_steps
    if before is not None:
        settings["steps_per_generation"] = point.micro_steps
    if "max_completion_length" in settings:
        settings["max_completion_length"] = point.completion
    if "max_length" in settings:
        settings["max_length"] = point.prompt + point.completion
    if "num_generations" in settings:
        settings["num_generations"] = _group(point, request["sharding"]["ranks"], settings["num_generations"])
    lengths = {**request["lengths"], "prompt": point.prompt, "completion": point.completion}
    return {**request, "settings": settings, "lengths": lengths, "model": {**request["model"], "layers": layers}}


def _group(point: Point, ranks: int, wanted: int) -> int:
    """Completions per prompt that this generation batch can be cut into: as wanted, or the next best."""
    batch = point.micro_batch * point.micro_steps * ranks
    return next((size for size in (wanted, *range(2, batch + 1)) if batch % size == 0), wanted)


def _gpu_of(hardware: Hardware) -> Gpu | None:
    """What the catalogue knows of it; None for a CPU and for a card that it does not have."""
    if hardware.kind == "cpu":
        return None
    try:
        return detect.gpu_named(hardware.name)
    except UnknownName:
        return None
