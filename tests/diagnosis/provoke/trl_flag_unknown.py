"""A flag that the command does not have."""

from __future__ import annotations

import sys

from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

sys.argv = [
    "sft.py",
    "--model_name_or_path",
    "model",
    "--output_dir",
    "out",
    "--max_sequence_len",
    "64",
]
TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
