"""preflight on a real tiny model: measured once, then answered from the record until something
changes that decides it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.core.events import Event, JobStarted, Note, ProbeEnded
from autotune.preflight.check import Preflight
from tests.light_environment import light_python_path
from tests.pipeline import make_project, write_prompts

pytestmark = pytest.mark.slow


class Measured(Exception):
    """The record did not answer, so a probe would run."""


@pytest.fixture(scope="module", name="store")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", name="project")
def a_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project")).parent


@pytest.fixture(autouse=True)
def in_the_project(
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
    store: Path,
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_DATA_HOME", str(store))
    monkeypatch.setenv("PYTHONPATH", light_python_path())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def ask(**options: Any) -> Preflight:
    return autotune.preflight("train.yaml", gpus="cpu", memory_limit="2G", **options)


@pytest.fixture(scope="module", name="proven")
def proven_once(store: Path, project: Path) -> tuple[Preflight, list[Event]]:
    heard: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setenv("XDG_DATA_HOME", str(store))
        patch.setenv("PYTHONPATH", light_python_path())
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        return ask(listener=heard.append), heard


@pytest.fixture(name="no_probe")
def a_probe_is_told(
    monkeypatch: pytest.MonkeyPatch, proven: tuple[Preflight, list[Event]]
) -> list[str]:
    """Everything is real but the probe itself, which would take its time again: that it would
    run is what is to be seen.
    """
    notes: list[str] = []

    def would_measure(*_: object) -> None:
        raise Measured

    monkeypatch.setattr(
        importlib.import_module("autotune.preflight.check"), "_measured", would_measure
    )
    return notes


def why_measured(notes: list[str]) -> str:
    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    with pytest.raises(Measured):
        ask(listener=listen)
    return " ".join(notes)


def test_it_is_measured_at_its_worst_case(
    proven: tuple[Preflight, list[Event]], project: Path
) -> None:
    answer, heard = proven
    assert (
        answer.fits
        and not answer.from_record
        and answer.missed == "nothing like it was measured here before"
    )
    assert answer.use == Path("train.yaml") and answer.tuned is None
    assert answer.proof.certificate is not None and answer.proof.certificate["complete"]
    assert answer.candidate.settings["max_prompt_length"] == 4 * 6 - 1, (
        "the longest row, as its tokenizer has it"
    )
    kinds = [type(event) for event in heard]
    assert kinds[0] is JobStarted and kinds[-1] is ProbeEnded
    document = json.loads(json.dumps(answer.document))
    assert (
        document["status"] == "fits"
        and document["peak_memory_bytes"] < document["limit_bytes"] == 2 * 2**30
    )


def test_the_second_time_the_record_answers(
    no_probe: list[str], proven: tuple[Preflight, list[Event]]
) -> None:
    again = ask()
    assert again.from_record and again.fits and again.missed is None
    assert (
        again.proof.trial == proven[0].proof.trial
        and again.proof.certificate == proven[0].proof.certificate
    )
    assert again.document["from_record"]["when"] == again.proof.when


def test_the_models_config_changed(no_probe: list[str], project: Path) -> None:
    file = project / "model" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "intermediate_size": 512}))
    try:
        assert "model.intermediate_size" in why_measured(no_probe)
    finally:
        file.write_text(before)


def test_the_longest_prompt_of_the_data_changed(no_probe: list[str], project: Path) -> None:
    write_prompts(project, longest=9)
    try:
        assert "prompt (23, now 35)" in why_measured(no_probe)
    finally:
        write_prompts(project, longest=6)
    assert ask().from_record, "other rows and the same longest one: the proof holds"


def test_a_version_in_the_training_environment_changed(
    no_probe: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The interpreter itself reports another version: what lies first on its path is what is
    # installed.
    (tmp_path / "accelerate-99.0.dist-info").mkdir()
    (tmp_path / "accelerate-99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "versions.accelerate" in why_measured(no_probe) and "now 99.0" in " ".join(no_probe)


def test_the_machine_is_fuller_than_it_was(
    no_probe: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    full = psutil.virtual_memory()._replace(available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    assert "others leave" in why_measured(no_probe)


def test_a_setting_changed(no_probe: list[str], project: Path) -> None:
    file = project / "train.yaml"
    before = file.read_text()
    file.write_text(before.replace("max_completion_length: 32", "max_completion_length: 48"))
    try:
        assert "max_completion_length (32, now 48)" in why_measured(no_probe)
        file.write_text(before.replace("output_dir: out", "output_dir: another"))
        assert ask().from_record, "where the results go decides nothing"
    finally:
        file.write_text(before)


def test_another_number_of_processes_is_refused(project: Path) -> None:
    file = project / "two.yaml"
    file.write_text((project / "train.yaml").read_text() + "num_processes: 2\n")
    with pytest.raises(
        autotune.core.errors.BadInput, match=r"starts 2 processes, but cpu has 1 device.*2xcpu"
    ):
        autotune.preflight(file, gpus="cpu")


def test_without_data_the_longest_prompt_must_be_given(project: Path) -> None:
    file = project / "nodata.yaml"
    file.write_text((project / "train.yaml").read_text().replace("dataset_name: prompts\n", ""))
    with pytest.raises(autotune.core.errors.BadInput, match="--max-prompt-length 512"):
        autotune.preflight(file, gpus="cpu", memory_limit="2G")


def test_a_configuration_that_does_not_fit_is_tuned_to_learn_the_same(
    project: Path, tmp_path: Path
) -> None:
    file = project / "large.yaml"
    settings = (
        (project / "train.yaml")
        .read_text()
        .replace("per_device_train_batch_size: 8", "per_device_train_batch_size: 32")
    )
    settings = settings.replace("max_completion_length: 32", "max_completion_length: 384").replace(
        "steps: 2", "steps: 1"
    )
    file.write_text(settings + "gradient_checkpointing: false\n")
    space = {
        "per_device_train_batch_size": [4],
        "gradient_accumulation_steps": [8],
        "gradient_checkpointing": [True],
    }
    answer = autotune.preflight(
        file,
        tune=True,
        gpus="cpu",
        memory_limit="760M",
        max_prompt_length=23,
        out=tmp_path / "tuned",
        budget="10m",
        search=space,
    )
    assert answer.fits is False and answer.proof.trial.measurement.outcome.is_out_of_memory
    assert (
        answer.tuned is not None
        and answer.tuned.recommendation is not None
        and answer.use is not None
    )
    assert answer.tuned.winner is not None
    before, after = answer.candidate.settings, answer.tuned.winner.settings
    for name in (
        "num_generations",
        "max_completion_length",
        "max_prompt_length",
        "loss_type",
        "beta",
        "optim",
    ):
        assert before[name] == after[name], name
    assert global_batch(before) == global_batch(after) == 32
    assert (
        answer.document["status"] == "tuned"
        and answer.use.name == "recommended.yaml"
        and answer.use.is_file()
    )


def global_batch(settings: Mapping[str, Any]) -> int:
    batch: int = settings["per_device_train_batch_size"]
    return batch * settings["gradient_accumulation_steps"]
