"""Five failures that autotune was built for, each a folder of examples/: the answers on their pages
are still given.

Signs and verdicts are compared, not figures, which change with the installed versions. The traces
take minutes in all.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import catalog
from autotune.api.run_requests import run_flags
from autotune.catalog.model_lookup import find_model
from autotune.core.composition import EngineSettings
from autotune.core.errors import IllegalConfiguration
from autotune.core.units import MIB
from autotune.estimate import rollout_engine
from autotune.estimate.engine_use import EngineUse
from autotune.estimate.unknown_facts import agreed, worst
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from tests.scenarios import SCENARIOS, Oracle, Scenario, one_oracle, portable

VERDICTS = {"fits": True, "does not fit": False, "open": None}
SIGNS = {"less": -1, "same": 0, "more": 1}

NOTHING = 16 * MIB
"""Less than this is no effect: what the allocator rounds."""

each_scenario = pytest.mark.parametrize(
    "scenario",
    [Scenario.of(folder) for folder in SCENARIOS],
    ids=lambda scenario: scenario.folder.name,
)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as shared_oracle:
        yield shared_oracle


def test_there_are_five() -> None:
    assert len(SCENARIOS) == 5


@each_scenario
def test_the_page_has_the_commands_and_a_source_and_is_honest_about_where_it_was_made(
    scenario: Scenario,
) -> None:
    page = " ".join((scenario.folder / "README.md").read_text().replace("\\\n", " ").split())
    for command in scenario.commands():
        assert shlex.join(command) in page
    assert "https://github.com/" in page and "predicted" in page
    for flip in scenario.document["flips"]:
        for name in flip["change"]:
            assert name in page, f"the page says nothing of {name}"


@each_scenario
def test_native_files_name_no_path_of_the_machine_they_were_made_on(scenario: Scenario) -> None:
    files = [file for file in scenario.folder.rglob("*") if file.is_file()]
    assert any(file.parent.name == "recommended" for file in files)
    for file in files:
        paths = re.findall(r"(?<![\w.:/<}$-])/[A-Za-z][\w.-]*/\S*", file.read_text())
        assert set(paths) <= {"/bin/sh", "/usr/bin/env"}, file


@pytest.mark.slow
@each_scenario
def test_what_is_said_of_the_failing_one(
    scenario: Scenario,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(scenario.folder)
    ways = oracle.ways(scenario.failing())
    prediction = agreed(ways)
    assert prediction.fits is VERDICTS[scenario.document["verdict"]]
    for fact in scenario.document.get("depends_on", ()):
        assert any(
            cause.startswith(f"{fact}, which is not given") for cause in prediction.depends_on
        )
    # Not of torch's cache: torch gives its free blocks back before it runs out of memory.
    bytes_by_part = {}
    for part, size in prediction.breakdown.items():
        if part != "fragmentation":
            bytes_by_part[part] = size
    assert max(bytes_by_part, key=lambda part: bytes_by_part[part]) == scenario.document["blames"]
    assert worst(ways).prediction.fits is not True, (
        "with the most of what is unknown it is not sure to fit"
    )


@pytest.mark.slow
@each_scenario
def test_each_remedy_alone_and_the_sign_of_what_it_does(
    scenario: Scenario,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(scenario.folder)
    before = oracle.predict(scenario.worst()).peak_memory_bytes.value
    for flip in scenario.document["flips"]:
        change = oracle.predict(scenario.flipped(flip["change"])).peak_memory_bytes.value - before
        sign = 0 if abs(change) < NOTHING else -1 if change < 0 else 1
        assert sign == SIGNS[flip["memory"]], f"{flip['change']}: {change / MIB:+.0f} MiB"


@pytest.mark.slow
@each_scenario
def test_run_still_recommends_what_is_checked_in(
    scenario: Scenario,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(scenario.folder)
    tuned = run_flags(dataclasses.replace(scenario.run(), out=str(tmp_path)))
    assert tuned.document["status"] == "ok" and tuned.document["basis"] == "predicted"
    assert tuned.winner is not None and tuned.files
    for file in tuned.files:
        written = portable(file.read_text(), tmp_path)
        committed = scenario.folder / "recommended" / file.relative_to(tmp_path)
        assert committed.read_text() == written, f"{committed} is no longer what is written"


# What single scenarios have beside that.


def scenario_of(name: str) -> Scenario:
    (folder,) = [folder for folder in SCENARIOS if folder.name == name]
    return Scenario.of(folder)


def test_trl_cannot_push_an_adapter_over_gptq_weights_and_says_what_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = scenario_of("trl-grpo-7b-gptq-2xa100-40g")
    monkeypatch.chdir(scenario.folder)
    flags = dataclasses.replace(scenario.failing(unknown={}), set=())
    with pytest.raises(
        IllegalConfiguration, match="adapter over GPTQ weights cannot be synchronised with vLLM"
    ):
        candidate_of_job(parse_request(dataclasses.replace(flags, mode="predict")))


def test_on_the_fourth_gpu_vllm_takes_its_share_and_less_of_it_leaves_less_for_the_cache() -> None:
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == "A100-80G")

    def fit(share: float) -> EngineUse:
        return rollout_engine.fit(
            find_model("Qwen2.5-7B-Instruct").config,
            EngineSettings(
                utilization=share,
                max_model_length=2048,
                max_num_seqs=256,
            ),
            dtype="bfloat16",
            gpu=gpu,
            device_memory_bytes=gpu.memory_bytes,
            other_bytes=0,
        )

    high, low = fit(0.6), fit(0.5)
    assert high.failure is None and low.failure is None
    assert low.reserved_bytes.value < high.reserved_bytes.value < gpu.memory_bytes
    assert (
        high.kv is not None
        and low.kv is not None
        and low.kv.kv_cache_tokens < high.kv.kv_cache_tokens
    )
