"""Training scripts as they stand in repositories, inspected without their packages, arguments and
rows.

The worker really runs them, with the real TRL; the expected settings are read off the sources here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from autotune.core.errors import BadInput
from autotune.core.job import Hardware
from autotune.core.user_script import ScriptInspection
from autotune.frameworks.trl.script_inspection import look_at
from autotune.machine.hardware_detection import hardware
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_project")]

GRPO = """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    GRPOTrainer(
        model={model},
        reward_funcs=[lambda completions, **_: [0.0]],
        args=GRPOConfig(output_dir="out", num_generations=4, max_completion_length=96, {settings}),
        train_dataset=load_dataset("nobody/rows", split="train"),
    ).train()
"""


@pytest.fixture(name="cards", scope="module")
def eight_cards() -> Iterator[Hardware]:
    yield hardware("8xH100")


def grpo(
    head: str,
    model: str = "'Qwen/Qwen2.5-0.5B'",
    settings: str = "",
) -> str:
    return dedent(head) + dedent(GRPO.format(model=model, settings=settings))


def look(source: str, cards: Hardware, *arguments: str, **options: Any) -> ScriptInspection:
    Path("train.py").write_text(dedent(source))
    return look_at(
        "train.py",
        arguments,
        python=Path(sys.executable),
        hardware=cards,
        rewards="real",
        replaces_absent=True,
        **options,
    ).look


def predicted(source: str, **options: Any) -> ParsedRequest:
    Path("train.py").write_text(dedent(source))
    flags = Flags(
        script="train.py",
        gpus="8xH100",
        mode="predict",
        **options,
    )
    return parse_request(flags)


# Arguments that were not given.

PARSED = """
    import argparse
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("--base_model", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--eval_file")
    parser.add_argument("--group", type=int, default=4)
    arguments = parser.parse_args()
    assert arguments.train_file.split("/")
    model = AutoModelForCausalLM.from_pretrained(arguments.base_model)
    {use}
"""


def test_the_model_of_the_request_is_that_of_the_parser(cards: Hardware) -> None:
    source = grpo(PARSED.format(use=""), model="model", settings="beta=0.5")
    with pytest.raises(BadInput, match="its --base_model is not stated") as refusal:
        look(source, cards)
    assert "--model NAME" in refusal.value.way_out
    inspection = look(source, cards, model="Qwen/Qwen2.5-1.5B")
    config = inspection.model.config
    assert config is not None and config["num_hidden_layers"] == 28
    assert inspection.raw["beta"] == 0.5
    assert inspection.absent["argument"] == ("--train_file",)


def test_an_argument_that_the_script_fails_without_is_a_placeholder(cards: Hardware) -> None:
    source = grpo(PARSED.format(use="arguments.eval_file.split('/')"), model="model")
    inspection = look(source, cards, model="Qwen/Qwen2.5-0.5B")
    assert inspection.absent["argument"] == ("--train_file", "--eval_file")


CONFIGURED = """
    from dataclasses import dataclass
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer, ModelConfig, ScriptArguments, TrlParser


    @dataclass
    class Mine(ScriptArguments):
        image_root: str = None


    mine, arguments, model = TrlParser((Mine, SFTConfig, ModelConfig)).parse_args_and_config()
    assert "vl" not in model.model_name_or_path.lower()
    rows = load_dataset("json", data_files=mine.dataset_name + ".json", split="train")
    SFTTrainer(model=model.model_name_or_path, args=arguments, train_dataset=rows).train()
"""


def test_keys_that_the_classes_lack_are_left_out(cards: Hardware) -> None:
    """`--bf16` without a value and unknown keys were accepted by earlier releases."""
    Path("sft.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_seq_length: 777\ndataset_configs: [all]\n"
        "preprocessing_num_workers: 8\n"
    )
    inspection = look(CONFIGURED, cards, "--bf16", "--config", "sft.yaml")
    assert inspection.raw["max_length"] == 777 and inspection.raw["bf16"] is True
    assert inspection.absent["key"] == ("dataset_configs", "preprocessing_num_workers")
    assert "--dataset_name" in inspection.absent["argument"]
    Path("sft.yaml").write_text("per_device_train_batch_siz: 3\n")
    with pytest.raises(BadInput, match="'per_device_train_batch_size'"):
        look(CONFIGURED, cards, "--config", "sft.yaml")


# Models without weights, and rows that are not here.

EVALUATED = """
    import os
    import torch
    import pandas as pd
    from pathlib import Path
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert os.environ["TOKEN_OF_MINE"] and os.environ.get("TOKEN_OF_MINE") is None
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).to("cuda")
    inputs = tokenizer("What is 2 + 2?", return_tensors="pt").to("cuda")
    tokens = model.generate(**inputs, max_new_tokens=64)
    assert len(tokens[0]) == inputs.input_ids.shape[1] + 1
    assert isinstance(tokenizer.decode(tokens[0], skip_special_tokens=True), str)
    assert float(model(**model.dummy_inputs).logits.mean().cpu()) == 0.0
    assert torch.zeros(2, device="cuda:0").sum().item() == 0.0
    table = pd.read_csv("absent/rows.csv")
    table = table[table["score"] > 3]
    assert Path("absent/rows.jsonl").open().read() == Path("absent/rows.jsonl").read_text()
"""


def test_a_model_is_evaluated_before_it_is_trained(cards: Hardware) -> None:
    inspection = look(grpo(EVALUATED, model="model"), cards)
    assert inspection.model.given and inspection.raw["max_completion_length"] == 96
    assert "absent/rows.csv" in inspection.absent["dataset"]
    assert inspection.absent["secret"] == ("TOKEN_OF_MINE",)


# Trainers of former releases, of the author's, and several of them.

FORMER_SFT = """
    from peft import LoraConfig
    from datasets import load_dataset
    from transformers import TrainingArguments
    from trl import SFTTrainer

    trainer = SFTTrainer(
        model="Qwen/Qwen2.5-0.5B",
        train_dataset=load_dataset("nobody/rows", split="train"),
        peft_config=LoraConfig(r=64, target_modules=["q_proj", "v_proj"]),
        dataset_text_field="text",
        max_seq_length=1536,
        packing=True,
        args=TrainingArguments(output_dir="out", per_device_train_batch_size=3, fp16=True),
    )
    trainer.train()
"""


def test_arguments_of_a_former_trainer_are_settings() -> None:
    """TRL makes an SFTConfig of the TrainingArguments: without checkpointing, transformers'
    default, where TRL's is on.
    """
    request = predicted(FORMER_SFT)
    settings = candidate_of_job(request).settings
    assert settings["max_length"] == 1536 and settings["packing"] is True
    assert settings["per_device_train_batch_size"] == 3
    assert settings["gradient_checkpointing"] is False
    (note,) = [note for note in request.notes if "arguments of the trainer" in note]
    assert "packing" in note


OWN = """
    from dataclasses import dataclass
    from transformers import Trainer, TrainingArguments


    @dataclass
    class GRPOConfig(TrainingArguments):
        num_generations: int = 6
        max_prompt_length: int = 640
        max_completion_length: int = 333
        beta: float = 0.04


    class MyGRPOTrainer(Trainer):
        def __init__(self, model, reward_funcs, args=None, train_dataset=None, **rest):
            raise AssertionError("nothing of it is run")


    MyGRPOTrainer(
        "Qwen/Qwen2.5-0.5B",
        reward_funcs=[],
        args=GRPOConfig(output_dir="out", per_device_train_batch_size=6),
    ).train()
"""


def test_a_copied_trainer_trains_with_its_own_defaults() -> None:
    request = predicted(OWN)
    settings = candidate_of_job(request).settings
    assert (settings["num_generations"], settings["max_completion_length"]) == (6, 333)
    assert (settings["max_prompt_length"], settings["beta"]) == (640, 0.04)
    assert settings["gradient_checkpointing"] is False
    assert any("MyGRPOTrainer is the script's own trainer" in line for line in request.assumed)


SEVERAL = """
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    rows = load_dataset("nobody/rows", split="train")
    first = SFTTrainer(
        "Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="a", max_length=100), train_dataset=rows
    )
    first.train()
    first.save_model("a")
    second = DPOTrainer(
        "Qwen/Qwen2.5-0.5B", args=DPOConfig(output_dir="b", max_length=200), train_dataset=rows
    )
    second.train()
"""


def test_of_several_trainings_the_first_or_the_named_one_is_read() -> None:
    request = predicted(SEVERAL)
    assert request.job.task.workload.method == "sft"
    assert any("the training by SFTTrainer in line 6" in line for line in request.assumed)
    second_request = predicted(SEVERAL, method="dpo")
    assert second_request.job.task.workload.method == "dpo"
    assert candidate_of_job(second_request).settings["max_length"] == 200


IN_FUNCTIONS = """
    from datasets import load_dataset
    from trl import GRPOTrainer, SFTConfig, SFTTrainer

    def warm_up(rows):
        SFTTrainer(
            "Qwen/Qwen2.5-0.5B", args=SFTConfig(output_dir="a"), train_dataset=rows
        ).train()

    def reinforce(rows):
        GRPOTrainer("Qwen/Qwen2.5-0.5B", reward_funcs=[], train_dataset=rows).train()

    rows = load_dataset("nobody/rows", split="train")
    warm_up(rows)
    reinforce(rows)
"""


def test_a_second_training_in_a_function_of_its_own_is_said() -> None:
    assert any("the training by SFTTrainer" in line for line in predicted(IN_FUNCTIONS).assumed)


# Packages that decide the settings.

HYDRA = """
    import hydra
    from omegaconf import DictConfig, OmegaConf
    from transformers import HfArgumentParser
    from trl import GRPOConfig, GRPOTrainer


    @hydra.main(version_base=None, config_path="conf", config_name="config")
    def main(cfg: DictConfig) -> None:
        assert cfg.model.path and isinstance(cfg, DictConfig)
        (config,) = HfArgumentParser(GRPOConfig).parse_dict(OmegaConf.to_container(cfg.trainer))
        GRPOTrainer(model=cfg.model.path, reward_funcs=[], args=config).train()


    main()
"""


def test_the_configuration_of_hydra_is_composed(cards: Hardware) -> None:
    Path("conf/trainer").mkdir(parents=True)
    Path("conf/config.yaml").write_text(
        "defaults:\n  - trainer: short\nmodel:\n  path: Qwen/Qwen2.5-0.5B\n"
    )
    Path("conf/trainer/long.yaml").write_text(
        "output_dir: out\nnum_generations: 2\nmax_prompt_length: 900\nmax_completion_length: 50\n"
    )
    inspection = look(HYDRA, cards, "trainer=long", "trainer.max_completion_length=70")
    assert inspection.raw["max_completion_length"] == 70
    assert inspection.raw["num_generations"] == 2
    assert inspection.former["max_prompt_length"] == 900
    assert inspection.absent["package"] == ("hydra", "omegaconf")


UNSLOTH = """
    from unsloth import FastLanguageModel, PatchFastRL, is_bfloat16_supported

    PatchFastRL("GRPO", FastLanguageModel)
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="Qwen/Qwen2.5-1.5B-Instruct",
        max_seq_length=1024,
        fast_inference=True,
        gpu_memory_utilization=0.6,
    )
    model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj", "v_proj"])
    model.print_trainable_parameters()
"""


def test_a_script_of_unsloth_is_one_of_that_framework() -> None:
    """Four bits are unsloth's default, and a micro-batch of 1 x 2 is no group of 4."""
    settings = "per_device_train_batch_size=1, max_prompt_length=256, bf16=is_bfloat16_supported()"
    request = predicted(grpo(UNSLOTH, model="model", settings=settings))
    task = request.job.task
    assert (task.workload.framework, task.workload.tuning) == ("unsloth", "qlora")
    assert task.hardware.count == 1
    settings_by_name = candidate_of_job(request).settings
    assert settings_by_name["lora_rank"] == 32 and settings_by_name["fast_inference"] is True
    assert settings_by_name["gpu_memory_utilization"] == 0.6
    assert settings_by_name["per_device_train_batch_size"] == 4
    assert settings_by_name["gradient_accumulation_steps"] == 2
    assert (settings_by_name["max_prompt_length"], settings_by_name["optim"]) == (256, "adamw_8bit")
    lines = " ".join(request.assumed)
    assert "where the script has 1: unsloth makes groups whole" in lines
    assert settings_by_name["target_modules"] == "q_proj,v_proj"


FIRE = """
    import fire

    def train(base_model: str = "", micro: int = 2, lora: bool = False):
        assert base_model and lora
        from trl import GRPOConfig, GRPOTrainer
        config = GRPOConfig(output_dir="out", per_device_train_batch_size=micro)
        GRPOTrainer(model=base_model, reward_funcs=[], args=config).train()

    fire.Fire(train)
"""


def test_the_function_of_fire_gets_the_command_line(cards: Hardware) -> None:
    arguments = ("--micro", "16", "--lora")
    inspection = look(FIRE, cards, *arguments, model="Qwen/Qwen2.5-0.5B")
    assert inspection.raw["per_device_train_batch_size"] == 16
