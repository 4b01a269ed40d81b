"""Scripts that stop here and train at their authors': what is replaced, and what is said of it.

The worker really runs them, with the real TRL; the expected settings are read off the sources here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.frameworks.trl import look_worker
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import ParsedRequest, parse_request

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_project")]

HEAD = """
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

rows = Dataset.from_list([{"prompt": "a", "text": "b"}])
"""
SFT = """
SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=SFTConfig(output_dir="out", per_device_train_batch_size=batch, max_length=512),
    train_dataset=rows,
).train()
"""
SEARCH = (
    HEAD
    + """
import optuna

def objective(trial):
    batch = trial.suggest_categorical("batch", [2, 16, 8])
    rate = trial.suggest_float("rate", 1e-6, 1e-4, log=True)
"""
    + SFT.replace("\n", "\n    ")
    + """
optuna.create_study().optimize(objective, n_trials=3)
"""
)
ONE_GPU = (
    HEAD
    + """
GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B",
    reward_funcs=[lambda completions, **_: [0.0]],
    args=GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        num_generations=4,
        generation_batch_size=4,
    ),
    train_dataset=rows,
).train()
"""
)
WITHOUT_A_MODEL = """
from datasets import Dataset
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser

settings, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
rows = Dataset.from_list([{"text": "b"}])
SFTTrainer(model=model.model_name_or_path, args=settings, train_dataset=rows).train()
"""
FRACTION = (
    HEAD
    + """
batch = 2
torch.cuda.set_per_process_memory_fraction(0.75)
torch.cuda.reset_peak_memory_stats()
"""
    + SFT
)
OWN_CONFIG = (
    """
from absent_project.configs import SFTConfig
"""
    + HEAD.replace(", SFTConfig", "")
    + "batch = 2\n"
    + SFT
)
VISION = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastVisionModel

name = "Qwen/Qwen2.5-VL-3B-Instruct"
model, tokenizer = FastVisionModel.from_pretrained(name, max_seq_length=1024)
model = FastVisionModel.get_peft_model(model, r=8)
rows = Dataset.from_list([{"text": "b"}])
SFTTrainer(model=model, args=SFTConfig(output_dir="out"), train_dataset=rows).train()
"""
COMMAND_LINE = """
import typer
from trl import SFTTrainer

cli = typer.Typer()


@cli.command()
def train(settings_file: str = typer.Option(..., "--settings-file")):
    SFTTrainer(model=settings_file)


cli()
"""
OTHER_PROGRAM = """
from axolotl.cli.train import train
from trl import SFTTrainer

raise RuntimeError("the process group is not there")
"""

WITHOUT_AN_ADAPTER = (
    """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--adapter", default=None)
adapter = parser.parse_args().adapter
"""
    + HEAD
    + """
from peft import LoraConfig

SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=SFTConfig(
        output_dir="out",
        model_init_kwargs={"quantization_config": {"load_in_4bit": True}},
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=4, target_modules="all-linear") if adapter else None,
).train()
"""
)
COPY_OF_TRLS = """
from trl import SFTTrainer

raise RuntimeError("a server of the author's is not there")
SFTTrainer(model="m")
"""


def reading(source: str, **options: object) -> ParsedRequest:
    Path("train.py").write_text(source)
    flags = Flags(mode="predict", gpus="8xH100-80G", script="train.py").replace(**options)
    return parse_request(flags)


def test_a_search_is_read_at_its_largest_values_and_says_so() -> None:
    pytest.importorskip("optuna")
    request = reading(SEARCH)
    settings = candidate_of_job(request).settings
    assert settings["per_device_train_batch_size"] == 16
    (sentence,) = [text for text in request.assumed if "search" in text]
    assert "batch=16 of 2, 16, 8" in sentence and "rate=0.0001 of 1e-06 to 0.0001" in sentence


def test_a_batch_for_one_gpu_is_predicted_on_one() -> None:
    """A generation batch of 4 is one device's: 4 x 8 devices do not divide it."""
    request = reading(ONE_GPU)
    assert request.job.task.hardware.count == 1
    assert "training on H100 instead of 8xH100-80G, as the script says" in request.assumed


def test_a_model_that_is_not_stated_is_a_guess_and_said() -> None:
    Path("README.md").write_text("Trains Qwen/Qwen2.5-3B. Qwen/Qwen2.5-3B is small.\n")
    request = reading(WITHOUT_A_MODEL)
    model = request.job.task.workload.model
    assert (model.name, model.is_guess) == ("Qwen/Qwen2.5-3B", True)
    assert any("--model names yours" in sentence for sentence in request.assumed)
    assert not reading(WITHOUT_A_MODEL, model="Qwen/Qwen2.5-0.5B").job.task.workload.model.is_guess


def test_a_part_of_the_memory_that_a_script_keeps_to_is_said() -> None:
    request = reading(FRACTION)
    assert any("limits itself to 0.75" in sentence for sentence in request.assumed)
    assert candidate_of_job(request).settings["per_device_train_batch_size"] == 2


def test_a_projects_own_configuration_that_is_not_here_is_trls() -> None:
    settings = candidate_of_job(reading(OWN_CONFIG)).settings
    assert (settings["per_device_train_batch_size"], settings["max_length"]) == (2, 512)


def test_a_vision_model_of_unsloth_is_built() -> None:
    request = reading(VISION)
    assert request.job.task.workload.model.name == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert candidate_of_job(request).settings["lora_rank"] == 8


def test_bits_without_an_adapter_are_read_as_the_project_starts_them() -> None:
    Path("README.md").write_text("    python train.py --adapter out/first\n")
    request = reading(WITHOUT_AN_ADAPTER)
    settings = candidate_of_job(request).settings
    assert (settings["load_in_4bit"], settings["use_peft"], settings["lora_r"]) == (True, True, 4)
    assert any("--adapter out/first" in sentence for sentence in request.assumed)


def test_a_copy_of_trls_script_that_cannot_be_followed_is_read_as_trls() -> None:
    Path("open_r1").mkdir()
    Path("open_r1", "sft.py").write_text(COPY_OF_TRLS)
    command = (
        "accelerate launch open_r1/sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --max_length 512"
    )
    Path("run.sh").write_text(command)
    request = parse_request(Flags(mode="predict", gpus="8xH100-80G", from_command="run.sh"))
    assert candidate_of_job(request).settings["max_length"] == 512
    assert request.assumed[0].startswith("TRL's own sft.py, because that of the project could not")


def test_refusals_are_about_the_script_and_one_line_long() -> None:
    pytest.importorskip("typer")
    with pytest.raises(BadInput) as missing:
        reading(COMMAND_LINE)
    assert "--settings-file" in str(missing.value) and "─" not in str(missing.value)
    with pytest.raises(BadInput, match="trains by axolotl"):
        reading(OTHER_PROGRAM)


def test_several_runs_of_a_script_take_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start imports the libraries, which takes seven seconds; the script runs twice here."""
    started: list[Path] = []
    start = look_worker.LookWorker.__init__

    def counted(worker: look_worker.LookWorker, python: Path, environment: object) -> None:
        started.append(python)
        start(worker, python, environment)  # type: ignore[arg-type]

    monkeypatch.setattr(look_worker.LookWorker, "__init__", counted)
    # The process that these tests share is none of this one's.
    monkeypatch.setattr(look_worker, "_kept", look_worker._Kept())
    reading(ONE_GPU)  # as eight processes, as one, and on one GPU
    assert len(started) == 1
