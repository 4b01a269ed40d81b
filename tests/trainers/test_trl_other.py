"""SFT, DPO and RLOO: what a probe and a trace of them are asked, what is illegal, and the files they end in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import IllegalConfiguration
from autotune.trainers import trainer
from autotune.trainers.base import ProbePlan
from tests.trainers.conftest import make_job


@pytest.mark.parametrize(("method", "lengths"), [("rloo", (512, 512)), ("sft", (512, 512)), ("dpo", (512, 512))])
def test_a_probe_is_asked_for_in_the_methods_own_settings(method: str, lengths: tuple[int, int]) -> None:
    other, job = trainer("trl", method), make_job(method=method)
    candidate = other.complete({"per_device_train_batch_size": 4}, job)
    assert other.measures
    load: Any = json.loads(json.dumps(other.load_request(candidate, job)))
    probe: Any = json.loads(json.dumps(other.probe_request(candidate, job, ProbePlan())))
    assert load["method"] == method
    assert set(probe["settings"]) <= set(other.fields()) and "output_dir" not in probe["settings"]
    assert (probe["lengths"]["prompt"], probe["lengths"]["completion"]) == lengths


def test_rows_without_padding_are_not_cut_by_the_trainer() -> None:
    sft, job = trainer("trl", "sft"), make_job(method="sft", held={"padding_free": True, "max_length": 256})
    candidate = sft.complete({}, job)
    assert candidate.settings["max_length"] is None
    assert candidate.settings["max_prompt_length"] + candidate.settings["max_completion_length"] == 256  # type: ignore[operator]
    packed = make_job(method="sft", held={"padding_free": True, "packing": True, "max_length": 256})
    assert sft.complete({}, packed).settings["max_length"] == 256


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"activation_offloading": True}, "needs a GPU"),
        ({"load_in_4bit": True}, "use_peft must be on"),
    ],
)
def test_what_rows_can_not_be_trained_with(held: dict[str, Any], words: str) -> None:
    sft, job = trainer("trl", "sft"), make_job(method="sft", held=held)
    reasons = [sft.why_illegal(sft.complete({}, job), job) or ""]
    on_gpu = make_job(kind="cuda", method="sft", held=held)
    reasons.append(sft.why_illegal(sft.complete({}, on_gpu), on_gpu) or "")
    assert any(words in reason for reason in reasons)


@pytest.mark.parametrize("method", ["grpo", "rloo", "sft", "dpo"])
def test_what_is_to_be_followed_is_json_in_the_methods_own_settings(method: str) -> None:
    other, job = trainer("trl", method), make_job(4, kind="cuda", method=method, tuning="lora")
    request = json.loads(json.dumps(other.trace_request(other.complete({"per_device_train_batch_size": 4}, job), job)))
    assert request["method"] == method
    assert set(request["settings"]) <= set(other.fields())
    assert request["sharding"] == {"kind": "ddp", "ranks": 4}
    assert request["adapter"]["lora_r"] == 16 and request["device"] == "cuda"


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
    held = {name: value for name, value in knobs.items() if value is not None}
    sft, job = trainer("trl", "sft"), make_job(method="sft", held=held)
    request: Any = sft.trace_request(sft.complete({}, job), job)
    assert (request["lengths"]["prompt"], request["lengths"]["completion"]) == lengths


def test_sharding_is_autotunes_own_setting() -> None:
    grpo, job = trainer("trl"), make_job(4, kind="cuda", held={"sharding": "zero3"})
    candidate = grpo.complete({}, job)
    request: Any = grpo.trace_request(candidate, job)
    assert request["sharding"] == {"kind": "zero3", "ranks": 4} and "sharding" not in request["settings"]
    launch: Any = grpo.load_request(candidate, job)["launch"]
    assert launch["sharding"] == "zero3" and launch["accelerate"]["deepspeed_config"]["zero_stage"] == 3
    assert "sharding" not in grpo.probe_request(candidate, job, ProbePlan())["settings"]  # type: ignore[operator]
    bad = make_job(4, kind="cuda", held={"sharding": "zero9"})
    assert "sharding must be one of" in (grpo.why_illegal(grpo.complete({}, bad), bad) or "")


def test_weights_that_are_quantised_on_the_hub_are_told() -> None:
    grpo, job = trainer("trl"), make_job(kind="cuda", tuning="lora")
    job.workload.model.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}  # type: ignore[index]
    request: Any = grpo.trace_request(grpo.complete({}, job), job)
    assert request["model"]["gptq_bits"] == 4
    with pytest.raises(IllegalConfiguration, match="gptq"):  # there is nothing on disk to probe with
        grpo.probe_request(grpo.complete({}, job), job, ProbePlan())


def test_a_row_rule_is_refused_with_its_values() -> None:
    sft, job = trainer("trl", "sft"), make_job(2, kind="cuda", method="sft", global_batch=7)
    assert "held at 7" in (sft.why_illegal(sft.complete({"per_device_train_batch_size": 2}, job), job) or "")


@pytest.mark.parametrize(("method", "columns"), [("sft", {"text"}), ("dpo", {"prompt", "chosen", "rejected"})])
def test_its_files_run_as_they_are(method: str, columns: set[str], tmp_path: Path) -> None:
    other, job = trainer("trl", method), make_job(method=method)
    paths = other.write_files(other.complete({"max_length": 256}, job), job, tmp_path)
    assert {path.name for path in paths} == {"recommended.yaml", "accelerate.yaml", "launch.sh", "train.jsonl"}
    content = yaml.safe_load((tmp_path / "recommended.yaml").read_text())
    assert content["max_length"] == 256 and "reward_funcs" not in content and "steps_per_generation" not in content
    assert f'"$trl" {method} --config' in (tmp_path / "launch.sh").read_text()
    rows = (tmp_path / "placeholder" / "train.jsonl").read_text().splitlines()
    assert set(json.loads(rows[0])) == columns
    assert f"{method.upper()} for made/up on cpu, as autotune measured it" in (tmp_path / "recommended.yaml").read_text()


def test_what_was_not_measured_is_not_called_so(tmp_path: Path) -> None:
    sft, job = trainer("trl", "sft"), make_job(kind="cuda", method="sft", tuning="lora")
    elsewhere = dataclasses.replace(job, hardware=dataclasses.replace(job.hardware, here=False))
    sft.write_files(sft.complete({"max_length": 256}, elsewhere), elsewhere, tmp_path)
    assert "as autotune predicted it" in (tmp_path / "recommended.yaml").read_text()
