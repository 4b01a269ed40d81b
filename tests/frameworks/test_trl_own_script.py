"""A first look at scripts of the user's own, by the real TRL; what can't be tuned is said in a
sentence with its way out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import AutotuneError, BadInput, TrainingEnvironmentError
from autotune.frameworks.trl import script_inspection
from autotune.frameworks.trl.field_list import installed_defaults
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from tests.cli.command import environment
from tests.frameworks.conftest import make_task

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

OWN = Path(__file__).parents[1] / "own_scripts"
ROOT = Path(__file__).parents[2]
CPU = make_task().hardware

HEAD = (
    "from datasets import Dataset\nfrom trl import GRPOConfig, GRPOTrainer, SFTConfig,"
    " SFTTrainer\nimport sys\n"
)
CONFIG = "GRPOConfig('o', use_cpu=True, bf16=False)"
DATA = "Dataset.from_list([{'prompt': 'a b'}] * 9)"
GRPO = (
    f"t = GRPOTrainer(sys.argv[1], lambda completions, **k: [0.0], args={CONFIG},"
    f" train_dataset={DATA})\n"
)
SFT = f"s = SFTTrainer(sys.argv[1], args={CONFIG.replace('GRPO', 'SFT')}, train_dataset={DATA})\n"
SPREAD = GRPO.replace("bf16=False", "bf16=False, deepspeed={'zero_optimization': {'stage': 2}}")
APART = "a script of its own"

REFUSED = {
    "never": (
        "print('nothing to see')\n",
        BadInput,
        "builds no GRPOTrainer",
        "Give the script that builds it",
    ),
    "ends": ("raise SystemExit(3)\n", BadInput, "exits with status 3", "-- ARGUMENTS"),
    "crash": (
        "x = 1\nopen('not-there.txt')\n",
        BadInput,
        "stops in line 5, before its trainer is built: FileNotFound",
        "trains",
    ),
    "syntax": ("def f(:\n", BadInput, "stops in line 4", "trains"),
    "module": (
        "import not_installed_anywhere\n",
        TrainingEnvironmentError,
        "ModuleNotFoundError",
        "--python",
    ),
    "both": (
        SFT + GRPO + "t.train()\n",
        BadInput,
        "builds two trainers before it trains, SFTTrainer at line 4",
        APART,
    ),
    "again": (
        GRPO + "t.train()\nt.train(True)\n",
        BadInput,
        "trains more than once (again.py:5 is one of 2",
        "tune each",
    ),
    "loop": (
        GRPO + "for _ in range(3):\n    t.train()\n",
        BadInput,
        "trains more than once",
        "tune each",
    ),
    "in turn": (
        GRPO + "t.train()\n" + SFT + "s.train()\n",
        BadInput,
        "builds 2 trainers one after the other",
        APART,
    ),
    "other": (
        (
            "import transformers as t\nt.Trainer(None, t.TrainingArguments('o',"
            " use_cpu=True)).train()\n"
        ),
        BadInput,
        "builds Trainer,",
        "Known are GRPOTrainer",
    ),
    "spread": (SPREAD, BadInput, "sets deepspeed", "--hold sharding"),
}

PAIRS = {
    "kto": "{'prompt': 'a', 'completion': ' b', 'label': True}",
    "reward": "{'chosen': 'a b', 'rejected': 'a c'}",
}
OTHERS = {
    name: (
        f"from trl import {cls}Config, {cls}Trainer\nt = {cls}Trainer(sys.argv[1],"
        f" args={cls}Config('o', use_cpu=True, bf16=False, max_length=64),"
        f" train_dataset=Dataset.from_list([{PAIRS[name]}] * 9))\nt.train()\n"
    )
    for name, cls in (("kto", "KTO"), ("reward", "Reward"))
}
TAKEN = {
    **OTHERS,
    "branches": GRPO + "if len(sys.argv) > 9:\n    t.train(True)\nelse:\n    t.train()\n",
    "quickstart": GRPO.replace(f"args={CONFIG}, ", "") + "t.train()\n",
    "gpu": (
        GRPO.replace(CONFIG, "GRPOConfig('o', tf32=True)") + "t.train()\n"
    ),  # bf16 by TRL's default
    "reads": GRPO + "print(t.model)\nt.train()\n",
    "async-grpo": (
        "from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\n"
        "def reward(completions, **k):\n    return [0.0] * len(completions)\n"
        "c = AsyncGRPOConfig('o', dtype='bfloat16', token_budget=4096, max_staleness=2)\n"
        f"t = AsyncGRPOTrainer(sys.argv[1], reward, args=c, train_dataset={DATA})\nt.train()\n"
    ),
}


def written(folder: Path, scripts: dict[str, str]) -> dict[str, Path]:
    files = {}
    for name, body in scripts.items():
        files[name] = folder / f"{name}.py"
        files[name].write_text(HEAD + body)
    return files


@pytest.fixture(scope="module")
def looks(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> dict[str, tuple[Path, Any]]:
    """Scripts and their inspections by name; one import of the framework for all."""
    files = written(
        tmp_path_factory.mktemp("scripts"),
        {**{name: row[0] for name, row in REFUSED.items()}, **TAKEN},
    )
    files |= {name: OWN / f"{name}.py" for name in ("plain", "own_class", "rows", "parsed")}
    parsed = [
        "--model_name_or_path",
        str(tiny_model),
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        "--num_generations",
        "4",
        "--use_peft",
    ]
    requests = [
        {
            "script": str(file),
            "arguments": parsed if name == "parsed" else [str(tiny_model)],
            "device": "cuda" if name in ("gpu", "async-grpo") else "cpu",
        }
        for name, file in files.items()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.look_at_many"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    return dict(zip(files, zip(files.values(), answers, strict=True), strict=True))


class Answered:
    """A worker that has answered already."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def ask(self, *_: object) -> tuple[Any, str]:
        return self._answer, ""


def looked(
    looks: dict[str, tuple[Path, Any]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Everything behind the look itself, on what the real one answered."""
    file, answer = looks[name]
    monkeypatch.setattr(script_inspection, "worker_for", lambda *_: Answered(answer))
    return script_inspection.look_at(
        str(file),
        (),
        python=Path(sys.executable),
        hardware=CPU,
        rewards="real",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tuned_is_said(
    looks: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, kind, problem, way_out = REFUSED[name]
    with pytest.raises(AutotuneError) as caught:
        looked(looks, name, monkeypatch)
    assert type(caught.value) is kind
    assert problem in str(caught.value) and way_out in str(caught.value), str(caught.value)


def test_one_of_two_branches_trains(looks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(looks, "branches", monkeypatch).look.ended_by is None


def test_defaults_of_a_script_without_a_configuration_are_held(
    looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's quickstart: no GRPOConfig at all, so that every setting is a default of the
    installed release.
    """
    file, answer = looks["quickstart"]
    monkeypatch.setattr(script_inspection, "worker_for", lambda *_: Answered(answer))
    monkeypatch.chdir(file.parent)
    flags = Flags(
        script=str(file),
        gpus="H100",
        mode="predict",
    )
    request = parse_request(flags)
    installed = installed_defaults(Path(sys.executable), "grpo")
    for name in ("num_generations", "max_completion_length", "beta", "loss_type"):
        assert request.job.space[name].choices == (installed[name],), name
        assert request.job.task.workload.held_values[name] == installed[name]
    assert candidate_of_job(request).settings["dtype"] == "float32"


@pytest.mark.parametrize("method", OTHERS)
def test_trainers_of_rated_answers_are_taken(
    looks: Any,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, answer = looks[method]
    monkeypatch.setattr(script_inspection, "worker_for", lambda *_: Answered(answer))
    monkeypatch.chdir(file.parent)
    settings = candidate_of_job(
        parse_request(
            Flags(
                script=str(file),
                gpus="cpu",
                mode="predict",
            )
        )
    ).settings
    assert looked(looks, method, monkeypatch).look.method == method
    assert settings["max_length"] == 64 and settings["max_completion_length"]


def test_the_asynchronous_trainer_keeps_its_precision_and_its_rows(
    looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, answer = looks["async-grpo"]
    monkeypatch.setattr(script_inspection, "worker_for", lambda *_: Answered(answer))
    monkeypatch.chdir(file.parent)
    settings = candidate_of_job(
        parse_request(
            Flags(
                script=str(file),
                gpus="4xH100",
                mode="predict",
            )
        )
    ).settings
    assert (settings["dtype"], settings["token_budget"], settings["max_staleness"]) == (
        "bfloat16",
        4096,
        2,
    )
    assert settings["gradient_accumulation_steps"] == 1 and settings["server_gpus"] == 1, (
        "as the script trains"
    )


def test_what_is_asked_of_the_trainer_before_it_trains_is_told(
    looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(looks, "reads", monkeypatch).look.ended_by == "model"


def test_a_call_with_literals(looks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = looked(looks, "plain", monkeypatch)
    look = script.look
    assert (look.method, look.trainer, look.rewards) == (
        "grpo",
        "GRPOTrainer",
        ("length_reward", "brevity"),
    )
    assert (
        look.settings["gradient_accumulation_steps"] == 2
        and look.raw["per_device_train_batch_size"] == 8
    )
    assert look.prompts is not None and 0 < look.prompts["50"] <= look.prompts["100"]
    assert look.rows == 40 and look.config_place.line == 28 and not script.takes_flags
    assert {Path(file).name for file in look.modules} >= {"plain.py", "lengths.py"}
    assert "hub_token" not in look.raw


def test_settings_from_a_parser(looks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = looked(looks, "parsed", monkeypatch)
    assert (
        script.takes_flags and script.look.config_place.maker == "TrlParser.parse_args_and_config"
    )
    assert script.look.adapter["lora_r"] == 16 and script.look.callbacks == ("Noisy", "Noisy")


def test_a_class_of_its_own_with_a_ready_made_model(
    looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = looked(looks, "own_class", monkeypatch).look
    assert (
        look.trainer == "MyTrainer" and look.model.given and look.model.config["hidden_size"] == 128
    )
    assert (
        look.changed == ("beta",)
        and look.raw["beta"] == 0.04
        and look.expanded == ("gradient_accumulation_steps",)
    )
    assert look.adapter["lora_r"] == 4


def test_a_script_for_a_gpu_is_read_on_a_machine_without_one(
    looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = looked(looks, "gpu", monkeypatch).look
    assert (look.method, look.raw["tf32"], look.raw["use_cpu"]) == ("grpo", True, False)


def test_given_rows(looks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look = looked(looks, "rows", monkeypatch).look
    assert (look.method, look.prompts, look.raw["max_length"]) == ("sft", None, 32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "x"}, "--model and --script"),
        ({"framework": "verl"}, "--script is for"),
        ({"config": "x"}, "--config and"),
    ],
)
def test_the_script_says_what_is_trained(flags: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_request(Flags(script="train.py", gpus="cpu", **flags))


def test_rewards_are_a_scripts() -> None:
    with pytest.raises(BadInput, match="--rewards is about a script"):
        parse_request(
            Flags(
                rewards="skip",
                gpus="cpu",
                mode="predict",
            )
        )
