"""The script that trains with TRL's PPO, which has no command: it reads the YAML as `trl grpo` reads its own."""

from __future__ import annotations

from autotune.trainers.trl_script_parts import LOADING, ROWS

_HEAD = '''"""PPO with TRL 1.0 to 1.12, which have the trainer and no command for it. `launch.sh` beside this file starts it."""

import os
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl
from datasets import DatasetDict, load_dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer


'''
_BEFORE_LOADING = """

def main():
    script, config, model = trl.TrlParser((trl.ScriptArguments, PPOConfig, trl.ModelConfig)).parse_args_and_config()
"""
_TRAINING = """    judging = {"num_labels": 1, "dtype": model.dtype, "trust_remote_code": trusts}
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left", trust_remote_code=trusts)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})

    def tokens(row):
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return {"input_ids": tokenizer(prompt)["input_ids"]}

    found = rows(script)
    prompts = found.map(tokens, remove_columns=found.column_names)
    adapter = trl.get_peft_config(model)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **loading),
        ref_model=None if adapter else AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **loading),
        reward_model=AutoModelForSequenceClassification.from_pretrained(config.reward_model_path, **judging),
        value_model=AutoModelForSequenceClassification.from_pretrained(config.reward_model_path, **judging),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(min(len(prompts), config.per_device_eval_batch_size))),
        peft_config=adapter,
    )
    trainer.train()
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
"""
SCRIPT = _HEAD + ROWS + _BEFORE_LOADING + LOADING + _TRAINING
