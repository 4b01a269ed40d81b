"""What ms-swift's and TRL's own parsers make of a launch, for launch_values_side.py."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PLAIN = (bool, int, float, str, type(None))
Answer = dict[str, Any]


SWIFT_DROPPED = frozenset(
    "model model_type template dataset val_dataset cached_dataset external_plugins adapters"
    " reward_model reward_adapters ref_model ref_adapters teacher_model resume_from_checkpoint"
    " output_dir logging_dir report_to eval_dataset custom_dataset_info custom_register_path"
    " load_args system config vllm_server_host vllm_server_port vllm_server_base_url use_hf"
    " reward_funcs reward_weights multi_turn_scheduler gym_env chat_template model_id_or_path"
    " callbacks loss_type metric optimizer agent_template deepspeed_config".split()
)
"""Options that name files, models and code, which are not here."""

SWIFT_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def swift_answer(question: Mapping[str, Any]) -> Answer:
    """Parse the command line for as many ranks as the question says, and a small model."""
    import transformers

    ranks = int(question.get("ranks") or 1)
    os.environ["_PATCH_WORLD_SIZE"] = str(ranks)
    transformers.TrainingArguments.world_size = property(lambda self: ranks)
    from swift.arguments import RLHFArguments, SftArguments  # type: ignore[import-not-found]
    from swift.cli.main import parse_yaml_args  # type: ignore[import-not-found]
    from swift.utils import parse_args  # type: ignore[import-not-found]

    texts = list(question["arguments"])
    if texts and not texts[0].startswith("--"):
        parse_yaml_args(texts)  # in place, as its command does with a file
    kind = SftArguments if question["method"] == "sft" else RLHFArguments
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SWIFT_CONFIG))
        arguments = [*_without(texts, SWIFT_DROPPED), "--model", folder]
        arguments += ["--model_type", "qwen2", "--template", "qwen2_5", "--dataset", "none"]
        arguments += ["--output_dir", folder, "--use_cpu", "true"]
        parsed, unknown = parse_args(kind, arguments)
    values = _plain_fields(parsed)
    for name, value in _plain_fields(parsed.training_args).items():
        if name in ("gradient_accumulation_steps", "steps_per_generation", "bf16", "fp16"):
            values[name] = value
    values["deepspeed"] = _swift_stage(parsed.deepspeed)
    stated = " ".join(question["arguments"]).replace("-", "_")
    for name in ("steps_per_generation", "generation_batch_size"):
        if name not in stated:  # what follows from the accumulation
            values.pop(
                name,
                None,
            )
    unknown = [word for word in unknown if word.startswith("--")]
    return {"values": values, "unknown": unknown, "parser": "release"}


def _without(
    arguments: list[str],
    names: frozenset[str],
) -> Iterator[str]:
    """Yield the texts without these options and their values."""
    is_dropped = False
    for word in arguments:
        if word.startswith("--"):
            is_dropped = word[2:].partition("=")[0].replace("-", "_") in names
        if not is_dropped:
            yield word


def _plain_fields(parsed: Any) -> Answer:
    return {
        name: value if isinstance(value, PLAIN) else str(value)
        for name, value in vars(parsed).items()
    }


def _swift_stage(config: Any) -> str | None:
    """Return ms-swift's name of a DeepSpeed configuration."""
    if not isinstance(config, dict):
        return None if config is None else str(config)
    options = config.get(
        "zero_optimization",
        {},
    )
    offloads = [part for part in ("optimizer", "param") if _is_on_host(options, part)]
    return f"zero{options.get('stage', 0)}" + ("_offload" if offloads else "")


def _is_on_host(
    options: Mapping[str, Any],
    part: str,
) -> bool:
    offload = options.get(f"offload_{part}") or {}
    return str(offload.get("device", "none")) != "none"


def trl_answer(question: Mapping[str, Any]) -> Answer:
    import trl

    prefix = question["class_prefix"]
    module = importlib.import_module(f"trl.scripts.{question['method']}")
    script = getattr(
        module,
        f"{prefix}ScriptArguments",
        trl.ScriptArguments,
    )
    kinds = (script, getattr(trl, f"{prefix}Config"), trl.ModelConfig)
    arguments = [*question["arguments"], "--use_cpu", "true", "--output_dir", "unused"]
    parser = trl.TrlParser(kinds)
    *parsed, unknown = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    values: Answer = {}
    for part in parsed:
        for field in dataclasses.fields(part):
            value = getattr(
                part,
                field.name,
                None,
            )
            values[field.name] = value if isinstance(value, (*PLAIN, list, dict)) else str(value)
    return {
        "values": values,
        "unknown": [word for word in unknown if word.startswith("--")],
        "parser": "release",
    }
