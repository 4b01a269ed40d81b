"""Rendered commands are accepted by the real packages' own parsers, Hydra composition and
configuration classes.

Each framework in an environment of its own, as `make frameworks` makes them, without what only a
GPU machine has.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.job import Hardware, Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks.launched_run import OUT, probe_request
from autotune.frameworks.stand_in import StandIn
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from autotune.worker.launched_output import LaunchedSettings, MetricReader, line_source
from tests.frameworks.stand_ins import case_of

ENVIRONMENTS = os.environ.get("AUTOTUNE_FRAMEWORKS")
"""A folder with one virtual environment per framework, as `make frameworks` makes it."""

PYTHON_OF_VERL = Path(ENVIRONMENTS or "") / "verl" / "bin" / "python"
ACCEPTS = Path(__file__).parent / "accepts"
LENGTHS = {"max_prompt_length": 300, "max_completion_length": 700}
BOTH = [("grpo", None), ("ppo", ProbePlan())]

needs_environments = pytest.mark.skipif(not ENVIRONMENTS, reason="needs `make frameworks`")


def rendered(framework: str, method: str, plan: ProbePlan | None, **about: Any) -> list[str]:
    """The arguments behind the module's name."""
    trainer, candidate, task = case_of(framework, method, **{**LENGTHS, **about})
    assert isinstance(trainer, StandIn)
    assert trainer.why_illegal(candidate, task) is None
    _, dash_m, _, *arguments = trainer.launch(candidate, task, plan).argv
    assert dash_m == "-m"
    return [word.replace(OUT, "/run") for word in arguments]


def printed(environment: str, program: str, *arguments: str, **variables: str) -> list[str]:
    """The last line is what it understood, as JSON; those before are the framework's own."""
    python = Path(ENVIRONMENTS or "") / environment / "bin" / "python"
    base = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [str(python), str(ACCEPTS / program), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=base,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


def accepted(environment: str, program: str, *arguments: str, **variables: str) -> Any:
    return json.loads(printed(environment, program, *arguments, **variables)[-1])


def read_back(
    trainer: StandIn,
    candidate: Candidate,
    lines: list[str],
) -> dict[str, Any]:
    """Return the settings that a probe reads in the printed output of the framework."""
    assert trainer.facts.reported_settings is not None
    settings = LaunchedSettings(asdict(trainer.facts.reported_settings), str)
    for line in lines:
        settings.read_line(line)
    return settings.reported_values(candidate.settings)


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize(("method", "plan"), BOTH, ids=["grpo, the final run", "ppo, a probe"])
def test_openrlhfs_parser_and_checks(method: str, plan: ProbePlan | None) -> None:
    understood = accepted(
        "openrlhf",
        "openrlhf_parser.py",
        *rendered("openrlhf", method, plan),
        *(() if plan else ("--reward.remote_url", "http://r")),
    )
    assert understood["data"]["max_len"] == 1000 and understood["rollout"]["max_new_tokens"] == 700
    assert understood["actor"]["model_name_or_path"] == "Qwen/Qwen2.5-7B"
    if plan:
        assert understood["data"]["max_samples"] == understood["rollout"]["batch_size"]
        assert (
            understood["train"]["num_episodes"] == 4
            and understood["data"]["prompt_dataset"] == "/run/rows.jsonl"
        )


@needs_environments
@pytest.mark.slow
def test_what_openrlhf_sets_anew_without_an_error_is_seen_in_what_it_prints() -> None:
    about: dict[str, Any] = {
        "settings": {"vllm.enable_sleep": True, "train.colocate_all": False, "ds.ring_attn_size": 1}
    }
    trainer, candidate, _ = case_of("openrlhf", "grpo", **LENGTHS, **about)
    assert isinstance(trainer, StandIn)
    settings_read = read_back(
        trainer,
        candidate,
        printed(
            "openrlhf", "openrlhf_parser.py", *rendered("openrlhf", "grpo", ProbePlan(), **about)
        ),
    )
    assert (
        candidate.settings["vllm.enable_sleep"] is True
        and settings_read["vllm.enable_sleep"] is False
    )
    assert (
        settings_read["data.max_len"] == 1000
        and settings_read["rollout.n_samples_per_prompt"]
        == candidate.settings["rollout.n_samples_per_prompt"]
    )
    expected = {
        name
        for name, value in candidate.settings.items()
        if value is not None and name not in trainer.facts.own_settings
    }
    assert expected <= set(settings_read)


@needs_environments
@pytest.mark.slow
def test_what_hydra_composed_is_read_back_from_a_probe(tmp_path: Path) -> None:
    """The real `hydra.main` over verl's files, in a rig under verl's own Python. Of what is
    given twice the last counts.
    """
    trainer, candidate, task = case_of("verl", "ppo", **LENGTHS)
    task = Task(
        workload=task.workload,
        hardware=Hardware(
            kind="cpu",
            name="cpu",
            count=1,
            memory_bytes=2**33,
            here=True,
        ),
    )
    assert isinstance(trainer, StandIn)
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"

    def probe(probed: Candidate, plan: ProbePlan) -> dict[str, object]:
        launch = trainer.launch(probed, task, plan)
        argv = (str(PYTHON_OF_VERL), str(ACCEPTS / "verl_run.py"), *launch.argv[3:], f"{micro}=3")
        return probe_request(
            replace(launch, argv=argv, folder=str(tmp_path)), plan, probed.settings
        )

    executor = LocalExecutor(
        RunnerSettings(
            python=PYTHON_OF_VERL,
            adapter=trainer.adapter,
            ranks=1,
            limit_bytes=2**30,
        ),
        RequestBuilders(load=lambda loaded: trainer.load_request(loaded, task), probe=probe),
    )
    try:
        measurement = executor.open(candidate).measure(candidate, ProbePlan(deadline_seconds=300))
    finally:
        executor.close()
    assert measurement.outcome == "ok", measurement.failure
    stated = {name for name, value in candidate.settings.items() if value is not None}
    assert set(measurement.effective) == stated
    changed = {name for name in stated if measurement.effective[name] != candidate.settings[name]}
    assert changed == {micro} and measurement.effective[micro] == 3
    assert not list(tmp_path.iterdir()), "Hydra wrote where the probe was started"


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize(("method", "plan"), BOTH, ids=["grpo, the final run", "ppo, a probe"])
def test_verls_composition_and_validation(
    method: str,
    plan: ProbePlan | None,
    tiny_model: Path,
) -> None:
    arguments = rendered(
        "verl", method, plan, model=str(tiny_model), settings={"data.train_batch_size": 256}
    )
    understood = accepted("verl", "verl_config.py", *arguments)
    assert understood["data"]["max_response_length"] == 700
    assert understood["actor_rollout_ref"]["model"]["path"] == str(tiny_model)
    assert understood["trainer"]["n_gpus_per_node"] == 8
    if plan:
        assert (
            understood["trainer"]["total_training_steps"] == 4
            and understood["trainer"]["save_freq"] == -1
        )
        assert understood["reward"]["custom_reward_function"]["path"] == "/run/reward.py"


LISTS_AND_PATHS = {"prompt_data", "save_path", "ckpt_path", "tensorboard_log_dir"}
"""Attributes of Open-Reasoner-Zero's experiment that its table of settings leaves out."""


@needs_environments
@pytest.mark.slow
@pytest.mark.parametrize(("method", "plan"), BOTH, ids=["grpo, the final run", "ppo, a probe"])
def test_hydra_reads_what_is_typed_for_open_reasoner_zero_as_it_was_meant(
    method: str, plan: ProbePlan | None
) -> None:
    """Without the repository, which no package index has: Hydra's own grammar, and the recorded
    facts of the experiment.
    """
    trainer, candidate, _ = case_of("open-reasoner-zero", method, **LENGTHS)
    assert isinstance(trainer, StandIn)
    understood = accepted("orz", "orz_overrides.py", *rendered("open-reasoner-zero", method, plan))[
        "exp"
    ]
    assert {name: understood[name] for name in candidate.settings} == dict(candidate.settings)
    assert set(understood) <= {*trainer.table.fields, *LISTS_AND_PATHS}
    assert not [
        problem
        for name, value in understood.items()
        if (problem := trainer.table.problem(name, value))
    ]
    if plan:
        assert (
            understood["prompt_data"] == ["/run/rows.json"]
            and understood["save_path"] == "/run/save_path"
        )


@needs_environments
@pytest.mark.skipif(
    not (Path(ENVIRONMENTS or "") / "orz" / "repo").is_dir(),
    reason="needs a clone of its repository in orz/repo",
)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "plan"), BOTH, ids=["grpo, the final run", "ppo, a probe"])
def test_open_reasoner_zeros_experiment(method: str, plan: ProbePlan | None) -> None:
    repository = str(Path(ENVIRONMENTS or "") / "orz" / "repo")
    arguments = rendered("open-reasoner-zero", method, plan)
    lines = printed(
        "orz", "orz_config.py", "playground.orz_7b_ppo", *arguments, PYTHONPATH=repository
    )
    understood = json.loads(lines[-1])
    assert (understood["prompt_max_len"], understood["generate_max_len"]) == (300, 700)
    assert (
        understood["use_grpo"] is (method == "grpo") and understood["pretrain"] == "Qwen/Qwen2.5-7B"
    )
    trainer, candidate, _ = case_of("open-reasoner-zero", method, **LENGTHS)
    assert isinstance(trainer, StandIn)
    assert read_back(trainer, candidate, lines) == dict(candidate.settings)


def figures_of(framework: str) -> dict[str, Any]:
    """Return the source of the speed, in the form that is sent to the training environment."""
    trainer, candidate, task = case_of(framework, "grpo", num_generations=8)
    assert isinstance(trainer, StandIn)
    request = probe_request(trainer.launch(candidate, task, ProbePlan()), ProbePlan())
    return json.loads(json.dumps(request))["figures"]  # type: ignore[no-any-return]


@needs_environments
@pytest.mark.slow
def test_a_metrics_file_by_verls_own_logger_is_read(tmp_path: Path) -> None:
    figures = figures_of("verl")
    listen, reader = line_source(figures, tmp_path), MetricReader(figures)
    steps = [
        {
            "response_length/mean": 650.5,
            "perf/time_per_step": 41.5,
            "perf/throughput": 310.25,
            "actor/loss": 0.5,
        }
    ] * 3
    file = Path(figures["file"].replace(OUT, str(tmp_path)))
    printed("verl", "verl_log.py", json.dumps(steps), VERL_FILE_LOGGER_PATH=str(file))
    lines = listen([])
    steps_read = [reader.read(line, float(number)) for number, line in enumerate(lines)]
    assert [(figure.tokens, figure.seconds) for figure in steps_read if figure is not None] == [
        (round(650.5 * 1024 * 8), 41.5)
    ] * 3


@needs_environments
@pytest.mark.slow
def test_a_step_printed_by_openrlhfs_own_logger_is_read() -> None:
    """Also where a figure of the step is no number, as a group's spread can be."""
    reader = MetricReader(figures_of("openrlhf"))
    step = {
        "rollout/response_length_mean": 512.0,
        "rollout/num_samples": 8192.0,
        "timing/step_total": 100.0,
    }
    strange = {**step, "timing/generation": float("nan")}
    lines = printed("openrlhf", "openrlhf_log.py", json.dumps([step, strange]))
    figures = [
        figure
        for number, line in enumerate(lines)
        if (figure := reader.read(line, float(number))) is not None
    ]
    assert [(reading.tokens, reading.seconds) for reading in figures] == [(512 * 8192, 100.0)] * 2


RECORDED = {
    "verl": (
        '{"step":2,"data":{"response_length/mean":650.5,'
        '"perf/time_per_step":41.5,"perf/throughput":310.2}}'
    ),
    "openrlhf": (
        "(PPOTrainer pid=71) \u2728 Global step 2: {'policy_loss': 0.01,"
        " 'rollout/response_length_mean': 512.0, 'rollout/num_samples': 8192.0,"
        " 'timing/generation': 20.0, 'timing/make_experience': 30.0, 'timing/ppo_train': 45.0,"
        " 'timing/broadcast': 5.0, 'timing/step_total': 100.0}"
    ),
    "open-reasoner-zero": (
        "2025-02-20 10:00:01.000 | INFO | orz.ppo.trainer:make_experience:317 - avg_raw_rewards:"
        " 0.25, avg_kl: 0.0, avg_response_length: 600.5, avg_orm_score: 0.0, avg_custom_rewards:"
        " 0.25"
    ),
    "skyrl": (
        "\x1b[36m(skyrl_entrypoint pid=71)\x1b[0m 2026-07-20 10:00:01.000 | INFO     |"
        " skyrl.train.trainer:compute_advantages_and_returns:1212 - avg_final_rewards: 0.25,"
        " avg_response_length: 600.5"
    ),
}
"""A line in the form of each framework's own logger."""


@pytest.mark.parametrize(
    ("framework", "tokens", "seconds"),
    [
        ("verl", round(650.5 * 1024 * 8), 41.5),
        ("openrlhf", 512 * 8192, 100.0),
        ("open-reasoner-zero", round(600.5 * 128 * 64), 9.0),
        ("skyrl", round(600.5 * 1024 * 8), 9.0),
    ],
)
def test_completion_tokens_and_seconds_out_of_its_own_log(
    framework: str,
    tokens: int,
    seconds: float,
) -> None:
    trainer, candidate, task = case_of(
        framework, "grpo", num_generations=64 if framework == "open-reasoner-zero" else 8
    )
    assert isinstance(trainer, StandIn)
    reader = MetricReader(
        json.loads(
            json.dumps(probe_request(trainer.launch(candidate, task, ProbePlan()), ProbePlan()))
        )["figures"]
    )
    assert reader.read("something else", 0.0) is None
    reader.read(RECORDED[framework], 1.0)
    figure = reader.read(RECORDED[framework], 10.0)
    assert figure is not None and (figure.tokens, figure.seconds) == (tokens, seconds)
