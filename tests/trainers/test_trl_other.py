"""SFT, DPO and RLOO: predicted, not run yet; and the request of a trace for every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import IllegalConfiguration
from autotune.trainers import trainer
from autotune.trainers.base import ProbePlan
from tests.trainers.conftest import make_job


@pytest.mark.parametrize("method", ["rloo", "sft", "dpo"])
def test_running_is_refused_with_the_way_out(method: str) -> None:
    other, job = trainer("trl", method), make_job(method=method)
    candidate = other.complete({"per_device_train_batch_size": 4}, job)
    assert other.measures is False
    for ask in (lambda: other.load_request(candidate, job), lambda: other.probe_request(candidate, job, ProbePlan())):
        with pytest.raises(IllegalConfiguration, match="autotune predict"):
            ask()


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


def test_its_file_says_that_nothing_was_measured(tmp_path: Path) -> None:
    sft, job = trainer("trl", "sft"), make_job(method="sft")
    (path,) = sft.write_files(sft.complete({"max_length": 256}, job), job, tmp_path)
    assert "predicted, not measured" in path.read_text()
    assert yaml.safe_load(path.read_text())["max_length"] == 256
