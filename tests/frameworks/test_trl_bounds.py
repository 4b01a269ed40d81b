"""Values at the bounds of TRL's rules, and defaults of a TRL that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.catalog.space_files import load_space
from autotune.frameworks import trainer
from autotune.frameworks.trl.field_list import _defaults_in
from autotune.frameworks.trl.packed_rows import PackedRow, fullest_row
from autotune.frameworks.trl.requests import dataset_of
from tests.frameworks.conftest import make_task
from tests.frameworks.test_trl_combinations import reason, task

TRL = trainer("trl")


@pytest.mark.parametrize(
    ("mode", "is_legal"),
    [
        ("token_truncate", True),
        ("token_mask", True),
        ("sequence_truncate", False),
        ("sequence_mask", False),
    ],
)
def test_vespo_takes_corrections_by_token_alone(mode: str, is_legal: bool) -> None:
    """The ValueError of GRPOTrainer.__init__: only where vLLM generates and corrects."""
    knobs = {"loss_type": "vespo", "vllm_importance_sampling_mode": mode}
    refusal = reason(task(), use_vllm=True, **knobs)
    assert (refusal is None) is is_legal
    assert refusal is None or repr(mode) in refusal
    assert reason(task(), **knobs) is None, "nothing to correct"


@pytest.mark.parametrize(
    ("share", "is_legal"),
    [
        (1.0, True),
        (0.01, True),
        (0, False),
    ],
)
def test_an_engine_may_have_all_of_a_card(share: float, is_legal: bool) -> None:
    knobs = {"use_vllm": True, "vllm_gpu_memory_utilization": share}
    assert (reason(task(), **knobs) is None) is is_legal


def test_an_engine_on_one_gpu_takes_any_number_of_heads() -> None:
    odd = task(config={"num_attention_heads": 7})
    assert reason(odd, use_vllm=True) is None
    refusal = reason(odd, use_vllm=True, vllm_tensor_parallel_size=2)
    assert refusal is not None and "7 attention heads" in refusal


@pytest.mark.parametrize(
    ("parallel", "sharding"),
    [
        (None, "none"),
        (1, "none"),
        (2, "tensor"),
    ],
)
def test_an_engine_is_spread_by_tensor_parallelism_alone(
    parallel: int | None,
    sharding: str,
) -> None:
    knobs = {"use_vllm": True, "per_device_train_batch_size": 8, "num_generations": 8}
    if parallel is not None:
        knobs["vllm_tensor_parallel_size"] = parallel
    composition = TRL.compose(TRL.complete(knobs, task()), task())
    assert composition["engine"].sharding == sharding


def test_a_micro_batch_of_one_is_one_row() -> None:
    settings = {
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 1024,
        "token_budget": 0,
        "per_device_train_batch_size": 1,
    }
    assert fullest_row(settings, 1) == PackedRow(
        rollouts=1,
        groups=1,
        completion=1024,
    )


def test_a_mixture_of_datasets_is_a_dataset() -> None:
    mixture = [{"path": "trl-lib/tldr"}]
    assert dataset_of(make_task(user_settings={"datasets": mixture})) == {"datasets": mixture}
    assert dataset_of(make_task(user_settings={"dataset_config": "main"})) is None


def test_defaults_are_those_of_the_named_class(tmp_path: Path) -> None:
    source = tmp_path / "grpo_config.py"
    source.write_text(
        "class Other:\n    beta: float = 0.5\n\n\nclass GRPOConfig:\n    beta: float = 0.25\n"
    )
    assert dict(_defaults_in(source, ("GRPOConfig",))) == {"beta": 0.25}


# The baseline.


def test_a_batch_that_a_micro_batch_does_not_make_is_not_tried() -> None:
    """12 completions per step on one rank: not by 8, 7 or 5 at a time."""
    shapes = TRL.batch_shapes(make_task(global_batch=12))
    sizes = [tuple(shape.values()) for shape in shapes]
    assert sizes == [(6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]


def test_without_a_legal_shape_the_first_one_is_the_baseline() -> None:
    """Groups of 5 never make 12 completions: the reader hears why the first shape, 6 by 2, is
    refused.
    """
    space = load_space("grpo").with_choices({"num_generations": [5]})
    job_task = make_task(global_batch=12)
    knobs = TRL.baseline(space, job_task)
    assert knobs["per_device_train_batch_size"] == 6
    refusal = TRL.why_illegal(TRL.complete(knobs, job_task), job_task)
    assert refusal is not None and "num_generations (5)" in refusal


def test_kto_needs_the_releases_that_have_its_trainer() -> None:
    assert trainer("trl", "kto").requires == {"trl": "trl>=1.8,<1.17"}
