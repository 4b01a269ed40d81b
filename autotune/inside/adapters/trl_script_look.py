"""A first look at the user's own script: what it would train, and how, as JSON. Nothing is trained and nothing is written.

python autotune/inside look        {"script": path, "arguments": [...], "method": "grpo" | null} on stdin  ->  JSON on stdout

{"method": "grpo", "trainer": "GRPOTrainer", "model": {"name": ... | null, "given": bool, "config": {...} | null,
 "dtype": ..., "load_in_4bit": bool, "load_in_8bit": bool}, "settings": {name: value}, "left": [names without one],
 "raw": {name: value}, "changed": [...], "expanded": [...], "adapter": {...} | null, "optimizers": bool,
 "rewards": [names], "callbacks": [names], "special": [names], "rows": n | null, "prompts": {percentile: tokens} | null,
 "trainer_place": place, "train_place": place | null, "config_place": place | null, "ended_by": name | null,
 "modules": [files of the user's own]}
{"error": {"kind": "crashed" | "ended" | "no_trainer" | "two_trainers" | "odd_trainer", "text": ..., "line": n, "log": ...}}
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .trl_imports import without_vllm
from .trl_script_catch import Caught, Place, ScriptFailed, catch

SPECIAL = ("tools", "rollout_func", "environment_factory")
LORA = {"r": "lora_r", **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}}
SECRETS = frozenset({"hub_token", "push_to_hub_token"})
MOST_ROWS = 2000
"""So many rows are tokenised to know how long prompts are."""

PERCENTILES = (50, 90, 95, 99, 100)
LIBRARIES = ("site-packages", "dist-packages")


def main() -> None:
    """Frameworks and scripts print to stdout; the answer goes to the real one, everything else to stderr."""
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        try:
            without_vllm()
            answer = described(catch(request["script"], request["arguments"], request.get("method")))
        except ScriptFailed as failed:
            answer = {"error": {"kind": failed.kind, "text": str(failed), "log": _log(failed), **failed.facts}}
        sys.stdout.flush()
        json.dump(answer, real, default=str)
        real.flush()
        os._exit(0)  # neither the script's threads nor its exit handlers have a say in this


def _log(failed: ScriptFailed) -> str:
    cause = failed.__cause__
    return "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))[-4000:] if cause else ""


def described(caught: Caught) -> dict[str, Any]:
    given, configured = caught.given, caught.configured
    settings = configured.settings() if configured else {}
    plain = _plain_ones(settings)
    return {
        "method": caught.method,
        "trainer": caught.trainer_class.__name__,
        "model": _model(given, settings),
        "settings": plain,
        "left": sorted(set(settings) - set(plain) - SECRETS),
        "raw": _plain_ones({name: configured.now(name) for name in configured.raw} if configured else {}),
        "changed": sorted(configured.changed) if configured else [],
        "expanded": list(configured.expanded) if configured else [],
        "adapter": _adapter(given),
        "optimizers": any(one is not None for one in given.get("optimizers") or ()),
        "rewards": [_name(reward) for reward in _listed(given.get("reward_funcs"))],
        "callbacks": [type(one).__name__ if not isinstance(one, type) else one.__name__
                      for one in (*_listed(given.get("callbacks")), *caught.callbacks)],
        "special": [name for name in SPECIAL if given.get(name)],
        **_data(caught),
        "trainer_place": _place(caught.place),
        "train_place": _place(caught.train_place),
        "config_place": _place(configured.place) if configured else None,
        "ended_by": caught.ended_by,
        "modules": _own_modules(),
    }  # fmt: skip


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold and anybody may read."""
    kept = {name: _plain(value) for name, value in values.items() if name not in SECRETS}
    return {name: value for name, value in kept.items() if value is not Ellipsis}


def _model(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    model = given["model"]
    quantised = given.get("quantization_config")
    if isinstance(model, str):
        named = dict(settings.get("model_init_kwargs") or {})
        quantised = quantised or named.get("quantization_config")
        return {
            "name": model, "given": False, "config": None, "dtype": _dtype(named.get("dtype", named.get("torch_dtype"))),
            "attn_implementation": _plain_or_none(named.get("attn_implementation")),
            "load_in_4bit": _flag(quantised, "load_in_4bit"), "load_in_8bit": _flag(quantised, "load_in_8bit"),
        }  # fmt: skip
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return {
        "name": getattr(base.config, "_name_or_path", "") or None, "given": True, "config": base.config.to_dict(),
        "dtype": _dtype(next(base.parameters()).dtype), "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "load_in_4bit": bool(getattr(base, "is_loaded_in_4bit", False)),
        "load_in_8bit": bool(getattr(base, "is_loaded_in_8bit", False)),
    }  # fmt: skip


def _adapter(given: Mapping[str, Any]) -> dict[str, Any] | None:
    adapter = given.get("peft_config")
    if adapter is None and hasattr(given["model"], "peft_config"):
        adapter = next(iter(given["model"].peft_config.values()))
    if adapter is None:
        return None
    told = {ours: _plain_or_none(getattr(adapter, theirs, None)) for theirs, ours in LORA.items()}
    targets = getattr(adapter, "target_modules", None)
    told["lora_target_modules"] = sorted(targets) if isinstance(targets, set | frozenset | list | tuple) else targets
    return {name: value for name, value in told.items() if value is not None}


def _data(caught: Caught) -> dict[str, Any]:
    """How many rows there are, and how long their prompts; None where that can't be told without the trainer."""
    source = caught.given.get("train_dataset")
    rows = len(source) if source is not None and hasattr(source, "__len__") else None
    found: dict[str, Any] = {"rows": rows, "prompts": None}
    try:
        found["prompts"] = _prompt_lengths(caught, source)
    except Exception as error:  # a dataset of a shape of its own: the trainer may still know what to do with it
        found["prompts_why"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _prompt_lengths(caught: Caught, source: Any) -> dict[str, int] | None:
    import itertools

    from .. import prompts

    if source is None or caught.method not in ("grpo", "rloo"):
        return None
    taken = [row["prompt"] for row in itertools.islice(source, MOST_ROWS)]
    tokenizer = caught.given.get("processing_class") or _tokenizer(caught)
    options = (caught.configured.now("chat_template_kwargs") if caught.configured else None) or {}
    ordered = sorted(prompts.prompt_lengths(tokenizer, taken, options))
    return {str(share): prompts.percentile(ordered, share) for share in PERCENTILES}


def _tokenizer(caught: Caught) -> Any:
    from .. import prompts

    model = caught.given["model"]
    name = model if isinstance(model, str) else model.config._name_or_path
    return prompts.load_tokenizer({"model": name})


def _own_modules() -> list[str]:
    """The script and what it imports of the user's own: files outside of what is installed."""
    files = {str(Path(file).resolve()) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    ours = str(Path(__file__).resolve().parents[1])
    installed = (sys.prefix, sys.base_prefix, ours)
    outside = (file for file in files if not file.startswith(installed) and not any(part in file for part in LIBRARIES))
    return sorted(file for file in outside if Path(file).is_file())  # some modules name files that never were


def _place(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else dataclasses.asdict(place)


def _name(reward: Any) -> str:
    config = getattr(reward, "config", None)
    return reward if isinstance(reward, str) else str(
        getattr(reward, "__name__", None) or getattr(config, "_name_or_path", None) or type(reward).__name__
    )  # fmt: skip


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _flag(config: Any, name: str) -> bool:
    return bool(config.get(name) if isinstance(config, Mapping) else getattr(config, name, False))


def _plain_or_none(value: Any) -> Any:
    kept = _plain(value)
    return None if kept is Ellipsis else kept


def _plain(value: Any) -> Any:
    """As JSON has it; Ellipsis for what JSON has not."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        kept = [_plain(one) for one in value]
        return Ellipsis if Ellipsis in kept else kept
    if isinstance(value, Mapping):
        told = {str(name): _plain(one) for name, one in value.items()}
        return Ellipsis if Ellipsis in told.values() else told
    return Ellipsis
