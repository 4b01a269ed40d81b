"""Scripts as they were written in 2025, on a machine that has neither their data nor their models.

The worker really runs them, with the real TRL; the expected settings are read off the sources here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import BadInput, TrainingEnvironmentError
from autotune.core.job import Hardware
from autotune.core.user_script import ScriptInspection
from autotune.frameworks.trl.script_inspection import look_at
from autotune.machine.hardware_detection import hardware
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_project")]

FORMER_CALL = """
import torch
import wandb_like_tracker as tracker
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, get_former_device_map

tracker.init(project="one")
rows = load_dataset("nobody/no-such-rows", "main")["train"]
rows = rows.map(lambda row: {"prompt": row["question"], "answer": row["a"].split("#")[1]})
name = "Qwen/Qwen2.5-1.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(
    name, torch_dtype=torch.bfloat16, device_map=get_former_device_map()
).to("cuda")
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token
arguments = GRPOConfig(
    output_dir="out",
    bf16=torch.cuda.is_available(),
    warmup_ratio=0.1,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=torch.cuda.device_count(),
    num_generations=8,
    max_prompt_length=256,
    max_completion_length=786,
    vllm_device="cuda:7",
)
trainer = GRPOTrainer(
    model=model,
    tokenizer=tokenizer,
    reward_funcs=[lambda completions, **_: [0.0]],
    args=arguments,
    train_dataset=rows,
)
trainer.train()
"""

PARSER = """
from dataclasses import dataclass
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser


@dataclass
class Mine:
    dataset_id_or_path: str = "one"


@dataclass
class Config(GRPOConfig):
    bonus: float = 0.5


assert Mine.__dataclass_fields__["dataset_id_or_path"].type is str
mine, arguments, model = TrlParser((Mine, Config, ModelConfig)).parse_args_and_config()
assert mine.dataset_id_or_path == "nobody/rows" and arguments.bonus == 0.25
assert model.torch_dtype == "bfloat16" and model.trust_remote_code is False
arguments.model_init_kwargs = {"dtype": model.torch_dtype}
GRPOTrainer(
    model=model.model_name_or_path,
    reward_funcs=[lambda completions, **_: [0.0]],
    args=arguments,
    train_dataset=load_dataset(mine.dataset_id_or_path, split="train"),
).train()
"""

RECIPE = """
model_name_or_path: Qwen/Qwen2.5-3B-Instruct
torch_dtype: bfloat16
dataset_id_or_path: nobody/rows
bonus: 0.25
num_generations: 4
max_prompt_length: 300
"""


@pytest.fixture(name="cards", scope="module")
def eight_cards() -> Iterator[Hardware]:
    yield hardware("8xH100")


def look(
    folder: Path,
    source: str,
    cards: Hardware,
    *arguments: str,
    **options: Any,
) -> ScriptInspection:
    path = folder / "train.py"
    path.write_text(source)
    return look_at(
        str(path),
        arguments,
        python=Path(sys.executable),
        hardware=cards,
        rewards="real",
        replaces_absent=True,
        **options,
    ).look


def test_a_script_of_a_former_release_is_inspected_without_its_data(
    empty_project: Path, cards: Hardware
) -> None:
    inspection = look(empty_project, FORMER_CALL, cards)
    # 1. What the call says, on the cards of the request.
    settings = inspection.raw
    assert (settings["max_completion_length"], settings["num_generations"]) == (786, 8)
    assert settings["bf16"] is True and settings["gradient_accumulation_steps"] == 8
    assert settings["warmup_steps"] == 0.1
    # 2. What a former release accepted.
    assert inspection.former == {
        "warmup_ratio": 0.1,
        "max_prompt_length": 256,
        "vllm_device": "cuda:7",
    }
    # 3. The model has no weights, and its own precision: 28 layers of 1536.
    model = inspection.model
    assert model.config is not None and model.given and model.dtype == "bfloat16"
    assert (model.config["num_hidden_layers"], model.config["hidden_size"]) == (28, 1536)
    # 4. What was replaced.
    assert inspection.rows is None and inspection.prompts is None
    assert dict(inspection.absent) == {
        "package": ("wandb_like_tracker",),
        "name": ("trl.get_former_device_map",),
        "dataset": ("nobody/no-such-rows",),
        "config": ("Qwen/Qwen2.5-1.5B-Instruct",),
        "tokenizer": ("Qwen/Qwen2.5-1.5B-Instruct",),
    }


@pytest.mark.parametrize("by", ["file", "flags"])
def test_a_parser_reads_former_names_and_the_authors_own(
    by: str,
    empty_project: Path,
    cards: Hardware,
) -> None:
    recipe = empty_project / "recipe.yaml"
    recipe.write_text(RECIPE)
    arguments = ["--config", str(recipe)]
    if by == "flags":
        arguments = [
            word for line in RECIPE.split("\n") if line for word in (f"--{line}".split(": "))
        ]
    inspection = look(empty_project, PARSER, cards, *arguments)
    assert inspection.model.name == "Qwen/Qwen2.5-3B-Instruct"
    assert inspection.model.dtype == "bfloat16"
    assert inspection.raw["num_generations"] == 4
    limits: Mapping[str, object] = inspection.former
    assert str(limits["max_prompt_length"]) == "300" and "torch_dtype" in limits
    assert inspection.config_place is not None
    assert inspection.config_place.line == 18
    assert inspection.config_place.maker == "TrlParser.parse_args_and_config"


def test_lengths_by_another_tokenizer_are_none(empty_project: Path, cards: Hardware) -> None:
    source = FORMER_CALL.replace("rows = rows.map(", "rows.map(")
    source = source.replace("train_dataset=rows", 'train_dataset=[{"prompt": "a b"}] * 64')
    source = source.replace('load_dataset("nobody/no-such-rows", "main")["train"]', "list")
    source = source.replace("rows.map(", "(lambda *_: None)(")
    inspection = look(empty_project, source, cards)
    assert inspection.rows == 64 and inspection.prompts is None
    assert "its tokenizer is not here" in str(inspection.prompts_why)


def test_batches_are_those_of_all_ranks(empty_project: Path, cards: Hardware) -> None:
    """1 row x 6 steps on one rank is no whole number of groups of 12; on two ranks it is."""
    source = FORMER_CALL.replace("num_generations=8", "num_generations=12")
    source = source.replace("torch.cuda.device_count()", "6")
    assert look(empty_project, source, cards, ranks=2).raw["num_generations"] == 12
    with pytest.raises(BadInput, match="must be divisible by num_generations") as refusal:
        look(empty_project, source, cards, ranks=1)
    assert "--gpus names another number" in refusal.value.way_out


def test_a_crash_behind_a_placeholder_names_the_package(
    empty_project: Path, cards: Hardware
) -> None:
    source = "import parts_of_mine\nsize = 4 // len(parts_of_mine.rows)\n"
    with pytest.raises(TrainingEnvironmentError, match=r"lacks packages .*parts_of_mine"):
        look(empty_project, source, cards)


def test_a_trainer_without_a_model_asks_for_the_arguments(
    empty_project: Path, cards: Hardware
) -> None:
    with pytest.raises(BadInput, match="its --model_name_or_path is not stated") as refusal:
        look(empty_project, PARSER.replace("\nassert m", "\n# m"), cards)
    assert "--model NAME" in refusal.value.way_out and "-- ARGUMENTS" in refusal.value.way_out


def test_the_adapters_modules_are_those_of_the_script(empty_project: Path) -> None:
    """Their number decides the adapter's size."""
    adapter = "peft_config=LoraConfig(r=8, target_modules=['q_proj', 'down_proj']),\n    train_"
    call = FORMER_CALL.replace("train_dataset", adapter + "dataset")
    source = "from peft import LoraConfig" + call
    (empty_project / "train.py").write_text(source)
    flags = Flags(
        script="train.py",
        gpus="8xH100",
        mode="predict",
    )
    request = parse_request(flags)
    task = request.job.task
    candidate = candidate_of_job(request)
    adapter_request: Any = request.trainer.load_request(candidate, task)["adapter"]
    assert sorted(adapter_request["lora_target_modules"]) == ["down_proj", "q_proj"]


def test_another_model_is_taken_for_one_that_is_not_known(
    empty_project: Path, cards: Hardware
) -> None:
    """Qwen2.5-7B has 28 layers of 3584; DeepSpeed's file says ZeRO-3."""
    (empty_project / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    source = FORMER_CALL.replace("Qwen/Qwen2.5-1.5B-Instruct", "nobody/my-own")
    source = source.replace("warmup_ratio=0.1", f'deepspeed="{empty_project}/ds.json"')
    with pytest.raises(BadInput, match="loads nobody/my-own, of which no shape") as refusal:
        look(empty_project, source, cards)
    assert "--model NAME" in refusal.value.way_out
    model = look(empty_project, source, cards, model="Qwen/Qwen2.5-7B").model
    assert model.config is not None
    assert (model.config["num_hidden_layers"], model.config["hidden_size"]) == (28, 3584)


def test_a_deepspeed_file_of_the_call_is_the_sharding(empty_project: Path) -> None:
    (empty_project / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    source = FORMER_CALL.replace("warmup_ratio=0.1", 'deepspeed="ds.json"')
    (empty_project / "train.py").write_text(source)
    flags = Flags(
        script="train.py",
        gpus="8xH100",
        mode="predict",
        model="Qwen/Qwen2.5-7B-mine",
    )
    request = parse_request(flags)
    assert request.job.task.workload.held_values["sharding"] == "zero3"
    assert request.job.task.workload.held_values["max_prompt_length"] == 256
    model = request.job.task.workload.model
    assert model.config["num_hidden_layers"] == 28 and "assumed by the name" in model.origin


def test_an_absent_package_may_annotate(empty_project: Path, cards: Hardware) -> None:
    """`typing` compiles the annotations, and a dataclass parser evaluates them."""
    annotated = """
import typing
from dataclasses import dataclass
import absent_chess
from verl.utils.reward_score import absent_score
from transformers import HfArgumentParser


@dataclass
class Positions:
    board: typing.Optional[absent_chess.Board] = None
    boards: typing.List[absent_chess.pgn.Game] = None


def reward(board: absent_chess.Board | None = None) -> typing.Dict[str, absent_chess.Move]:
    return {}


assert typing.get_type_hints(Positions) and typing.get_type_hints(reward)
assert not absent_chess.name and len(absent_chess.rows) == 0 and f"{absent_chess.name}" == ""
"""
    inspection = look(empty_project, annotated + FORMER_CALL, cards)
    assert "absent_chess" in inspection.absent["package"]
    assert inspection.raw["num_generations"] == 8


def test_a_vocabulary_keeps_its_size_without_its_tokenizer(
    empty_project: Path, cards: Hardware
) -> None:
    """Qwen2.5-1.5B has 151,936 rows. Their mean is no number without weights."""
    source = FORMER_CALL.replace(
        "arguments = GRPOConfig(",
        "tokenizer.add_special_tokens({'additional_special_tokens': ['<keep>']})\n"
        "assert model.resize_token_embeddings(len(tokenizer)) is not None\n"
        "arguments = GRPOConfig(",
    )
    model = look(empty_project, source, cards).model
    assert model.config is not None and model.config["vocab_size"] == 151936


def test_a_script_whose_arguments_name_its_model_asks_for_them(
    empty_project: Path, cards: Hardware
) -> None:
    source = FORMER_CALL.replace('name = "Qwen/Qwen2.5-1.5B-Instruct"', "name = None")
    source = source.replace(
        "model = AutoModel", "AutoTokenizer.from_pretrained(name)\nmodel = AutoModel"
    )
    with pytest.raises(BadInput, match="passes no model to its tokenizer") as refusal:
        look(empty_project, source, cards)
    assert "-- --model_name_or_path MODEL" in refusal.value.way_out


OWN_CONSTRUCTOR = """
import os
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import GRPOConfig, GRPOTrainer, setup_chat_format


class Mine(GRPOTrainer):
    def __init__(self, model, reward_funcs, args, train_dataset):
        self.funcs = reward_funcs
        Trainer.__init__(self, model=model, args=args, train_dataset=train_dataset)


name = "/models/Qwen2.5-1.5B-Instruct"
assert "adapter_model.safetensors" not in os.listdir(name)
assert "adapter_model.safetensors" in os.listdir(f"{name}-lora")
tokenizer = AutoTokenizer.from_pretrained(name)
assert tokenizer.additional_special_tokens == []
model, tokenizer = setup_chat_format(AutoModelForCausalLM.from_pretrained(name), tokenizer)
args = GRPOConfig(output_dir="out", report_to="wandb", gradient_checkpointing=False)
Mine(model, [], args, []).train()
"""


def test_a_constructor_that_passes_trls_by(empty_project: Path, cards: Hardware) -> None:
    """A copy of a former release calls transformers' constructor itself."""
    inspection = look(empty_project, OWN_CONSTRUCTOR, cards)
    assert inspection.method == "grpo"
    assert inspection.raw["gradient_checkpointing"] is False
    assert inspection.model.config is not None
    assert inspection.model.config["hidden_size"] == 1536


FORMER_VISION = """
import torch
from transformers import (
    AutoModelForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration
)
from trl import SFTConfig, SFTTrainer

AutoModelForCausalLM.register(Qwen2VLConfig, Qwen2VLForConditionalGeneration)
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen2-VL-2B-Instruct", torch_dtype=torch.bfloat16
)
model.visual.requires_grad_(False)
SFTTrainer(model=model, args=SFTConfig(output_dir="out"), train_dataset=[]).train()
"""


def test_a_model_with_images_as_transformers_4_has_it(
    empty_project: Path,
    cards: Hardware,
) -> None:
    inspection = look(empty_project, FORMER_VISION, cards)
    assert inspection.model.dtype == "bfloat16"
    assert inspection.model.config is not None
    assert inspection.model.config["model_type"] == "qwen2_vl"


def test_distillation_is_no_training_on_texts(empty_project: Path, cards: Hardware) -> None:
    """GKD's trainer derives from SFT's, and has a teacher in addition."""
    source = """
from trl import SFTConfig
from trl.experimental.gkd import GKDTrainer

GKDTrainer(model="Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="out"), train_dataset=[]).train()
"""
    with pytest.raises(BadInput, match="GKDTrainer, whose training is not modelled"):
        look(empty_project, source, cards)
