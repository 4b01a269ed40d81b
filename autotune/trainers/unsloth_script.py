"""The script that trains with unsloth: what it is told is filled in, and what it came to is written beside it."""

from __future__ import annotations

TRAINERS_OF = {"sft": ("SFTTrainer", "SFTConfig"), "grpo": ("GRPOTrainer", "GRPOConfig")}

REWARD = '''

def reward(completions, **rest):
    """Yours goes here: this one prefers short completions."""
    return [-float(len(completion)) for completion in completions]
'''

SCRIPT = '''"""{method} of {model_name} with unsloth."""

import json
from pathlib import Path

from unsloth import FastLanguageModel  # before trl: it patches that

from datasets import load_dataset
from transformers import TrainerCallback
from trl import {config_class}, {trainer}

OUT = Path("{out}")
MODEL = {model}
ADAPTER = {adapter}
CONFIG = {config}
{reward}

class Log(TrainerCallback):
    """Each step's figures, a line of JSON."""

    def on_log(self, args, state, control, logs=None, **rest):
        numbers = {{name: value for name, value in (logs or {{}}).items() if isinstance(value, (int, float))}}
        with (OUT / "log.jsonl").open("a") as file:
            file.write(json.dumps(numbers) + "\\n")


model, tokenizer = FastLanguageModel.from_pretrained(**MODEL)
if ADAPTER is not None:
    model = FastLanguageModel.get_peft_model(model, **ADAPTER)
config = {config_class}(**CONFIG)
# unsloth changes settings without an error: these are the ones that it trains with.
came_to = {{**MODEL, **(ADAPTER or {{}}), **{{name: getattr(config, name) for name in {settings} if hasattr(config, name)}}}}
(OUT / "settings.json").write_text(json.dumps(came_to, default=str))
rows = load_dataset("json", data_files={dataset}, split="train")
trainer = {trainer}(
    model=model, {reward_argument}args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Log()]
)
trainer.train()
'''
