"""Contract of every trainer, whatever its framework."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import frameworks
from autotune.catalog import space_files
from autotune.core.composition import Composition
from autotune.core.errors import AutotuneError, BadInput, CannotPredict
from autotune.core.job import Hardware, Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks.base import Trainer
from autotune.frameworks.launched_run import Launch, Launched
from autotune.frameworks.stand_in import StandIn
from autotune.search.loop import legal_candidates
from autotune.worker.launched_output import MetricReader
from tests.frameworks.stand_ins import GIB, task

EVERY = sorted(frameworks.trainers())
WITH_A_SPACE = [trainer_key for trainer_key in EVERY if trainer_key[0] != "command"]
"""A command's space is what is typed."""


def a_task(framework: str, method: str) -> Task:
    """unsloth knows one GPU, and shares the weights of an adapter's model with vLLM."""
    about: Any = (
        {"gpus": 1, "tuning": "lora"} if framework == "unsloth" else {"gpus": 2, "tuning": "full"}
    )
    return task(framework, method, model="Qwen2.5-0.5B", **about)


@pytest.fixture(params=WITH_A_SPACE, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[Trainer, Candidate, Task]:
    framework, method = request.param
    trainer, task = frameworks.trainer(framework, method), a_task(framework, method)
    space = space_files.load_space(trainer.space).on(task.hardware.count)
    return trainer, trainer.complete(trainer.baseline(space, task), task), task


def plainly(value: object) -> Any:
    """Return the value in the form that is sent to another process."""
    return json.loads(json.dumps(value))


def test_its_names_are_those_it_is_known_by(case: tuple[Trainer, Candidate, Task]) -> None:
    trainer, _, task = case
    space = space_files.load_space(trainer.space)
    assert (trainer.name, trainer.method) == (task.workload.framework, task.workload.method)
    assert (space.framework, space.method) == (trainer.name, trainer.method)
    assert set(space.knobs[0].choices)


def test_its_adapters_exist(case: tuple[Trainer, Candidate, Task]) -> None:
    for adapter in {case[0].adapter, case[0].trace_adapter} - {""}:
        folder = Path(importlib.import_module("autotune.worker").__file__ or "").parent
        assert (folder / f"{adapter.replace('.', '/')}.py").is_file()


def test_its_own_configuration_is_legal_and_complete(
    case: tuple[Trainer, Candidate, Task],
) -> None:
    trainer, candidate, task = case
    assert trainer.why_illegal(candidate, task) is None
    assert trainer.complete(candidate.knobs, task) == candidate
    assert plainly(dict(candidate.settings)) == dict(candidate.settings)
    assert plainly(dict(candidate.load)) == dict(candidate.load)


def test_every_knob_of_its_space_is_a_setting_it_knows(
    case: tuple[Trainer, Candidate, Task],
) -> None:
    trainer, candidate, _ = case
    for knob in space_files.load_space(trainer.space).knobs:
        assert (
            knob.name in trainer.fields()
            or knob.name in candidate.settings
            or knob.choices == (None,)
            or knob.when
        ), knob.name


def test_a_broken_rule_is_told_in_a_sentence(case: tuple[Trainer, Candidate, Task]) -> None:
    trainer, candidate, task = case
    on_a_cpu = Task(
        workload=task.workload,
        hardware=Hardware(
            kind="cpu",
            name="cpu",
            count=1,
            memory_bytes=GIB,
            here=False,
        ),
    )
    broken = Candidate(
        knobs=candidate.knobs,
        settings={**candidate.settings, "load_in_4bit": True},
        load=candidate.load,
    )
    reason = trainer.why_illegal(broken, on_a_cpu)
    assert reason is not None and reason.rstrip().endswith(".") and len(reason.split()) > 3


def test_what_it_asks_for_is_json_or_a_refusal(case: tuple[Trainer, Candidate, Task]) -> None:
    trainer, candidate, task = case
    requests = [
        lambda: trainer.load_request(candidate, task),
        lambda: trainer.probe_request(candidate, task, ProbePlan()),
        lambda: trainer.trace_request(candidate, task),
    ]
    for number, request in enumerate(requests):
        try:
            assert isinstance(plainly(request()), dict)
        except CannotPredict as error:
            assert number == 2 and error.way_out


def test_its_models_are_composed_or_it_says_that_it_cannot(
    case: tuple[Trainer, Candidate, Task],
) -> None:
    trainer, candidate, task = case
    try:
        assert isinstance(trainer.compose(candidate, task), Composition)
    except CannotPredict as error:
        assert error.way_out


def test_it_writes_what_the_final_run_needs(
    case: tuple[Trainer, Candidate, Task], tmp_path: Path
) -> None:
    trainer, candidate, task = case
    paths = trainer.write_files(candidate, task, tmp_path / "out")
    assert paths and all(path.is_file() and tmp_path in path.parents for path in paths)
    written = "\n".join(
        path.read_text() for path in paths if path.suffix in (".sh", ".yaml", ".py", ".toml")
    )
    assert "Qwen2.5-0.5B" in written and "predicted" in written


def _launches() -> list[tuple[str, str]]:
    return [
        trainer_key
        for trainer_key in WITH_A_SPACE
        if isinstance(frameworks.trainers()[trainer_key], StandIn | Launched)
    ]


@pytest.mark.parametrize("name", _launches(), ids="-".join)
def test_what_is_launched_tells_its_speed_and_a_probe_of_it_ends(name: tuple[str, str]) -> None:
    task = a_task(*name)
    trainer: Any = frameworks.trainer(*name)
    candidate = trainer.complete(
        trainer.baseline(space_files.load_space(trainer.space), task), task
    )
    final, probe = trainer.launch(candidate, task), trainer.launch(candidate, task, ProbePlan())
    for launch in (final, probe):
        assert isinstance(launch, Launch) and all(
            isinstance(word, str) and word for word in launch.argv
        )
        figures = plainly(launch.figures.__dict__)
        assert (
            isinstance(figures, Mapping)
            and MetricReader(figures).read("nothing of the kind", 0.0) is None
        )
    assert (probe.argv, probe.files) != (final.argv, final.files)
    assert not any(Path(name).is_absolute() for name in probe.files)


@pytest.mark.parametrize("name", _launches(), ids="-".join)
def test_a_version_that_it_knows_is_named_for_pip(name: tuple[str, str]) -> None:
    trainer: Any = frameworks.trainer(*name)
    assert set(trainer.needs) == set(trainer.requires)


@pytest.mark.parametrize(
    "name", [trainer_key for trainer_key in _launches() if trainer_key[0] != "swift"], ids="-".join
)
def test_without_a_gpu_the_answer_is_where_to_name_some_and_not_to_widen_the_space(
    name: tuple[str, str],
) -> None:
    task, trainer = a_task(*name), frameworks.trainer(*name)
    cpu = dataclasses.replace(
        task.hardware,
        kind="cpu",
        name="cpu",
        count=1,
        here=True,
    )
    space = space_files.load_space(trainer.space)
    few: Any = SimpleNamespace(
        name=space.name, assignments=lambda: itertools.islice(space.assignments(), 20)
    )
    job: Any = SimpleNamespace(space=few, task=dataclasses.replace(task, hardware=cpu))
    with pytest.raises(BadInput, match="--gpus") as refused:
        legal_candidates(job, trainer)
    assert "Widen" not in str(refused.value) and "cpu" in str(refused.value)


def test_unknown_ones_are_refused_with_the_nearest() -> None:
    with pytest.raises(AutotuneError, match="verl"):
        frameworks.trainer("verk")
    with pytest.raises(AutotuneError, match="Unknown framework 'slime'"):
        frameworks.trainer("slime")
    with pytest.raises(AutotuneError, match="sft"):
        frameworks.trainer("trl", "sftt")
