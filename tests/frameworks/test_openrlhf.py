"""OpenRLHF's settings, rules and models, against what its command line and workers say."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from tests.frameworks.stand_ins import case_of, refusal


def composed(method: str = "grpo", **about: Any) -> Any:
    trainer, candidate, task = case_of("openrlhf", method, **about)
    assert trainer.why_illegal(candidate, task) is None
    return trainer.compose(candidate, task)


def test_the_command_lines_own_defaults() -> None:
    _, candidate, _ = case_of("openrlhf")
    assert (candidate.settings["train.batch_size"], candidate.settings["rollout.batch_size"]) == (
        128,
        1024,
    )
    assert candidate.settings["data.max_len"] == 2048
    assert candidate.settings["ds.zero_stage"] == 2
    assert candidate.settings["vllm.num_engines"] == 8


def test_lengths_make_the_longest_row() -> None:
    trainer, candidate, task = case_of("openrlhf", max_prompt_length=300, max_completion_length=700)
    assert candidate.settings["data.max_len"] == 1000
    assert trainer.trace_request(candidate, task)["lengths"] == {
        "prompt": 300,
        "completion": 700,
        "padded": False,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"vllm.num_engines": 3},
            (
                "8 by --gpus: the policy has 8 (actor.num_nodes x actor.num_gpus_per_node) and"
                " vLLM 3 ("
            ),
        ),
        ({"actor.num_gpus_per_node": 16}, "8 by --gpus: the policy has 16"),
        (
            {"train.colocate_all": False, "actor.num_gpus_per_node": 4, "vllm.num_engines": 6},
            "4 + 1 + 6 of 8 by --gpus",  # the reference has a GPU of its own
        ),
        ({"rollout.n_samples_per_prompt": 1}, "must be above 1"),
        ({"train.micro_batch_size": 5}, "not divisible by"),
        ({"train.micro_batch_size": 0}, "not above zero"),
        ({"rollout.batch_size": 1, "rollout.micro_batch_size": 4}, "GPUs idle"),
        ({"algo.advantage.estimator": "gae"}, "use --method ppo"),
        ({"ds.zero_stage": "three"}, "is not a whole number"),
        (
            {"train.colocate_all": False, "actor.num_gpus_per_node": 16},
            "16 GPUs, and the request is for 8",
        ),
        ({"ds.lora.rank": 8}, "add --tuning lora"),
    ],
)
def test_what_it_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], message: str
) -> None:
    reason = refusal("openrlhf", settings=settings)
    assert reason is not None and message in reason


def test_a_row_over_the_token_budget_is_a_micro_batch_of_its_own() -> None:
    """get_minimum_num_micro_batch_size of OpenRLHF: such a row opens a batch, and nothing
    refuses it.
    """
    dynamic = {"train.dynamic_batch_enable": True, "data.max_len": 2048}
    for budget, tokens in ((1024, 2048), (8192, 8192)):
        trainer, candidate, task = case_of(
            "openrlhf", settings={**dynamic, "train.max_tokens_per_gpu": budget}
        )
        assert trainer.sizes(trainer.values(candidate.settings), task)["tokens"] == tokens


def test_every_model_is_a_process_of_its_own() -> None:
    assert composed().processes == 3  # policy, reference, engine
    assert composed(settings={"algo.kl.init_coef": 0.0}).processes == 2
    assert composed("ppo").processes == 4
    apart = composed(
        settings={
            "train.colocate_all": False,
            "actor.num_gpus_per_node": 4,
            "algo.kl.init_coef": 0.0,
        }
    )
    assert (apart.processes, apart.ranks, apart.generation) == (1, 4, "server")


def test_frozen_models_are_whole_below_zero_3() -> None:
    assert composed(settings={"ds.zero_stage": 2})["reference"].sharding == "none"
    assert composed(settings={"ds.zero_stage": 3})["reference"].sharding == "parameters"
    assert composed(settings={"ds.zero_stage": 3, "ref.offload": True})["reference"].awake == ()


def test_a_critic_trains_along_unless_they_take_turns() -> None:
    assert composed("ppo", settings={"ds.enable_sleep": False})["critic"].trains_concurrently
    assert not composed("ppo", settings={"ds.enable_sleep": True})["critic"].trains_concurrently


def test_deepspeed_offloads_what_is_said() -> None:
    trainer, candidate, task = case_of(
        "openrlhf", settings={"ds.adam_offload": True, "ds.zero_stage": 3}
    )
    assert trainer.trace_request(candidate, task)["sharding"] == {
        "kind": "zero3",
        "ranks": 8,
        "options": {"offload_optimizer": {"device": "cpu"}},
    }


def test_qlora_is_its_4_bit() -> None:
    trainer, candidate, task = case_of("openrlhf", tuning="qlora")
    spec: Any = trainer.trace_request(candidate, task)
    assert spec["model"]["load_in_4bit"] and spec["adapter"]["lora_r"] == 16


def test_untraceable_settings_are_refused() -> None:
    with pytest.raises(CannotPredict, match="muon"):
        case_of("openrlhf", settings={"actor.optim": "muon"})
    with pytest.raises(CannotPredict, match="tensor_parallel_size"):
        case_of("openrlhf", settings={"ds.tensor_parallel_size": 2})


def test_an_asynchronous_run_has_vllm_on_gpus_of_its_own_whatever_is_colocated() -> None:
    """`train.colocate_all` then means DeepSpeed's models alone (`cli/train_ppo_ray.py`)."""
    composition = composed(
        **{"train.async_enable": True, "vllm.num_engines": 6, "vllm.enable_sleep": False}
    )
    assert (composition.ranks, composition.engine, composition.generation) == (2, None, "server")
    assert (composition.split.gpus, composition.split.overlap, composition.split.at_sync) == (
        6,
        "batch",
        "drain",
    )
    partial = composed(
        **{
            "train.async_enable": True,
            "train.partial_rollout_enable": True,
            "vllm.enable_sleep": False,
        }
    )
    assert (partial.split.gpus, partial.split.overlap, partial.split.at_sync) == (
        4,
        "stream",
        "pause",
    )


def test_engines_of_their_own_leave_the_policy_the_other_gpus() -> None:
    apart = {"train.colocate_all": False, "vllm.num_engines": 4}
    composition = composed(settings={**apart, "train.colocate_actor_ref": True})
    assert (composition.ranks, composition.split.gpus) == (4, 4)
    composition = composed(settings=apart)
    assert (composition.ranks, composition.split.gpus) == (2, 4), (
        "the reference has as many as the policy"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.partial_rollout_enable": True}, "requires train.async_enable"),
        ({"train.async_enable": True, "vllm.num_engines": 8}, "have GPUs of their own"),
        ({"train.async_enable": True, "vllm.enable_sleep": True}, "excludes vllm.enable_sleep"),
    ],
)
def test_a_split_that_openrlhf_refuses_is_refused(settings: dict[str, Any], message: str) -> None:
    assert message in refusal("openrlhf", **settings)
