"""Limit of prompts: the longest one of the user's data, so that no row is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from tests.pipeline import make_project

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

ROWS = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), use_cpu=False)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    monkeypatch.chdir(config.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_prompts(folder: Path, *, longest: int) -> None:
    lines = []
    for row in range(1, ROWS + 1):
        tokens = longest * row // ROWS
        lines.append(json.dumps({"prompt": " ".join(["one"] * tokens)}) + "\n")
    (folder / "prompts" / "train.jsonl").write_text("".join(lines))


def limited(config: Path, **flags: Any) -> ParsedRequest:
    return parse_request(
        Flags(
            config=str(config),
            gpus="A100-40G",
            mode="predict",
            **flags,
        ),
        limit_prompts=True,
    )


def limits_of(request: ParsedRequest) -> tuple[Any, ...]:
    return request.job.space["max_prompt_length"].choices


def test_every_candidate_has_the_longest_prompt(config: Path) -> None:
    write_prompts(config.parent, longest=700)
    request = limited(config)
    (longest,) = limits_of(request)
    assert isinstance(longest, int) and longest > 512
    assert request.job.task.workload.held_values["max_prompt_length"] == longest
    assert f"prompts of up to {longest} tokens" in "\n".join(request.assumed)
    shorter = request.whole_space["max_prompt_length"].choices
    assert shorter[0] == longest and list(shorter) == sorted(set(shorter), reverse=True)


def test_other_data_have_another_limit(config: Path) -> None:
    limits = []
    for longest in (40, 90):
        write_prompts(config.parent, longest=longest)
        limits.append(limits_of(limited(config))[0])
    assert limits[0] < limits[1] < 512


@pytest.mark.parametrize(
    "flags", [{"max_prompt_length": 64}, {"search": ("max_prompt_length=64,32",)}]
)
def test_a_given_limit_is_kept(config: Path, flags: dict[str, Any]) -> None:
    assert limits_of(limited(config, **flags))[0] == 64


def test_unreadable_data_are_noted_with_the_limit(config: Path) -> None:
    request = limited(config, dataset="absent/data")
    assert limits_of(request) == (512, 256)
    assert any(
        "'absent/data' could not be measured" in note and "--max-prompt-length" in note
        for note in request.notes
    )


def test_without_data_nothing_changes() -> None:
    flags = Flags(
        model="Qwen2.5-0.5B",
        gpus="A100-40G",
        mode="predict",
    )
    assert parse_request(flags, limit_prompts=True) == parse_request(flags)


def test_a_recommendation_has_all_rows(config: Path, tmp_path: Path) -> None:
    write_prompts(config.parent, longest=700)
    autotune.run(
        config=str(config),
        gpus="A100-40G",
        mode="predict",
        out=str(tmp_path / "out"),
    )
    written = (tmp_path / "out" / "recommended.yaml").read_text()
    assert f"contains the {ROWS} of {ROWS} rows" in written
