"""Inspection of the user's script: its trainer and settings as JSON, without training.

python autotune/worker look  <  {"script": path, "arguments": [...], "method": "grpo" | null, "device": "cpu" | "cuda"}

{"method": "grpo", "trainer": "GRPOTrainer", "model": {"name": ... | null, "given": bool, "config":
{...} | null,
 "dtype": ..., "load_in_4bit": bool, "load_in_8bit": bool}, "settings": {name: value}, "left":
 [settings that JSON cannot hold], "raw": {name: value}, "changed": [...], "expanded": [...],
 "adapter": {...} | null, "optimizers": bool, "rewards": [names], "callbacks": [names], "special":
 [names], "rows": n | null, "prompts": {percentile: tokens} | null, "trainer_place": place,
 "train_place": place | null, "config_place": place | null, "ended_by": name | null, "modules":
 [files of the user's own]}
{"error": {"kind": "crashed" | "ended" | "no_trainer" | "two_trainers" | "odd_trainer", "text": ...,
"line": n, "log": ...}}
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .. import dataset_sizes
from ..tracing.patching import attribute, swapped
from .methods import METHODS
from .script_capture import CapturedTrainer, ScriptFailed, catch, defaults_of
from .vllm_engines import without_vllm

SPECIAL = ("tools", "rollout_func", "environment_factory")
LORA = {
    "r": "lora_r",
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
}
SECRETS = frozenset({"hub_token", "push_to_hub_token"})
MAX_TOKENISED_ROWS = 2000  # rows that are tokenised to estimate the length of prompts
LIBRARIES = ("site-packages", "dist-packages")


def main() -> None:
    # Frameworks and scripts print to stdout: the reply goes to the real one, everything else to
    # stderr.
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        try:
            without_vllm()
            with _accepted_as_on(request.get("device")):
                answer = describe(
                    catch(request["script"], request["arguments"], request.get("method"))
                )
        except ScriptFailed as failed:
            cause = failed.__cause__
            log = (
                "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))[-4000:]
                if cause
                else ""
            )
            answer = {
                "error": {"kind": failed.kind, "text": str(failed), "log": log, **failed.facts}
            }
        sys.stdout.flush()
        json.dump(answer, real, default=str)
        real.flush()
        os._exit(0)  # skips the script's threads and exit handlers


@contextmanager
def _accepted_as_on(device: str | None) -> Iterator[None]:
    """Let transformers accept settings of a GPU on a machine without one: bf16 is TRL's default.

    Nothing runs on the device: the script ends at its trainer."""
    import torch
    from transformers import training_args

    with ExitStack() as stack:
        if device == "cuda" and not torch.cuda.is_available():
            for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
                stack.enter_context(swapped(vars(training_args), name, lambda: True))
            stack.enter_context(attribute(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
        yield


def describe(captured: CapturedTrainer) -> dict[str, Any]:
    given, configured = captured.given, captured.configured
    settings = configured.settings() if configured else {}
    plain = _plain_ones(settings)
    # Without one, the trainer makes a configuration of its own.
    raw = (
        {n: configured.now(n) for n in configured.raw}
        if configured
        else defaults_of(METHODS[captured.method].classes()[0])
    )
    config_place = configured.place if configured else None
    places = {
        "trainer_place": captured.place,
        "train_place": captured.train_place,
        "config_place": config_place,
    }
    callbacks = (*dataset_sizes.listed(given.get("callbacks")), *captured.callbacks)
    return {
        "method": captured.method,
        "trainer": captured.trainer_class.__name__,
        "model": _model(given, settings),
        "settings": plain,
        "left": sorted(set(settings) - set(plain) - SECRETS),
        "raw": _plain_ones(raw),
        "changed": sorted(configured.changed) if configured else [],
        "expanded": list(configured.expanded) if configured else [],
        "adapter": _adapter(given),
        "optimizers": any(one is not None for one in given.get("optimizers") or ()),
        "rewards": [_name(reward) for reward in dataset_sizes.listed(given.get("reward_funcs"))],
        "callbacks": [
            one.__name__ if isinstance(one, type) else type(one).__name__ for one in callbacks
        ],
        "special": [name for name in SPECIAL if given.get(name)],
        **_data(captured),
        **{name: place and dataclasses.asdict(place) for name, place in places.items()},
        "ended_by": captured.ended_by,
        "modules": _own_modules(),
    }


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, without secrets."""
    kept = {name: _plain(value) for name, value in values.items() if name not in SECRETS}
    return {name: value for name, value in kept.items() if value is not Ellipsis}


def _model(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    model = given["model"]
    quantised = given.get("quantization_config")
    if isinstance(model, str):
        named = dict(settings.get("model_init_kwargs") or {})
        quantised = quantised or named.get("quantization_config")
        return {
            "name": model,
            "given": False,
            "config": None,
            "dtype": _dtype(named.get("dtype", named.get("torch_dtype", settings.get("dtype")))),
            "attn_implementation": _plain_or_none(named.get("attn_implementation")),
            "load_in_4bit": _flag(quantised, "load_in_4bit"),
            "load_in_8bit": _flag(quantised, "load_in_8bit"),
        }
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return {
        "name": getattr(base.config, "_name_or_path", "") or None,
        "given": True,
        "config": base.config.to_dict(),
        "dtype": _dtype(next(base.parameters()).dtype),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "load_in_4bit": bool(getattr(base, "is_loaded_in_4bit", False)),
        "load_in_8bit": bool(getattr(base, "is_loaded_in_8bit", False)),
    }


def _adapter(given: Mapping[str, Any]) -> dict[str, Any] | None:
    adapter = given.get("peft_config")
    if adapter is None and hasattr(given["model"], "peft_config"):
        adapter = next(iter(given["model"].peft_config.values()))
    if adapter is None:
        return None
    settings = {
        ours: _plain_or_none(getattr(adapter, theirs, None)) for theirs, ours in LORA.items()
    }
    targets = getattr(adapter, "target_modules", None)
    settings["lora_target_modules"] = (
        sorted(targets) if isinstance(targets, set | frozenset | list | tuple) else targets
    )
    return {name: value for name, value in settings.items() if value is not None}


def _data(captured: CapturedTrainer) -> dict[str, Any]:
    """Return the number of rows, and the length of prompts; None if only the trainer can know."""
    source = captured.given.get("train_dataset")
    rows = len(source) if source is not None and hasattr(source, "__len__") else None
    found: dict[str, Any] = {"rows": rows, "prompts": None}
    try:
        found["prompts"] = _prompt_lengths(captured, source)
    except Exception as error:  # a dataset in a form that only the trainer supports
        found["prompts_why"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _prompt_lengths(captured: CapturedTrainer, source: Any) -> dict[str, int] | None:
    if source is None or captured.method not in ("grpo", "rloo", "async-grpo"):
        return None
    prompts = [row["prompt"] for row in itertools.islice(source, MAX_TOKENISED_ROWS)]
    tokenizer = captured.given.get("processing_class")
    if not tokenizer:
        model = captured.given["model"]
        name = model if isinstance(model, str) else model.config._name_or_path
        tokenizer = dataset_sizes.load_tokenizer({"model": name})
    options = (
        captured.configured.now("chat_template_kwargs") if captured.configured else None
    ) or {}
    ordered = sorted(dataset_sizes.prompt_lengths(tokenizer, prompts, options))
    return {
        str(share): dataset_sizes.percentile(ordered, share) for share in dataset_sizes.PERCENTILES
    }


def _own_modules() -> list[str]:
    """Return the files of the script and of its own imports: those outside all installations."""
    files = {
        str(Path(file).resolve())
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None))
    }
    installed = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[1]))
    outside = (
        file
        for file in files
        if not file.startswith(installed) and not any(part in file for part in LIBRARIES)
    )
    return sorted(
        file for file in outside if Path(file).is_file()
    )  # some modules name files that do not exist


def _name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    config = getattr(reward, "config", None)
    return str(
        getattr(reward, "__name__", None)
        or getattr(config, "_name_or_path", None)
        or type(reward).__name__
    )


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _flag(config: Any, name: str) -> bool:
    return bool(config.get(name) if isinstance(config, Mapping) else getattr(config, name, False))


def _plain_or_none(value: Any) -> Any:
    plain = _plain(value)
    return None if plain is Ellipsis else plain


def _plain(value: Any) -> Any:
    """Convert to JSON types; Ellipsis if that is impossible."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(one) for one in value]
        return Ellipsis if Ellipsis in items else items
    if isinstance(value, Mapping):
        fields = {str(name): _plain(one) for name, one in value.items()}
        return Ellipsis if Ellipsis in fields.values() else fields
    return Ellipsis
