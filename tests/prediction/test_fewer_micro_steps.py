"""Step models of fewer micro-steps, compared with traced steps of TRL."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.core.trace import Trace, Work
from autotune.estimate.screening import Point, StepModel, request_at, survey
from autotune.estimate.screening.fewer_micro_steps import with_fewer_micro_steps
from autotune.estimate.screening.request_points import (
    Request,
    traced_request,
    with_many_micro_steps,
)
from autotune.estimate.screening.step_model import phase_peaks, sizes_at, steps_at
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService
from autotune.prediction.step_families import points_around
from autotune.prediction.tracer_pool import TracerPool
from autotune.request.flags import flags_of
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

LAYERS = 2
PIECES = 2e-3  # of a peak of two layers: pieces of token ids and masks

GRPO_WITH_ENGINE: Mapping[str, Any] = {"tuning": "lora", "hold": {"use_vllm": True}}
FULL_UNDER_ZERO3: Mapping[str, Any] = {"tuning": "full", "hold": {"sharding": "zero3"}}
DPO: Mapping[str, Any] = {"tuning": "full", "method": "dpo"}


@dataclass(frozen=True)
class TracedFamily:
    """A family of steps of two layers of Qwen2.5-0.5B, with many micro-steps."""

    request: Request
    tracers: TracerPool

    def trace(self, point: Point, layers: int | None = None) -> Trace:
        request = request_at(self.request, point, layers or LAYERS)
        return self.tracers.trace(traced_request(request))

    def model(self) -> StepModel:
        many = with_many_micro_steps(self.request) or self.request
        return survey(self.trace, points_around(many), None)


@pytest.fixture(
    name="family",
    scope="module",
    params=[GRPO_WITH_ENGINE, FULL_UNDER_ZERO3, DPO],
    ids=["GRPO with an engine", "full under ZeRO-3", "DPO"],
)
def one_family(request: pytest.FixtureRequest) -> Iterator[TracedFamily]:
    flags = flags_of({"model": "Qwen2.5-0.5B", "gpus": "2xA100-40G", **request.param})
    parsed = read_sources(flags, mode="predict").parse(limit_prompts=True)
    job = parsed.job
    tracers = open_tracers(job.task, parsed.trainer)
    service = PredictionService(
        task=job.task,
        trainer=parsed.trainer,
        limit_bytes=job.memory_limit_bytes,
        tracer=tracers,
    )
    yield TracedFamily(service.request(candidate_of_job(parsed)), tracers)
    tracers.close()


@pytest.fixture(name="model", scope="module")
def one_model(family: TracedFamily) -> StepModel:
    return family.model()


@pytest.mark.parametrize("micro_steps", [1, 2, 3])
def test_peaks_are_those_of_a_trace(
    micro_steps: int, family: TracedFamily, model: StepModel
) -> None:
    point = Point(4, 200, 600, micro_steps)
    trace = family.trace(point)
    derived = with_fewer_micro_steps(model, micro_steps)
    sizes = sizes_at(derived, point)
    peaks = phase_peaks(derived.trace, sizes)
    expected = phase_peaks(trace)
    assert peaks == pytest.approx(expected, rel=PIECES)

    highest = max(peaks.values())
    expected_highest = max(expected.values())
    assert highest == pytest.approx(expected_highest, rel=PIECES / 10)


def test_work_is_that_of_a_trace(family: TracedFamily, model: StepModel) -> None:
    point = Point(4, 200, 600, 1)
    derived = with_fewer_micro_steps(model, 1)
    [step] = steps_at(derived, [point])
    trace = family.trace(point)
    assert operations(step.work) == pytest.approx(operations(trace.work), rel=0.01)


def operations(works: Iterable[Work]) -> dict[str, float]:
    by_phase = {}
    for work in works:
        by_phase[work.phase] = sum(work.flops.values())
    return by_phase


def test_modules_are_used_in_the_order_of_a_trace(family: TracedFamily, model: StepModel) -> None:
    """Scoring with an engine takes a pass for each part of the batch; it is left as it is."""
    trace = family.trace(Point(4, 200, 600, 1))
    derived = with_fewer_micro_steps(model, 1)
    assert training_uses(derived.trace) == training_uses(trace)


def training_uses(trace: Trace) -> list[tuple[int, ...]]:
    """Return kind and module of the uses in training passes and after them."""
    if trace.usage is None:
        return []
    begins = [mark.event for mark in trace.marks]
    uses = []
    for event, *use in trace.usage.uses:
        mark = trace.marks[bisect.bisect_right(begins, event) - 1]
        if mark.phase in ("forward", "backward", "optimizer"):
            uses.append(tuple(use[:2]))
    return uses
