"""Legality is exact: the real GRPOConfig takes what we call legal, and refuses what we say it
refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.catalog.space_files import load_space
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import SearchSpace
from autotune.frameworks import trainer
from autotune.frameworks.trl.grpo_config_rules import config_refusals
from autotune.frameworks.trl.legality import GRPO_LOSSES, other_refusals
from autotune.frameworks.trl.settings import OWN_SETTINGS, settings_of
from tests.frameworks.conftest import make_task, refusal_of_trl, world_of

WORLDS = range(1, 9)
PLAN = ProbePlan()
COUNT = st.integers(1, 12)
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "per_device_train_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "steps_per_generation": COUNT,
    "generation_batch_size": st.sampled_from([1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]),
    "num_generations": st.integers(0, 9),
}
OTHERS: dict[str, st.SearchStrategy[Any]] = {
    "use_cpu": st.booleans(),
    "bf16": st.sampled_from([True, False, None]),
    "fp16": st.booleans(),
    "eval_strategy": st.sampled_from(["no", "steps", "epoch", "sometimes"]),
    "per_device_eval_batch_size": st.integers(1, 8),
    "num_generations_eval": st.sampled_from([None, 2, 3, 4]),
    "auto_find_batch_size": st.booleans(),
    "log_completions": st.booleans(),
    "log_completions_hub_repo": st.sampled_from([None, "some/where"]),
    "torch_empty_cache_steps": st.sampled_from([None, 0, 1, 3]),
    "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "adafactor", "adamw_9bit"]),
    "vllm_importance_sampling_mode": st.sampled_from(
        ["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
    ),
    "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5, 3.0]),
    "vllm_importance_sampling_clip_max": st.sampled_from([None, 0.5, 3.0]),
    "vllm_importance_sampling_correction": st.booleans(),
    "dataloader_num_workers": st.integers(0, 1),
    "dataloader_prefetch_factor": st.sampled_from([None, 2]),
    "use_vllm": st.booleans(),
    "beta": st.sampled_from([0.0, 0.04]),
    "loss_type": st.sampled_from(GRPO_LOSSES),
    "gradient_checkpointing": st.booleans(),
}
# A GPU is not asked for, so bf16 without use_cpu is refused where none is.
SLOW_FIRST = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", WORLDS)
def test_exactly_what_grpo_config_refuses_is_called_refused(ranks: int) -> None:
    counts = {True: 0, False: 0}

    @SLOW_FIRST
    @given(
        shape=st.fixed_dictionaries({}, optional=SHAPES),
        extra=st.fixed_dictionaries({}, optional=OTHERS),
    )
    def compare(shape: dict[str, Any], extra: dict[str, Any]) -> None:
        config = {"use_cpu": True, "bf16": False, **shape, **extra}
        if ranks > 1:
            config["use_cpu"] = (
                # without it and without a GPU, transformers runs one process whatever it was told
                True
            )
        refusal, trl_refusal = (
            next(config_refusals(config, ranks, "cpu"), None),
            refusal_of_trl(config, ranks),
        )
        counts[trl_refusal is None] += 1
        assert (refusal is None) == (trl_refusal is None), (
            f"{config}\nours: {refusal}\nTRL's: {trl_refusal}"
        )

    @SLOW_FIRST
    @given(shape=st.fixed_dictionaries({}, optional=SHAPES))
    def compare_shapes_alone(shape: dict[str, Any]) -> None:
        compare.hypothesis.inner_test(shape, {})  # type: ignore[attr-defined]

    with world_of(ranks):
        compare()
        compare_shapes_alone()
    assert min(counts.values()) >= 20, f"the property was hardly tried: {counts}"


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("demo", ranks) for ranks in WORLDS),
        ("grpo", 1),
        pytest.param("grpo", 8, marks=pytest.mark.slow),
        pytest.param("grpo-wide", 6, marks=pytest.mark.slow),
    ],
)
def test_every_legal_candidate_constructs(name: str, ranks: int) -> None:
    """The shipped spaces at each world size: legal ones construct, and what only our own rules
    refuse is told apart.
    """
    trl, space = trainer("trl"), load_space(name)
    task = make_task(ranks, global_batch=space.assume["global_batch"])
    shapes: dict[tuple[Any, ...], tuple[str | None, dict[str, Any]]] = {}
    for knobs in space.assignments():
        candidate = trl.complete(knobs, task)
        request: Any = trl.probe_request(candidate, task, PLAN)
        config = dict(request["settings"])
        shapes.setdefault(
            tuple(sorted(config.items(), key=str)), (trl.why_illegal(candidate, task), config)
        )
    picked = sorted(shapes.items(), key=str)[:: max(1, len(shapes) // 120)]
    with world_of(ranks):
        for _, (reason, config) in picked:
            trl_refusal = refusal_of_trl(config, ranks)
            if reason is None:
                assert trl_refusal is None, f"{config}: {trl_refusal}"
            elif trl_refusal is not None:
                assert next(config_refusals(config, ranks, "cpu"), None) is not None


def test_legal_means_that_no_list_refuses() -> None:
    task = make_task(2, global_batch=16)

    @settings(max_examples=300, deadline=None)
    @given(
        knobs=st.fixed_dictionaries(
            {},
            optional={
                **SHAPES,
                "use_vllm": st.booleans(),
                "vllm_max_model_length": st.sampled_from([None, 100, 2000]),
            },
        )
    )
    def compare(knobs: dict[str, Any]) -> None:
        candidate = trainer("trl").complete(knobs, task)
        reason = trainer("trl").why_illegal(candidate, task)
        listed = [
            *config_refusals(candidate.settings, 2, "cpu"),
            *other_refusals(candidate.settings, task),
        ]
        assert (reason is None) == (not listed)

    compare()


@pytest.mark.parametrize(
    ("knobs", "settings_held", "kind", "ranks", "fragments"),
    [
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            {},
            "cpu",
            1,
            ["held at 16", "makes 8"],
        ),
        (
            {"per_device_train_batch_size": 0, "gradient_accumulation_steps": 16},
            {},
            "cpu",
            1,
            ["at least 1", "0"],
        ),
        (
            {
                "use_vllm": True,
                "vllm_max_model_length": 300,
                "max_prompt_length": 200,
                "max_completion_length": 101,
            },
            {},
            "cpu",
            1,
            ["vllm_max_model_length (300)", "200 + 101 = 301"],
        ),
        (
            {"use_vllm": True, "max_prompt_length": 4000, "max_completion_length": 200},
            {},
            "cpu",
            1,
            ["4096 positions"],
        ),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, {}, "cpu", 1, ["sleep", "GPU"]),
        (
            {"use_vllm": True, "vllm_gpu_memory_utilization": 1.2},
            {},
            "cuda",
            1,
            ["at most 1", "1.2"],
        ),
        ({"use_vllm": True}, {"vllm_tensor_parallel_size": 3}, "cuda", 2, ["(3)", "2 ranks"]),
        (
            {"use_vllm": True},
            {"vllm_mode": "elsewhere"},
            "cuda",
            2,
            ["colocate", "server", "elsewhere"],
        ),
        ({}, {"fp16": True}, "cpu", 1, ["fp16", "GPU"]),
        ({}, {"dtype": "float16"}, "cpu", 1, ["fp16", "GPU"]),
        ({}, {"load_in_4bit": True, "use_peft": True}, "cpu", 1, ["4-bit", "GPU"]),
        ({}, {"load_in_4bit": True}, "cuda", 1, ["adapter", "use_peft"]),
        ({"loss_type": "dapper"}, {}, "cpu", 1, ["loss_type", "'dapper'", "dapo"]),
        ({}, {"deepspeed": "zero3.json"}, "cuda", 2, ["deepspeed", "sharding=zero2"]),
        (
            {},
            {"generation_batch_size": 16, "steps_per_generation": 2},
            "cpu",
            1,
            ["generation_batch_size (16)", "(2)"],
        ),
        ({}, {"use_cpu": True}, "cuda", 1, ["use_cpu"]),
        ({"num_generations": 1}, {}, "cpu", 1, ["num_generations", "at least 2"]),
        ({"num_generations": 5}, {}, "cpu", 1, ["(16", "num_generations (5)"]),
    ],
)
def test_reasons_state_the_rule_and_the_value(
    knobs: dict[str, Any],
    settings_held: dict[str, Any],
    kind: str,
    ranks: int,
    fragments: list[str],
) -> None:
    task = make_task(ranks, kind, global_batch=16, held_values=settings_held)
    reason = trainer("trl").why_illegal(trainer("trl").complete(knobs, task), task)
    assert reason is not None
    for word in fragments:
        assert word in reason


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_a_config_the_baseline_is_trls_shape_at_the_held_knobs(
    kind: str,
    ranks: int,
    space_with: Callable[..., SearchSpace],
) -> None:
    space = space_with(num_generations=[8])
    task = make_task(ranks, kind, global_batch=64 if ranks in (1, 2, 4, 8) else None)
    knobs = trainer("trl").baseline(space, task)
    candidate = trainer("trl").complete(knobs, task)
    assert trainer("trl").why_illegal(candidate, task) is None
    assert knobs["per_device_train_batch_size"] == 8
    assert knobs["gradient_checkpointing"] is True and knobs["use_vllm"] is False
    assert (
        knobs["num_generations"] == 8
        and knobs["max_completion_length"] == space["max_completion_length"].choices[0]
    )


def test_the_users_own_configuration_is_the_baseline(
    space_with: Callable[..., SearchSpace],
) -> None:
    settings_held = {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 4,
        "num_generations": 12,
        "gradient_checkpointing": False,
    }
    knobs = trainer("trl").baseline(space_with(), make_task(held_values=settings_held))
    assert {name: knobs[name] for name in settings_held} == settings_held


def test_what_the_users_file_leaves_out_is_trls_default_and_not_the_spaces_preference(
    space_with: Callable[..., SearchSpace], tmp_path: Path
) -> None:
    task = make_task(
        held_values={"per_device_train_batch_size": 4}, config_file=tmp_path / "train.yaml"
    )
    assert space_with()["num_generations"].choices[0] == 16
    assert trainer("trl").baseline(space_with(), task)["num_generations"] == 8


@pytest.fixture
def space_with() -> Callable[..., SearchSpace]:
    return lambda **choices: load_space("grpo").with_choices(choices)


def test_autotunes_own_settings_never_reach_trl() -> None:
    task: Task = make_task()
    request = trainer("trl").probe_request(
        trainer("trl").complete({"max_prompt_length": 77}, task), task, PLAN
    )
    assert not OWN_SETTINGS & set(request["settings"])  # type: ignore[call-overload]
    assert (
        settings_of({"max_prompt_length": 77}, task)["max_prompt_length"]
        == 77
        == request["lengths"]["prompt"]
    )  # type: ignore[index]
