"""Values given on the command line reach every framework under its own names, or are refused by
name.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import BadInput
from autotune.core.space import Candidate
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request


def request_of(framework: str, method: str = "grpo", **about: Any) -> ParsedRequest:
    gpus = "A100-80G" if framework == "unsloth" else "2xA100-80G"
    return parse_request(
        Flags(
            model="Qwen2.5-0.5B",
            gpus=gpus,
            framework=framework,
            method=method,
            mode="predict",
            **about,
        )
    )


def some_legal(understood: ParsedRequest) -> list[Candidate]:
    job, trainer = understood.job, understood.trainer
    candidates = (trainer.complete(knobs, job.task) for knobs in job.space.assignments())
    return list(
        itertools.islice(
            (
                candidate
                for candidate in candidates
                if trainer.why_illegal(candidate, job.task) is None
            ),
            5,
        )
    )


@pytest.mark.parametrize(
    ("framework", "method", "flags", "expected"),
    [
        ("swift", "sft", {"lora_rank": 4}, {"lora_rank": 4}),
        ("swift", "sft", {"hold": ("max_length=777",)}, {"max_length": 777}),
        ("swift", "grpo", {"max_prompt_length": 300}, {"max_length": 300}),
        ("swift", "grpo", {"max_completion_length": 333}, {"max_completion_length": 333}),
        ("verl", "grpo", {"max_completion_length": 768}, {"data.max_response_length": 768}),
        ("verl", "grpo", {"num_generations": 4}, {"actor_rollout_ref.rollout.n": 4}),
        ("open-reasoner-zero", "ppo", {"max_prompt_length": 500}, {"prompt_max_len": 500}),
        ("open-reasoner-zero", "ppo", {"max_completion_length": 1500}, {"generate_max_len": 1500}),
        (
            "openrlhf",
            "grpo",
            {"max_prompt_length": 512, "max_completion_length": 3072},
            {"data.max_len": 3584},
        ),
        (
            "unsloth",
            "grpo",
            {"max_completion_length": 384, "lora_rank": 8},
            {"max_completion_length": 384, "lora_rank": 8},
        ),
        (
            "trl",
            "grpo",
            {"max_completion_length": 384, "lora_rank": 8},
            {"max_completion_length": 384, "lora_r": 8},
        ),
    ],
)
def test_it_holds_in_every_candidate(
    framework: str,
    method: str,
    flags: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    candidates = some_legal(request_of(framework, method, **flags))
    assert candidates
    for candidate in candidates:
        assert {name: candidate.settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("framework", "method", "flags", "message"),
    [
        (
            "swift",
            "sft",
            {"max_completion_length": 100},
            "--max-completion-length does not apply to sft with swift",
        ),
        (
            "swift",
            "sft",
            {"max_prompt_length": 100},
            "--max-prompt-length does not apply to sft with swift",
        ),
        (
            "unsloth",
            "sft",
            {"num_generations": 4},
            "--num-generations does not apply to sft with unsloth",
        ),
        ("trl", "sft", {"num_generations": 4}, "--num-generations does not apply to sft with trl"),
        ("verl", "grpo", {"hold": ("max_completion_length=9",)}, "Unknown knob"),
        (
            "verl",
            "grpo",
            {"max_prompt_length": 9, "search": ("data.max_prompt_length=9,10",)},
            "given another way",
        ),
    ],
)
def test_or_it_is_refused_by_name(
    framework: str,
    method: str,
    flags: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(BadInput, match=message):
        request_of(framework, method, **flags)


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    understood = request_of("openrlhf", max_completion_length=4096)
    trainer, job = understood.trainer, understood.job
    candidate = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    assert "leaves no room for a prompt" in (trainer.why_illegal(candidate, job.task) or "")


@pytest.mark.parametrize("typed", [1, 4, 16])
def test_with_another_micro_batch_than_the_files_accumulation_follows(
    typed: int, tmp_path: Path
) -> None:
    """The global batch is what the file says about learning: it stays."""
    file = tmp_path / "train.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size:"
        " 8\ngradient_accumulation_steps: 2\n"
    )
    flags = Flags(
        config=str(file),
        gpus="A100-80G",
        mode="predict",
        set=(f"per_device_train_batch_size={typed}",),
    )
    settings = candidate_of_job(parse_request(flags)).settings
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (
        typed,
        16 // typed,
    )


def test_a_file_that_is_wrong_by_itself_is_told_as_such(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size:"
        " 3\ngradient_accumulation_steps: 1\n"
    )
    with pytest.raises(BadInput, match=r"train\.yaml can't be trained as it is: .*num_generations"):
        parse_request(
            Flags(
                config=str(file),
                gpus="A100-80G",
                mode="predict",
                hold=("beta=0.1",),
            )
        )
