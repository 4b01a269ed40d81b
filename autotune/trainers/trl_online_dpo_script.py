"""The script that trains with TRL's online DPO, which has no command: it reads the YAML as `trl grpo` reads its own."""

from __future__ import annotations

from autotune.trainers.trl_script_parts import LOADING, ROWS

_HEAD = '''"""Online DPO with TRL, which has the trainer and no command for it. `launch.sh` beside this file starts it."""

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl
import trl.rewards
from datasets import DatasetDict, load_dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.scripts.grpo import GRPOScriptArguments


'''
_BEFORE_LOADING = '''

def reward(name):
    """One of trl.rewards, or a dotted path of your own."""
    if name == "get_soft_overlong_punishment":
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if "." not in name:
        return getattr(trl.rewards, name)
    sys.path.insert(0, os.getcwd())
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def main():
    script, config, model = trl.TrlParser((GRPOScriptArguments, OnlineDPOConfig, trl.ModelConfig)).parse_args_and_config()
'''
_TRAINING = """    adapter = trl.get_peft_config(model)
    named = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, trust_remote_code=trusts)
    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **loading),
        # Under an adapter the model without it is the reference; a whole copy is given, since ZeRO-3 can't make one.
        ref_model=None if adapter else AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **loading),
        reward_funcs=named + [reward(name) for name in script.reward_funcs or ()],
        args=config,
        train_dataset=rows(script),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trainer.train()
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
"""
SCRIPT = _HEAD + ROWS + _BEFORE_LOADING + LOADING + _TRAINING
