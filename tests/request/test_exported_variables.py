"""Allocator settings that the shell exports are held, as the final run has them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.space import KnobValue
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.request.sources.exported_variables import exported_allocator

NAME, NEWER_NAME = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("exported", "value", "variable"),
    [
        ({NAME: "max_split_size_mb:64"}, "max_split_size_mb:64", NAME),
        ({NEWER_NAME: "expandable_segments:True"}, "expandable_segments:True", NEWER_NAME),
        ({NEWER_NAME: "a:1", NAME: "b:2"}, "a:1", NEWER_NAME),
        ({NEWER_NAME: "", NAME: "b:2"}, "b:2", NAME),
    ],
)
def test_an_exported_setting_is_read_under_the_name_that_vllm_reads(
    exported: dict[str, str],
    value: KnobValue,
    variable: str,
) -> None:
    setting = exported_allocator(exported)
    assert setting is not None
    assert (setting.name, setting.value, str(setting.origin)) == (NAME, value, variable)


@pytest.mark.parametrize("exported", [{}, {NAME: ""}, {NAME: " "}])
def test_an_empty_variable_is_none(exported: dict[str, str]) -> None:
    assert exported_allocator(exported) is None


def request_of(gpus: str, mode: str, *hold: str) -> ParsedRequest:
    return parse_request(
        Flags(
            model="Qwen2.5-0.5B",
            gpus=gpus,
            mode=mode,
            hold=hold,
        )
    )


@pytest.fixture(autouse=True)
def exported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "max_split_size_mb:64")
    monkeypatch.delenv(NEWER_NAME, raising=False)


def test_it_is_held_and_never_relaxed_on_gpus_of_this_machine() -> None:
    request = request_of("A100-40G", "emulate")
    assert request.job.task.workload.held_values[NAME] == "max_split_size_mb:64"
    assert NAME in request.pinned
    assert "is exported here, and so held" in "\n".join(request.notes)


def test_a_flag_wins() -> None:
    request = request_of("A100-40G", "emulate", f"{NAME}=null")
    assert request.job.task.workload.held_values[NAME] is None
    assert "is exported here" not in "\n".join(request.notes)


@pytest.mark.parametrize("gpus", ["A100-40G", "cpu"])
def test_elsewhere_another_shell_starts_the_run(gpus: str) -> None:
    assert NAME not in request_of(gpus, "predict").job.task.workload.held_values


FILES = {
    "run.yaml": (
        f"model_name_or_path: Qwen/Qwen2.5-0.5B\nenv:\n  {NAME}: expandable_segments:True\n"
    ),
    "run.sh": (
        f"export {NAME}=expandable_segments:True\n"
        "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name a/b\n"
    ),
    "verl.sh": (
        f"export {NAME}=expandable_segments:True\n"
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
        " algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
        " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8\n"
    ),
}


def request_of_file(name: str, folder: Path) -> ParsedRequest:
    path = folder / name
    path.write_text(FILES[name])
    flag = "config" if name.endswith(".yaml") else "from_command"
    method = "sft" if name.endswith(".yaml") else None
    flags = {flag: str(path), "method": method, "gpus": "2xA100-40G", "mode": "predict"}
    return parse_request(Flags(**flags))


@pytest.mark.parametrize("name", ["run.yaml", "run.sh"])
def test_what_a_file_exports_counts_in_a_prediction(name: str, tmp_path: Path) -> None:
    request = request_of_file(name, tmp_path)
    assert candidate_of_job(request).settings[NAME] == "expandable_segments:True"


def test_allocator_settings_that_are_not_counted_are_said(tmp_path: Path) -> None:
    request = request_of_file("verl.sh", tmp_path)
    assert NAME not in candidate_of_job(request).settings
    assert any(f"{NAME}=expandable_segments:True" in line for line in request.assumed)
