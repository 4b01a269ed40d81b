"""SkyRL's settings, rules and models, against what its own configuration and workers say."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.core.measurement import ProbePlan
from autotune.frameworks.stand_in import StandIn
from tests.frameworks.stand_ins import case_of, refusal
from tests.frameworks.test_accepted import (
    ENVIRONMENTS,
    LENGTHS,
    accepted,
    needs_environments,
    printed,
    rendered,
)

ENGINE, PLACEMENT, POLICY = "generator.inference_engine", "trainer.placement", "trainer.policy"
MICRO = "trainer.micro_train_batch_size_per_gpu"
SPLIT: dict[str, Any] = {f"{PLACEMENT}.colocate_all": False}


def composed(**about: Any) -> Any:
    trainer, candidate, task = case_of("skyrl", **about)
    assert trainer.why_illegal(candidate, task) is None
    return trainer.compose(candidate, task)


def request(**about: Any) -> Any:
    trainer, candidate, task = case_of("skyrl", **about)
    return trainer.trace_request(candidate, task)


def test_colocated_all_gpus_train_and_serve_by_turns() -> None:
    composition = composed()
    assert (
        composition.ranks == 8 and composition.engine.sleep and composition.processes == 3
    )  # policy, reference, engine
    assert composition["reference"].awake == ()
    assert composition.offloaded_in_rollout == ("weights", "adapters", "optimizer")
    assert composed(settings={"trainer.algorithm.use_kl_loss": False}).processes == 2


def test_split_the_engine_has_half_of_the_gpus() -> None:
    trainer, candidate, task = case_of("skyrl", settings=SPLIT)
    assert (
        candidate.settings[f"{PLACEMENT}.policy_num_gpus_per_node"]
        == candidate.settings[f"{ENGINE}.num_engines"]
        == 4
    )
    composition = trainer.compose(candidate, task)
    assert (
        composition.ranks,
        composition.engine,
        composition.generation,
        composition.offloaded_in_rollout,
    ) == (
        4,
        None,
        "server",
        (),
    )
    wide = {**SPLIT, f"{ENGINE}.num_engines": 3, f"{ENGINE}.tensor_parallel_size": 2}
    assert composed(settings={**wide, "trainer.train_batch_size": 256}).ranks == 2


def test_an_adapter_alone_is_sent() -> None:
    assert composed(tuning="lora").syncs_adapter_only and not composed().syncs_adapter_only


def test_layers_with_their_adapters_are_the_units_and_frozen_weights_are_float32() -> None:
    spec = request(tuning="lora")
    assert spec["sharding"]["kind"] == "fsdp2" and spec["sharding"]["options"]["units"] == "layers"
    assert spec["model"]["dtype"] == "float32" and spec["settings"]["bf16"]
    assert spec["settings"]["loss_options"]["entropy_chunk"] == 1024


def test_a_token_budget_is_no_bound_for_a_longer_row() -> None:
    spec = request(
        settings={"trainer.max_tokens_per_microbatch": 500},
        max_prompt_length=300,
        max_completion_length=700,
    )
    assert (
        spec["settings"]["per_device_train_batch_size"] == 1
        and sum(spec["lengths"][part] for part in ("prompt", "completion")) == 1000
    )


READS = """
import json, sys
from autotune.worker.launched_output import LaunchedSettings
spec, lines, names = json.load(sys.stdin)
settings = LaunchedSettings(spec, str)
for line in ["something before", *lines]:
    settings.read_line(line)
print(json.dumps(settings.reported_values(names)))
"""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({MICRO: 3}, "not divisible by"),
    ({"trainer.policy_mini_batch_size": 2048}, "not divisible by trainer.policy_mini_batch_size"),
    (
        {"trainer.policy_mini_batch_size": 300},
        "not divisible by trainer.policy_mini_batch_size=300",
    ),
    ({MICRO: 0}, "above zero"),
    ({f"{ENGINE}.num_engines": 3}, "they use 8 and 3"),
    ({"trainer.algorithm.use_kl_in_reward": True}, "exclude each other"),
    ({"trainer.logprobs_chunk_size": 0}, "above zero"),
    ({"trainer.fused_lm_head_logprob": True}, "needs trainer.strategy=megatron"),
]
"""Refused by SkyRL as well."""

ALLOWED: list[dict[str, Any]] = [
    {},
    SPLIT,
    {MICRO: 8},
    {f"{ENGINE}.tensor_parallel_size": 2},
    {"trainer.max_tokens_per_microbatch": 20000},
    {f"{POLICY}.sequence_parallel_size": 4},
    {"trainer.train_batch_size": 512, "generator.n_samples_per_prompt": 5},
    {"trainer.placement.colocate_policy_ref": False, **SPLIT},
    {"trainer.algorithm.use_kl_loss": False},
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *REFUSED,
        ({f"{POLICY}.sequence_parallel_size": 3}, "8 GPUs are not divisible"),
        ({"generator.n_samples_per_prompt": 1}, "at least 2"),
        ({**SPLIT, f"{PLACEMENT}.policy_num_gpus_per_node": 6}, "6 + 4 GPUs"),
        ({"trainer.flash_attn": False}, "requires trainer.flash_attn=true"),
        ({f"{POLICY}.model.lora.rank": 8}, "add --tuning lora"),
    ],
)
def test_what_it_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], message: str
) -> None:
    reason = refusal("skyrl", settings=settings)
    assert reason is not None and message in reason


def test_another_sharding_is_refused_by_name() -> None:
    with pytest.raises(CannotPredict, match="megatron"):
        case_of("skyrl", settings={"trainer.strategy": "megatron"})


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, ProbePlan()], ids=["the final run", "a probe"])
def test_its_parser_and_checks_take_what_is_typed(plan: ProbePlan | None) -> None:
    arguments = rendered("skyrl", "grpo", plan, settings={"trainer.logger": "console"})
    understood = accepted("skyrl", "skyrl_config.py", *arguments)
    assert (
        understood["trainer"]["policy"]["model"]["path"]
        == understood["trainer"]["ref"]["model"]["path"]
        == "Qwen/Qwen2.5-7B"
    )
    assert understood["generator"]["max_input_length"] == 300
    assert understood["generator"]["sampling_params"]["max_generate_length"] == 700
    if plan:
        assert understood["trainer"]["max_training_steps"] == 4 and understood["data"][
            "train_data"
        ] == ["/run/rows.jsonl"]


@needs_environments
@pytest.mark.slow
def test_its_checks_refuse_what_is_refused_and_take_what_is_taken() -> None:
    def arguments(settings: dict[str, Any]) -> list[str]:
        trainer, candidate, task = case_of(
            "skyrl", settings={"trainer.logger": "console", **settings}
        )
        assert isinstance(trainer, StandIn)
        return list(trainer.launch(candidate, task).argv[3:])

    for settings in ALLOWED:
        assert refusal("skyrl", settings=settings) is None, settings
    cases = [*(settings for settings, _ in REFUSED), *ALLOWED]
    problems = accepted(
        "skyrl", "skyrl_config.py", "--each", json.dumps([arguments(case) for case in cases])
    )
    assert [problem is not None for problem in problems] == [True] * len(REFUSED) + [False] * len(
        ALLOWED
    ), problems


@needs_environments
@pytest.mark.slow
def test_its_printed_configuration_is_read_back() -> None:
    """Read with the worker's reader, under SkyRL's own Python, whose OmegaConf reads YAML."""
    trainer, candidate, _ = case_of("skyrl", "grpo", **LENGTHS)
    assert isinstance(trainer, StandIn) and trainer.facts.reported_settings is not None
    lines = printed("skyrl", "skyrl_config.py", *rendered("skyrl", "grpo", ProbePlan()))
    spec = [asdict(trainer.facts.reported_settings), lines, list(candidate.settings)]
    done = subprocess.run(
        [str(Path(ENVIRONMENTS or "") / "skyrl" / "bin" / "python"), "-c", READS],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    expected = {
        name: value
        for name, value in candidate.settings.items()
        if name not in trainer.facts.own_settings
    }
    assert json.loads(done.stdout) == expected


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/data/it's: {a}/$x", "/data/${b}/c d", "/data/[1], é"])
def test_its_parser_reads_any_path_as_it_was_given(path: str) -> None:
    trainer, candidate, task = case_of("skyrl", "grpo", settings={"trainer.logger": "console"})
    assert isinstance(trainer, StandIn)
    settings = {
        **candidate.settings,
        **trainer.data(path),
        "trainer.policy.model.path": trainer.as_path(path),
    }
    arguments = [word for line in trainer.arguments(settings, task) for word in shlex.split(line)]
    understood = accepted("skyrl", "skyrl_config.py", *arguments)
    assert (
        understood["data"]["train_data"] == [path]
        and understood["trainer"]["policy"]["model"]["path"] == path
    )


@needs_environments
@pytest.mark.slow
def test_its_own_words_are_those_that_are_read() -> None:
    """The texts of the log lines by which speed and phases are read, in the package's source."""
    (package,) = Path(os.environ["AUTOTUNE_FRAMEWORKS"]).glob(
        "skyrl/lib/*/site-packages/skyrl/train"
    )
    trainer = (package / "trainer.py").read_text()
    assert "avg_final_rewards: {avg_rewards}, avg_response_length: {avg_response_length}" in trainer
    for phase in (
        "generate",
        "fwd_logprobs_values_reward",
        "train_critic_and_policy",
        "sync_weights",
    ):
        assert f'Timer("{phase}"' in trainer
    assert """f"Started: '{self.message}'\"""" in (package / "utils" / "utils.py").read_text()


def test_a_tied_output_layer_has_weights_of_its_own() -> None:
    trainer, candidate, task = case_of("skyrl", model="Qwen2.5-0.5B")
    assert task.workload.model.config["tie_word_embeddings"] is True
    spec: Any = trainer.trace_request(candidate, task)
    assert spec["model"]["config"]["tie_word_embeddings"] is False
