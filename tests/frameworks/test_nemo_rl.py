"""NeMo-RL's settings, rules and models, against its configuration file, its own parser and its
workers' source.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.core.measurement import ProbePlan
from autotune.frameworks.launched_run import OUT
from tests.frameworks.stand_ins import asked, refusal
from tests.frameworks.test_accepted import LENGTHS, accepted

DTENSOR, PACKING, DYNAMIC, ENGINE = (
    f"policy.{name}"
    for name in ("dtensor_cfg", "sequence_packing", "dynamic_batching", "generation")
)
REPOSITORY = Path(os.environ.get("AUTOTUNE_FRAMEWORKS") or "absent") / "nemo-rl" / "repo"
"""A clone at v0.7.0."""

needs_repository = pytest.mark.skipif(
    not REPOSITORY.is_dir(),
    reason=(
        "needs a clone in .venvs/frameworks/nemo-rl/repo, and verl's environment, which has hydra"
    ),
)
PADDED: dict[str, Any] = {f"{PACKING}.enabled": False}


def composed(**about: Any) -> Any:
    trainer, candidate, task = asked("nemo-rl", **about)
    assert trainer.why_illegal(candidate, task) is None
    return trainer.compose(candidate, task)


def request(**about: Any) -> Any:
    trainer, candidate, task = asked("nemo-rl", **about)
    return trainer.trace_request(candidate, task)


def test_colocated_everything_leaves_the_gpus_for_a_rollout() -> None:
    made = composed()
    assert (made.ranks, made.processes, made.generation) == (8, 2, "engine")
    assert made.engine.sleep and made.engine.max_model_length == 1536
    assert made.offloaded_in_rollout == ("weights", "adapters", "optimizer")
    assert "reference" not in made  # its weights are on the host


def test_split_half_of_the_gpus_serve_unless_a_number_is_given() -> None:
    split = {f"{ENGINE}.colocated.enabled": False}
    made = composed(settings=split)
    assert (made.ranks, made.engine, made.generation, made.offloaded_in_rollout) == (
        4,
        None,
        "server",
        (),
    )
    assert made.split.gpus == made.split.engines == 4 and made.split.engine.utilization == 0.6
    assert composed(settings={**split, f"{ENGINE}.colocated.resources.gpus_per_node": 6}).ranks == 2
    assert "must serve" in str(
        refusal("nemo-rl", settings={**split, f"{ENGINE}.colocated.resources.gpus_per_node": 8})
    )


def test_asynchronous_generates_ahead_on_other_gpus() -> None:
    ahead = {f"{ENGINE}.colocated.enabled": False, "grpo.async_grpo.enabled": True}
    found = composed(settings=ahead)
    assert (found.split.overlap, found.split.batches_ahead, found.split.at_sync) == (
        "stream",
        1.0,
        "drain",
    )
    _, candidate, _ = asked("nemo-rl", settings=ahead)
    assert candidate.settings["loss_fn.use_importance_sampling_correction"] is True
    assert candidate.settings[f"{ENGINE}.vllm_cfg.async_engine"] is True
    for name, at_sync in (
        ("in_flight_weight_updates", "pause"),
        ("recompute_kv_cache_after_weight_updates", "recompute"),
    ):
        ahead[f"grpo.async_grpo.{name}"] = True
        assert composed(settings=ahead).split.at_sync == at_sync
    assert "colocated.enabled=false" in str(
        refusal("nemo-rl", settings={"grpo.async_grpo.enabled": True})
    )


def test_nodes_share_the_gpus_out() -> None:
    _, candidate, _ = asked("nemo-rl", gpus=16, settings={"cluster.num_nodes": 2})
    assert candidate.settings["cluster.gpus_per_node"] == 8


def test_an_adapter_is_enabled_with_its_rank_and_merged_for_vllm() -> None:
    trainer, candidate, task = asked("nemo-rl", tuning="lora")
    assert (
        candidate.settings[f"{DTENSOR}.lora_cfg.enabled"] is True
        and candidate.settings[f"{DTENSOR}.lora_cfg.dim"] == 16
    )
    assert not trainer.compose(candidate, task).syncs_adapter_only
    assert request(tuning="lora")["adapter"]["lora_r"] == 16 and request()["adapter"] is None


def test_packed_rows_fill_a_micro_batch_and_are_computed_one_by_one() -> None:
    made = request(settings={f"{PACKING}.train_mb_tokens": 8192})
    rows = made["settings"]["per_device_train_batch_size"]
    assert (
        8192 <= rows * sum(made["lengths"][part] for part in ("prompt", "completion")) < 8192 + rows
    )
    assert (
        made["settings"]["loss_options"]["each_row"]
        and not request(settings=PADDED)["settings"]["loss_options"]["each_row"]
    )
    assert (
        made["sharding"]["options"]["units"] == "layers"
        and made["sharding"]["options"]["frozen_master_bytes"] == 4
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({f"{DYNAMIC}.enabled": True}, "exclude each other"),
        ({f"{DTENSOR}.context_parallel_size": 2}, "not supported with policy.sequence_packing"),
        (
            {**PADDED, f"{DTENSOR}.context_parallel_size": 3},
            "not divisible by policy.dtensor_cfg.context_parallel_size=3",
        ),
        ({f"{ENGINE}.vllm_cfg.tensor_parallel_size": 3}, "tensor_parallel_size=3"),
        ({"policy.train_global_batch_size": 100}, "completions of a step are not divisible"),
        (
            {**PADDED, "policy.train_micro_batch_size": 5},
            "not divisible by policy.train_micro_batch_size=5",
        ),
        ({f"{PACKING}.train_mb_tokens": 100}, "shorter than the longest row"),
        ({"grpo.num_generations_per_prompt": 1}, "at least 2"),
        ({"cluster.gpus_per_node": 4}, "the request is for 8"),
        ({"grpo.num_prompts_per_step": 0}, "grpo.num_prompts_per_step=0 is not above zero"),
    ],
)
def test_what_it_refuses_is_refused(settings: dict[str, Any], words: str) -> None:
    assert words in str(refusal("nemo-rl", settings=settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"policy.megatron_cfg.enabled": True},
        {f"{DTENSOR}._v2": False},
        {f"{DTENSOR}.tensor_parallel_size": 2},
        {f"{ENGINE}.backend": "sglang"},
        {"grpo.max_rollout_turns": 3},
    ],
)
def test_what_the_step_does_not_model_is_not_predicted(settings: dict[str, Any]) -> None:
    with pytest.raises(CannotPredict, match=next(iter(settings))):
        asked("nemo-rl", settings=settings)


@needs_repository
@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, ProbePlan()], ids=["the final run", "a probe"])
def test_its_own_parser_takes_the_overrides(plan: ProbePlan | None) -> None:
    trainer, candidate, task = asked("nemo-rl", tuning="lora", **LENGTHS)
    words = [word.replace(OUT, "/run") for word in trainer.launch(candidate, task, plan).argv]  # type: ignore[attr-defined]
    understood = accepted("verl", "nemo_rl_config.py", str(REPOSITORY), *words)
    policy = understood["policy"]
    assert policy["model_name"] == policy["tokenizer"]["name"] == "Qwen/Qwen2.5-7B"
    assert (
        policy["max_total_sequence_length"]
        == policy["generation"]["vllm_cfg"]["max_model_len"]
        == 1000
    )
    assert (
        policy["dtensor_cfg"]["lora_cfg"]["dim"] == 16
        and policy["dtensor_cfg"]["lora_cfg"]["enabled"] is True
    )
    assert policy["train_global_batch_size"] == understood["grpo"]["num_prompts_per_step"] * 8
    if plan:
        assert (
            understood["data"]["train"]["data_path"] == "/run/rows.jsonl"
            and understood["data"]["default"]["prompt_file"] is None
        )
        assert (
            understood["grpo"]["max_num_steps"] == 4
            and understood["checkpointing"]["enabled"] is False
        )
