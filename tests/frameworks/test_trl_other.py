"""SFT, DPO, RLOO and online DPO: what a probe and a trace of them are asked, what is illegal,
and the files they end in.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.errors import IllegalConfiguration
from autotune.core.job import Model
from autotune.core.measurement import ProbePlan
from autotune.frameworks import trainer
from tests.frameworks.conftest import make_task


@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        ("rloo", (512, 512)),
        ("sft", (512, 512)),
        ("dpo", (512, 512)),
        ("kto", (512, 512)),
        ("reward", (512, 512)),
        ("online-dpo", (512, 64)),
    ],
)
def test_a_probe_is_asked_for_in_the_methods_own_settings(
    method: str, lengths: tuple[int, int]
) -> None:
    method_trainer, task = trainer("trl", method), make_task(method=method)
    candidate = method_trainer.complete({"per_device_train_batch_size": 4}, task)
    load: Any = json.loads(json.dumps(method_trainer.load_request(candidate, task)))
    probe: Any = json.loads(json.dumps(method_trainer.probe_request(candidate, task, ProbePlan())))
    assert load["method"] == method
    assert (
        set(probe["settings"]) <= set(method_trainer.fields())
        and "output_dir" not in probe["settings"]
    )
    assert (probe["lengths"]["prompt"], probe["lengths"]["completion"]) == lengths


def test_rows_without_padding_are_not_cut_by_the_trainer() -> None:
    sft, task = (
        trainer("trl", "sft"),
        make_task(method="sft", held_values={"padding_free": True, "max_length": 256}),
    )
    candidate = sft.complete({}, task)
    assert candidate.settings["max_length"] is None
    assert (
        candidate.settings["max_prompt_length"] + candidate.settings["max_completion_length"] == 256
    )  # type: ignore[operator]
    packed = make_task(
        method="sft", held_values={"padding_free": True, "packing": True, "max_length": 256}
    )
    assert sft.complete({}, packed).settings["max_length"] == 256


@pytest.mark.parametrize(
    ("method", "settings_held", "tuning", "message"),
    [
        ("kto", {"per_device_train_batch_size": 1}, "full", "at least 2"),
        ("kto", {"per_device_train_batch_size": 1, "loss_type": "apo_zero_unpaired"}, "full", None),
        ("reward", {"lora_task_type": "CAUSAL_LM"}, "lora", "needs lora_task_type SEQ_CLS"),
        ("reward", {}, "lora", None),
    ],
)
def test_rules_of_their_own(
    method: str,
    settings_held: dict[str, Any],
    tuning: Any,
    message: str | None,
) -> None:
    method_trainer, task = (
        trainer("trl", method),
        make_task(
            kind="cuda",
            method=method,
            held_values=settings_held,
            tuning=tuning,
        ),
    )
    why = method_trainer.why_illegal(method_trainer.complete({}, task), task)
    assert why is None if message is None else message in str(why)


@pytest.mark.parametrize(
    ("settings_held", "message"),
    [
        ({"activation_offloading": True}, "needs a GPU"),
        ({"load_in_4bit": True}, "use_peft must be on"),
    ],
)
def test_what_rows_can_not_be_trained_with(settings_held: dict[str, Any], message: str) -> None:
    sft, task = trainer("trl", "sft"), make_task(method="sft", held_values=settings_held)
    reasons = [sft.why_illegal(sft.complete({}, task), task) or ""]
    on_gpu = make_task(
        kind="cuda",
        method="sft",
        held_values=settings_held,
    )
    reasons.append(sft.why_illegal(sft.complete({}, on_gpu), on_gpu) or "")
    assert any(message in reason for reason in reasons)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward"])
def test_offloading_of_activations_is_probed_and_traced_for_a_gpu(method: str) -> None:
    method_trainer, task = (
        trainer("trl", method),
        make_task(
            kind="cuda",
            method=method,
            held_values={"activation_offloading": True},
        ),
    )
    candidate = method_trainer.complete({}, task)
    assert method_trainer.why_illegal(candidate, task) is None
    probe: Any = method_trainer.probe_request(candidate, task, ProbePlan())
    assert probe["settings"]["activation_offloading"] is True
    traced: Any = method_trainer.trace_request(candidate, task)
    assert traced["settings"]["activation_offloading"] is True


@pytest.mark.parametrize("method", ["grpo", "rloo", "sft", "dpo", "kto", "reward", "online-dpo"])
def test_what_is_to_be_followed_is_json_in_the_methods_own_settings(method: str) -> None:
    method_trainer, task = (
        trainer("trl", method),
        make_task(
            4,
            kind="cuda",
            method=method,
            tuning="lora",
        ),
    )
    request = json.loads(
        json.dumps(
            method_trainer.trace_request(
                method_trainer.complete({"per_device_train_batch_size": 4}, task), task
            )
        )
    )
    assert request["method"] == method
    assert set(request["settings"]) <= set(method_trainer.fields())
    # The Trainer's rule: with an adapter parameters may be unused.
    options = {"find_unused_parameters": True}
    assert request["sharding"] == {"kind": "ddp", "ranks": 4, "options": options}
    assert request["adapter"]["lora_r"] == 16 and request["device"] == "cuda"


def test_ddps_options_are_those_of_the_trainer() -> None:
    grpo = trainer("trl")

    def options(**user: Any) -> object:
        task = make_task(
            2,
            kind="cuda",
            tuning="full",
            user_settings=user,
        )
        request: Any = grpo.trace_request(
            grpo.complete({"gradient_checkpointing": True}, task), task
        )
        return request["sharding"]["options"]

    assert options() == {"find_unused_parameters": False}
    chosen = options(ddp_find_unused_parameters=True, ddp_bucket_cap_mb=50)
    assert chosen == {"find_unused_parameters": True, "bucket_cap_mb": 50}


@pytest.mark.parametrize(
    ("knobs", "lengths"),
    [
        ({"max_length": 512}, (256, 256)),
        ({}, (512, 512)),
        ({"max_length": 1000, "max_prompt_length": 300}, (300, 700)),
        ({"max_length": 1000, "max_completion_length": 200}, (800, 200)),
        ({"max_length": None, "max_prompt_length": 300, "max_completion_length": 200}, (300, 200)),
    ],
)
def test_the_longest_row_in_two_parts(knobs: dict[str, Any], lengths: tuple[int, int]) -> None:
    settings_held = {name: value for name, value in knobs.items() if value is not None}
    sft, task = trainer("trl", "sft"), make_task(method="sft", held_values=settings_held)
    request: Any = sft.trace_request(sft.complete({}, task), task)
    assert (request["lengths"]["prompt"], request["lengths"]["completion"]) == lengths


def test_sharding_is_autotunes_own_setting() -> None:
    grpo, task = trainer("trl"), make_task(4, kind="cuda", held_values={"sharding": "zero3"})
    candidate = grpo.complete({}, task)
    request: Any = grpo.trace_request(candidate, task)
    assert (
        request["sharding"] == {"kind": "zero3", "ranks": 4}
        and "sharding" not in request["settings"]
    )
    launch: Any = grpo.load_request(candidate, task)["launch"]
    assert (
        launch["sharding"] == "zero3"
        and launch["accelerate"]["deepspeed_config"]["zero_stage"] == 3
    )
    probe: Any = grpo.probe_request(candidate, task, ProbePlan())
    assert "sharding" not in probe["settings"]
    bad = make_task(4, kind="cuda", held_values={"sharding": "zero9"})
    assert "sharding must be one of" in (grpo.why_illegal(grpo.complete({}, bad), bad) or "")


def test_weights_that_are_quantised_on_the_hub_are_told() -> None:
    grpo, task = trainer("trl"), make_task(kind="cuda", tuning="lora")
    config: Any = task.workload.model.config
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    request: Any = grpo.trace_request(grpo.complete({}, task), task)
    assert request["model"]["gptq_bits"] == 4
    with pytest.raises(
        IllegalConfiguration, match="gptq"
    ):  # there is nothing on disk to probe with
        grpo.probe_request(grpo.complete({}, task), task, ProbePlan())


def test_a_row_rule_is_refused_with_its_values() -> None:
    sft, task = (
        trainer("trl", "sft"),
        make_task(
            2,
            kind="cuda",
            method="sft",
            global_batch=7,
        ),
    )
    assert "held at 7" in (
        sft.why_illegal(sft.complete({"per_device_train_batch_size": 2}, task), task) or ""
    )


@pytest.mark.parametrize(
    ("method", "columns"), [("sft", {"text"}), ("dpo", {"prompt", "chosen", "rejected"})]
)
def test_its_files_run_as_they_are(
    method: str,
    columns: set[str],
    tmp_path: Path,
) -> None:
    method_trainer, task = trainer("trl", method), make_task(method=method)
    paths = method_trainer.write_files(
        method_trainer.complete({"max_length": 256}, task), task, tmp_path
    )
    assert {path.name for path in paths} == {
        "recommended.yaml",
        "accelerate.yaml",
        "launch.sh",
        "train.jsonl",
    }
    content = yaml.safe_load((tmp_path / "recommended.yaml").read_text())
    assert (
        content["max_length"] == 256
        and "reward_funcs" not in content
        and "steps_per_generation" not in content
    )
    assert f"-m trl.scripts.{method} --config" in (tmp_path / "launch.sh").read_text()
    rows = (tmp_path / "placeholder" / "train.jsonl").read_text().splitlines()
    assert set(json.loads(rows[0])) == columns
    assert (
        f"{method.upper()} for made/up on cpu, measured by autotune"
        in (tmp_path / "recommended.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("settings_held", "global_batch", "message"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 4, "make 8"),
        ({"max_new_tokens": 64, "max_length": 64}, None, "would contain no prompt"),
        ({"use_vllm": True}, None, "use_vllm must be off"),
        ({"max_new_tokens": 0}, None, "max_new_tokens must be"),
        ({"load_in_4bit": True}, None, "use_peft must be on"),
    ],
)
def test_what_pairs_can_not_be_written_with(
    settings_held: dict[str, Any],
    global_batch: int | None,
    message: str,
) -> None:
    pairs, task = (
        trainer("trl", "online-dpo"),
        make_task(
            kind="cuda",
            method="online-dpo",
            held_values=settings_held,
            global_batch=global_batch,
        ),
    )
    assert message in (pairs.why_illegal(pairs.complete({}, task), task) or "")


def test_a_pair_is_two_completions_wherever_completions_are_counted() -> None:
    pairs, task = (
        trainer("trl", "online-dpo"),
        make_task(
            2,
            kind="cuda",
            method="online-dpo",
            global_batch=32,
        ),
    )
    candidate = pairs.complete({"per_device_train_batch_size": 4}, task)
    assert (
        candidate.settings["gradient_accumulation_steps"] == 2
        and pairs.why_illegal(candidate, task) is None
    )
    composition = pairs.compose(candidate, task)
    assert (composition.micro_batch, composition.accumulation, composition.generation_batch) == (
        8,
        2,
        16,
    )
    assert [resident.role for resident in composition.residents] == ["policy", "reference"]
    bounded = make_task(
        method="online-dpo", held_values={"max_completion_length": 100, "max_prompt_length": 20}
    )
    assert (
        pairs.complete({}, bounded).settings["max_new_tokens"],
        pairs.complete({}, bounded).settings["max_length"],
    ) == (100, 120)


@pytest.mark.parametrize("method", ["grpo", "rloo", "online-dpo"])
def test_a_reward_model_of_the_users_is_on_every_rank_and_cut_under_zero3_alone(
    method: str,
) -> None:
    asking, reward_model = (
        trainer("trl", method),
        {"reward_model_name_or_path": "Qwen/Qwen2.5-0.5B"},
    )
    for sharding, cut in (("zero3", "parameters"), ("zero2", "none"), ("fsdp2", "none")):
        task = make_task(
            4,
            kind="cuda",
            method=method,
            tuning="lora",
            held_values={"sharding": sharding},
            user_settings=reward_model,
        )
        (judge,) = [
            resident
            for resident in asking.compose(asking.complete({}, task), task).residents
            if resident.role == "reward"
        ]
        assert (judge.model, judge.sharding, judge.trains) == ("Qwen/Qwen2.5-0.5B", cut, False)


@pytest.mark.slow
def test_online_dpos_files_train_as_they_are(tiny_model: Path, tmp_path: Path) -> None:
    """There is no command: accelerate starts the script that is written beside the YAML, and
    that really takes a step.
    """
    model = Model(
        name=str(tiny_model),
        config=json.loads((tiny_model / "config.json").read_text()),
        folder=tiny_model,
        origin="f",
    )
    settings_held = {
        "max_new_tokens": 8,
        "max_prompt_length": 24,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    }
    pairs, task = (
        trainer("trl", "online-dpo"),
        make_task(
            method="online-dpo",
            model=model,
            tuning="lora",
            held_values=settings_held,
        ),
    )
    pairs.write_files(pairs.complete({}, task), task, tmp_path)
    content = yaml.safe_load((tmp_path / "recommended.yaml").read_text())
    assert (
        content["max_new_tokens"] == 8
        and content["max_length"] == 32
        and "config_file" not in content
    )
    bounds = [
        "--max_steps",
        "1",
        "--logging_steps",
        "1",
        "--report_to",
        "none",
        "--save_strategy",
        "no",
    ]
    ended = subprocess.run(
        ["bash", str(tmp_path / "launch.sh"), *bounds],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (
        "objective/scores" in ended.stdout
        and (tmp_path / "outputs" / "adapter_model.safetensors").is_file()
    )


def test_what_was_not_measured_is_not_called_so(tmp_path: Path) -> None:
    sft, task = (
        trainer("trl", "sft"),
        make_task(
            kind="cuda",
            method="sft",
            tuning="lora",
        ),
    )
    elsewhere = dataclasses.replace(task, hardware=dataclasses.replace(task.hardware, here=False))
    sft.write_files(sft.complete({"max_length": 256}, elsewhere), elsewhere, tmp_path)
    assert "predicted by autotune" in (tmp_path / "recommended.yaml").read_text()
