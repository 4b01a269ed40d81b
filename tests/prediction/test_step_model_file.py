"""Step models in files: what is read equals what was written."""

from __future__ import annotations

import lzma
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from autotune.core.trace import ModuleUse, Parameter, Work
from autotune.estimate.screening import StepModel, repetition_of, survey
from autotune.estimate.screening.step_model import sizes_at
from autotune.prediction.step_model_file import FORMAT, SurveyedModel, packed, unpacked
from tests.estimate.test_step_model import SPACE, step

LAYERS = 40


@pytest.fixture(name="model", scope="module")
def one_model() -> StepModel:
    repetition = repetition_of({"num_hidden_layers": LAYERS})
    return survey(lambda point, short: step(point, short or LAYERS), SPACE, repetition)


def through_file(model: StepModel) -> StepModel:
    surveyed = SurveyedModel(
        model=model,
        points=tuple(SPACE),
        versions={"trl": "1.16.0"},
    )
    again = unpacked(packed(surveyed))
    assert again.points == tuple(SPACE) and again.versions == {"trl": "1.16.0"}
    return again.model


def test_the_step_is_the_same_at_every_point(model: StepModel) -> None:
    again = through_file(model)
    assert again.trace == model.trace
    for point in SPACE:
        traced = step(point, LAYERS)
        assert sizes_at(again, point).tolist() == list(traced.sizes)


def test_what_sharding_needs_is_kept(model: StepModel) -> None:
    """Missing layers and allocations, uses with and without a gradient, and modules of no
    parameter.
    """
    embedding = Parameter(
        count=10,
        size=40,
        trains=True,
        layer=None,
        number=0,
    )
    tied = Parameter(
        count=10,
        size=20,
        trains=False,
        layer=3,
        number=None,
        group=1,
    )
    usage = ModuleUse(
        parameters=(embedding, tied),
        modules=((), (0, 1), ()),
        uses=((0, 0, 1), (4, 5, 0, 2), (9, 5, 1, -1)),
        keeps_recomputed=True,
    )
    trace = replace(
        model.trace,
        usage=usage,
        streams={7: 1, 9: 2},
        returns={7: 11},
        emptied=(3,),
    )
    sharded = replace(model, stretched=replace(model.stretched, trace=trace))
    assert through_file(sharded).trace == trace


def test_the_work_is_the_same(model: StepModel) -> None:
    work = Work(
        phase="forward",
        flops={"bfloat16": 1e12},
        moved_bytes=3e9,
        kernels=12,
    )

    def worked(point: object, layers: int | None) -> object:
        return replace(step(point, layers or LAYERS), work=(work,))  # type: ignore[arg-type]

    repetition = repetition_of({"num_hidden_layers": LAYERS})
    model = survey(worked, SPACE, repetition)  # type: ignore[arg-type]
    rows = np.array(SPACE, dtype=np.float64)
    assert through_file(model).work.work_at(rows) == model.work.work_at(rows)


def test_other_content_is_refused(model: StepModel) -> None:
    content = packed(
        SurveyedModel(
            model=model,
            points=tuple(SPACE),
            versions={},
        )
    )
    document = msgspec.msgpack.decode(lzma.decompress(content))
    later = lzma.compress(msgspec.msgpack.encode({**document, "format": FORMAT + 1}))
    for damaged in (content[:100], b"no file of this kind", later):
        with pytest.raises(ValueError):
            unpacked(damaged)
