"""unsloth: what it would silently rewrite is refused, and its script says what it came to."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune import frameworks
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks.launched_run import OUT, probe_request
from autotune.frameworks.unsloth import Unsloth
from autotune.worker.launched_output import MetricReader
from tests.frameworks.conftest import make_task

ENVIRONMENTS = os.environ.get("AUTOTUNE_FRAMEWORKS")
PYTHON = Path(ENVIRONMENTS or "") / "unsloth" / "bin" / "python"
ACCEPTS = Path(__file__).parent / "accepts" / "unsloth_signatures.py"


def case_of(
    method: str, *, kind: str = "cuda", ranks: int = 1, tuning: str = "qlora", **settings_held: Any
) -> tuple[Unsloth, Candidate, Task]:
    trainer = frameworks.trainer("unsloth", method)
    assert isinstance(trainer, Unsloth)
    task = make_task(
        ranks,
        kind,
        framework="unsloth",
        method=method,
        tuning=tuning,
        held_values=settings_held,
    )
    return trainer, trainer.complete({}, task), task


def constants(
    trainer: Unsloth,
    candidate: Candidate,
    task: Task,
    plan: ProbePlan | None = None,
) -> dict[str, Any]:
    """Return the settings in the script, which is parsed on the way."""
    tree = ast.parse(trainer.launch(candidate, task, plan).files["train.py"])
    assigned = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    value_nodes = {
        node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)
    }
    return {name: ast.literal_eval(value_nodes[name]) for name in ("MODEL", "ADAPTER", "CONFIG")}


@pytest.mark.parametrize(
    ("method", "about", "message"),
    [
        (
            "grpo",
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
            "silently make the micro-batch 8",
        ),
        ("grpo", {"num_generations": 1}, "at least 2"),
        ("grpo", {"tuning": "full"}, "fast_inference shares frozen weights"),
        ("grpo", {"use_gradient_checkpointing": "some"}, "must be one of unsloth, true, false"),
        ("sft", {"kind": "cpu"}, "requires a GPU"),
        ("sft", {"ranks": 2}, "one GPU"),
        ("sft", {"tuning": "full", "load_in_4bit": True}, "cannot be trained"),
    ],
)
def test_what_it_would_refuse_or_rewrite_is_refused(
    method: str,
    about: dict[str, Any],
    message: str,
) -> None:
    trainer, candidate, task = case_of(method, **about)
    assert message in (trainer.why_illegal(candidate, task) or "")


def test_the_tuning_is_what_is_loaded() -> None:
    loaded = {
        tuning: constants(*case_of("sft", tuning=tuning)) for tuning in ("full", "lora", "qlora")
    }
    assert loaded["full"]["MODEL"]["full_finetuning"] and loaded["full"]["ADAPTER"] is None
    assert not loaded["lora"]["MODEL"]["load_in_4bit"] and loaded["lora"]["ADAPTER"]["r"] == 16
    assert loaded["qlora"]["MODEL"]["load_in_4bit"]


def test_a_probe_is_bounded_saves_nothing_and_reads_back_what_it_came_to() -> None:
    trainer, candidate, task = case_of("grpo")
    config = constants(trainer, candidate, task, ProbePlan())["CONFIG"]
    assert config["max_steps"] == 5 and config["save_strategy"] == "no"
    assert "max_steps" not in constants(trainer, candidate, task)["CONFIG"]
    request = json.loads(
        json.dumps(
            probe_request(
                trainer.launch(candidate, task, ProbePlan()), ProbePlan(), candidate.settings
            )
        )
    )
    assert (
        request["effective"] == {"kind": "json", "file": f"{OUT}/settings.json"}
        and "per_device_train_batch_size" in request["settings"]
    )


def test_standby_keeps_the_share_that_was_chosen() -> None:
    trainer, candidate, task = case_of("grpo", vllm_standby=True)
    assert trainer.launch(candidate, task).environment["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] == "1"
    assert trainer.launch(*case_of("grpo")[1:]).environment == {}


@pytest.mark.parametrize(
    ("method", "lines", "tokens"),
    [
        ("grpo", ['{"loss": 0.0, "completions/mean_length": 100.5}'] * 2, round(100.5 * 8)),
        ("sft", ['{"loss": 2.0, "num_tokens": 4096}', '{"loss": 2.0, "num_tokens": 8192}'], 4096),
    ],
)
def test_tokens_out_of_trls_log(
    method: str,
    lines: list[str],
    tokens: int,
) -> None:
    trainer, candidate, task = case_of(method)
    request: Any = probe_request(trainer.launch(candidate, task), ProbePlan())
    reader = MetricReader(request["figures"])
    assert reader.read(lines[0], 1.0) is None
    figure = reader.read(lines[1], 5.0)
    assert figure is not None and (figure.tokens, figure.seconds) == (tokens, 4.0)


@pytest.mark.skipif(not ENVIRONMENTS, reason="needs `make frameworks`")
@pytest.mark.slow
def test_its_own_source_takes_what_is_rendered() -> None:
    done = subprocess.run(
        [str(PYTHON), str(ACCEPTS)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    takes = json.loads(done.stdout)
    everything = {
        "unsloth_grpo_mini_batch": 4,
        "unsloth_logit_chunk_multiplier": 2,
        "float8_kv_cache": True,
    }
    for method in ("sft", "grpo", "dpo"):
        trainer, candidate, task = case_of(method, **(everything if method == "grpo" else {}))
        settings = constants(trainer, candidate, task, ProbePlan())
        assert set(settings["MODEL"]) <= set(takes["from_pretrained"]) and set(
            settings["ADAPTER"]
        ) <= set(takes["get_peft_model"])
        trls = set(frameworks.trainer("trl", method).fields())
        assert set(settings["CONFIG"]) - trls <= {*takes["added"], "output_dir", "report_to"}
    assert takes["version"].startswith("2026.10.")


def test_it_is_told_within_bounds_a_plain_step_the_most_and_the_state_the_least() -> None:
    trainer, candidate, task = case_of("grpo")
    composition = trainer.compose(candidate, task)
    assert composition.fused_parts == ("activations", "logits")
    assert composition.engine is not None and composition.engine.shares_weights
    assert trainer.trace_request(candidate, task)["method"] == "generic"
    offline = case_of("sft")
    assert offline[0].compose(*offline[1:]).engine is None


def test_pairs_are_two_rows_each_which_a_reference_scores_beside_them() -> None:
    trainer, candidate, task = case_of("dpo", per_device_train_batch_size=3, max_seq_length=100)
    spec = trainer.step(candidate.settings, task)
    assert (spec.tokens, spec.sequences_per_row, spec.loss) == (2 * 3 * 100, 2, "logprobs")
    settings: Any = trainer.trace_request(candidate, task)["settings"]
    assert settings["scores_in_step"] and settings["per_device_train_batch_size"] == 6
    rows = trainer.launch(candidate, task).files["rows.jsonl"].splitlines()
    assert set(json.loads(rows[0])) == {"prompt", "chosen", "rejected"}
    before = case_of("dpo", precompute_ref_log_probs=True)
    assert not before[0].step(before[1].settings, before[2]).scores_in_step


@pytest.mark.parametrize(
    ("method", "settings", "roles"),
    [
        ("dpo", {}, ["policy", "reference"]),
        ("dpo", {"precompute_ref_log_probs": True}, ["policy"]),
        ("grpo", {"beta": 0.04, "fast_inference": False}, ["policy", "reference"]),
        ("grpo", {"fast_inference": False}, ["policy"]),
        ("sft", {}, ["policy"]),
    ],
)
def test_all_weights_that_are_trained_are_compared_with_a_copy(
    method: str, settings: dict[str, Any], roles: list[str]
) -> None:
    trainer, candidate, task = case_of(method, tuning="full", **settings)
    assert [resident.role for resident in trainer.compose(candidate, task).residents] == roles
    adapted = case_of(method, **settings)
    assert [resident.role for resident in adapted[0].compose(*adapted[1:]).residents] == ["policy"]


def test_modules_of_an_adapter_are_those_of_the_trace_and_of_the_script() -> None:
    modules = {"target_modules": "q_proj,v_proj", "modules_to_save": "embed_tokens"}
    trainer, candidate, task = case_of("sft", **modules)
    script = constants(trainer, candidate, task)["ADAPTER"]
    traced: Any = trainer.trace_request(candidate, task)
    assert script["target_modules"] == traced["adapter"]["lora_target_modules"]
    assert script["target_modules"] == ["q_proj", "v_proj"]
    assert script["modules_to_save"] == traced["adapter"]["lora_modules_to_save"]
    assert traced["adapter"]["lora_modules_to_save"] == ["embed_tokens"]
    assert traced["settings"]["autocast_adapter_dtype"]  # unsloth's adapters are float32
    pattern = r"model\.layers\.\d+\.self_attn\.q_proj"
    trainer, candidate, task = case_of("sft", target_modules=pattern)
    traced = trainer.trace_request(candidate, task)
    assert traced["adapter"]["lora_target_modules"] == pattern


def test_weights_in_float32_are_held_so() -> None:
    trainer, candidate, task = case_of("sft", tuning="full", float32_mixed_precision=True)
    traced: Any = trainer.trace_request(candidate, task)
    assert (traced["model"]["dtype"], traced["settings"]["bf16"]) == ("float32", True)
    assert constants(trainer, candidate, task)["MODEL"]["float32_mixed_precision"] is True
