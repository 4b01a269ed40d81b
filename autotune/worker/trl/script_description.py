"""Description of a captured trainer as JSON: the answer of an inspection (`script_look`)."""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .. import dataset_sizes
from ..protocol import Result, Settings
from . import absent_unsloth, few_bits
from .absent_parts import AbsentParts
from .beside_trainer import report_beside
from .methods import RUNS_BY_METHOD
from .own_optimizers import own_optimizer
from .placeholder import Anything
from .script_capture import CapturedCall, CapturedTrainer, ScriptFailed, defaults_of, differs

SPECIAL = ("tools", "rollout_func", "environment_factory")
# Names of PEFT's configuration, and those of the settings.
LORA = {
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
RANKS = {"LORA": "r", "ADALORA": "init_r"}
"""Kind of PEFT's adapter -> name of its rank. AdaLoRA prunes: its first rank is its largest."""

SECRETS = frozenset({"hub_token", "push_to_hub_token"})
GENERATING = ("grpo", "rloo", "async-grpo")  # methods whose prompts are measured
MAX_TOKENISED_ROWS = 2000  # rows that are tokenised to estimate the length of prompts
SIZES_OF_A_STEP = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "max_completion_length",
        "max_length",
    }
)
"""Settings that are reported where a placeholder stands for them."""

CHECKPOINTING = "gradient_checkpointing"
LIBRARIES = ("site-packages", "dist-packages")

NOT_JSON = ...
"""Marker in place of a value that JSON cannot hold. None is a value."""


def describe(captured: CapturedTrainer, absent: AbsentParts) -> Result:
    arguments = captured.arguments
    if isinstance(arguments.get("args"), Anything):
        raise ScriptFailed("absent_config", captured.trainer_class.__name__)
    if arguments.get("model") is None:
        raise ScriptFailed("no_model", captured.trainer_class.__name__)
    if _is_placeholder(arguments["model"]):
        absent.report("setting", "dtype")
    configuration = _without_placeholders(_configuration(captured), absent)
    model = captured.built_model if captured.built_model is not None else arguments["model"]
    configuration = _with_checkpointing_of_model(configuration, model)
    if absent.are_replaced:
        configuration = _with_optimizer(configuration, arguments, absent)
    _report_frozen(arguments, absent)
    _report_reference(arguments, absent)
    if absent.are_replaced:
        report_beside(captured, absent)
    for name in SIZES_OF_A_STEP.intersection(captured.added):
        absent.report("added attribute", f"{name}={captured.moved[name]}")
    for name in SIZES_OF_A_STEP.intersection(captured.moved).difference(captured.added):
        if "asked signature" in absent.names:
            absent.report("asked argument", f"{name}={captured.moved[name]}")
    return {
        "method": captured.method,
        "trainer": captured.trainer_class.__name__,
        "is_own": captured.is_own,
        "own_rows": _makes_rows(arguments, configuration.raw),
        "model": _model(arguments, configuration.settings, captured.is_own, absent),
        **_settings_as_json(configuration),
        "adapter": _adapter(arguments, absent),
        **_parts_as_json(captured, "own optimizer" in absent.names),
        **_data(captured, absent),
        "trainer_place": _place(captured.place),
        "train_place": _place(captured.train_place),
        "config_place": _place(configuration.place),
        "ended_by": captured.ended_by,
        "modules": _own_modules(),
        "unsloth": json_values(absent_unsloth.stated),
    }


def _makes_rows(arguments: Settings, raw: Settings) -> bool:
    """Return True if the script makes its rows itself, and the trainer does not cut them."""
    collator = arguments.get("data_collator")
    options = raw.get("dataset_kwargs")
    skips = isinstance(options, Mapping) and bool(options.get("skip_prepare_dataset"))
    return skips or collator is not None


class _Configuration(NamedTuple):
    settings: Settings  # values that are not defaults
    raw: Settings  # all values, before the framework completed them
    changed: list[str]
    expanded: list[str]
    place: CapturedCall | None


def _configuration(captured: CapturedTrainer) -> _Configuration:
    """Return the script's configuration, or the one that the trainer makes if there is none."""
    configured = captured.configured
    config_class, _ = RUNS_BY_METHOD[captured.method].classes()
    defaults = defaults_of(config_class)
    if configured is None:
        return _Configuration(captured.moved, {**defaults, **captured.moved}, [], [], None)

    # A class of the script's own, or transformers', has other defaults than TRL's.
    settings = configured.settings()
    raw = dict(defaults)
    for name in configured.raw:
        raw[name] = configured.now(name)
        if name in defaults and differs(raw[name], defaults[name]):
            settings[name] = raw[name]
    return _Configuration(
        settings={**settings, **captured.moved},
        raw={**raw, **captured.moved},
        changed=sorted(configured.changed),
        expanded=list(configured.expanded),
        place=configured.place,
    )


def _with_checkpointing_of_model(configuration: _Configuration, model: Any) -> _Configuration:
    """Return the configuration with the checkpointing that the script turned on for its model.

    A trainer without the setting leaves the model as it is: `prepare_model_for_kbit_training`.
    """
    is_on = getattr(model, "is_gradient_checkpointing", False) is True
    if not is_on or configuration.raw.get(CHECKPOINTING):
        return configuration
    checkpointed = {CHECKPOINTING: True}
    return configuration._replace(
        settings={**configuration.settings, **checkpointed},
        raw={**configuration.raw, **checkpointed},
    )


def _with_optimizer(
    configuration: _Configuration,
    arguments: Settings,
    absent: AbsentParts,
) -> _Configuration:
    """Return the configuration with the kind of an optimizer that the script built itself."""
    optimizer = own_optimizer(arguments)
    if optimizer is None:
        return configuration
    setting, description = optimizer
    absent.report("own optimizer", description)
    return configuration._replace(
        settings={**configuration.settings, "optim": setting},
        raw={**configuration.raw, "optim": setting},
    )


def _without_placeholders(configuration: _Configuration, absent: AbsentParts) -> _Configuration:
    """Return the configuration without values that come from a part which is not here."""
    cleaned = []
    for values in (configuration.settings, configuration.raw):
        without_placeholders: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(value, Anything):
                without_placeholders[name] = value
            elif name in SIZES_OF_A_STEP:
                absent.report("setting", name)
        cleaned.append(without_placeholders)
    settings, raw = cleaned
    return configuration._replace(settings=settings, raw=raw)


def _settings_as_json(configuration: _Configuration) -> Result:
    settings = json_values(configuration.settings)
    return {
        "settings": settings,
        "left": sorted(set(configuration.settings) - set(settings) - SECRETS),
        "raw": json_values(configuration.raw),
        "changed": configuration.changed,
        "expanded": configuration.expanded,
    }


def _parts_as_json(captured: CapturedTrainer, has_setting: bool) -> Result:
    """Return the objects that the script passes to its trainer, by name.

    `has_setting`: a setting stands for its ready-made optimizer.
    """
    arguments = captured.arguments
    optimizers = arguments.get("optimizers") or ()
    if has_setting:
        optimizers = ()
    rewards = dataset_sizes.listed(arguments.get("reward_funcs"))
    stated_callbacks = dataset_sizes.listed(arguments.get("callbacks"))
    callbacks = [*stated_callbacks, *captured.callbacks]
    return {
        "optimizers": any(optimizer is not None for optimizer in optimizers),
        "rewards": [_reward_name(reward) for reward in rewards],
        "callbacks": [_class_name(callback) for callback in callbacks],
        "special": [name for name in SPECIAL if arguments.get(name)],
    }


def _place(call: CapturedCall | None) -> Result | None:
    return None if call is None else asdict(call)


# Model and adapter.


def _model(
    arguments: Settings,
    settings: Settings,
    is_own: bool,
    absent: AbsentParts,
) -> Result:
    model = arguments["model"]
    if not isinstance(model, str):
        return _loaded_model(model)
    named_model = _model_by_name(model, arguments, settings, is_own)
    options = settings.get("model_init_kwargs") or {}
    quantisation = arguments.get("quantization_config") or options.get("quantization_config")
    if few_bits.is_in_4bit(model, quantisation):
        named_model["load_in_4bit"] = True
    other_kind = few_bits.other_kind(model, quantisation)
    if other_kind is not None:
        absent.report("quantisation", other_kind)
    return named_model


def _model_by_name(
    name: str,
    arguments: Settings,
    settings: Settings,
    is_own: bool,
) -> Result:
    """Return the model that the trainer loads."""
    options = dict(settings.get("model_init_kwargs") or {})
    quantisation = arguments.get("quantization_config") or options.get("quantization_config")
    # TRL loads a model in float32, transformers as its checkpoint has it.
    dtype = settings.get("dtype", "auto" if is_own else None)
    for option in ("torch_dtype", "dtype"):
        dtype = options.get(option, dtype)
    return {
        "name": name,
        "given": False,
        "config": None,
        "dtype": _dtype(dtype),
        "attn_implementation": _json_or_none(options.get("attn_implementation")),
        "load_in_4bit": _flag(quantisation, "load_in_4bit"),
        "load_in_8bit": _flag(quantisation, "load_in_8bit"),
    }


def _loaded_model(model: Any) -> Result:
    # A model of transformers has adapters without a wrapper around it.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameter = next(base.parameters())
    return {
        "name": getattr(base.config, "_name_or_path", "") or None,
        "given": True,
        "config": base.config.to_dict(),
        "dtype": _dtype(parameter.dtype),
        "attn_implementation": getattr(base.config, "_attn_implementation", None),
        "load_in_4bit": bool(getattr(base, "is_loaded_in_4bit", False)),
        "load_in_8bit": bool(getattr(base, "is_loaded_in_8bit", False)),
    }


def _dtype(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _flag(config: Any, name: str) -> bool:
    if isinstance(config, Mapping):
        return bool(config.get(name))
    return bool(getattr(config, name, False))


def _report_frozen(arguments: Settings, absent: AbsentParts) -> None:
    """Report how many of a whole model's weights the script trains, if not all of them."""
    model = arguments["model"]
    if isinstance(model, str) or _has_adapter(arguments):
        return
    trained = 0
    total = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    if trained < total:
        absent.report("frozen weights", f"{trained / total:.0%}")


def _report_reference(arguments: Settings, absent: AbsentParts) -> None:
    """Report a reference model that is no second copy of the policy's weights."""
    reference = arguments.get("ref_model")
    if reference is None:
        return
    model = arguments["model"]
    name = _name_of(reference)
    if _has_adapter(arguments):
        absent.report("reference of an adapter", name)
    elif name != _name_of(model):
        absent.report("other reference", name)


def _has_adapter(arguments: Settings) -> bool:
    model = arguments["model"]
    return hasattr(model, "peft_config") or bool(arguments.get("peft_config"))


def _name_of(model: Any) -> str:
    """Return the name of a model, which a trainer's argument may be itself."""
    if isinstance(model, str):
        return model
    name = getattr(model.config, "_name_or_path", "")
    return str(name or type(model).__name__)


def _adapter(arguments: Settings, absent: AbsentParts) -> Result | None:
    adapter = arguments.get("peft_config")
    model = arguments["model"]
    if adapter is None and _is_placeholder(model):
        absent.report("setting", "use_peft")
    elif adapter is None and hasattr(model, "peft_config"):
        adapter = _active_adapter(model)
    if adapter is None:
        return None
    absent_name = getattr(adapter, "absent_name", None)
    if absent_name is not None:
        absent.report("trained adapter", absent_name)
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if kind not in RANKS:
        raise ScriptFailed("other_adapter", kind)
    settings = {}
    for peft_name, name in {**LORA, RANKS[kind]: "lora_r"}.items():
        settings[name] = _json_or_none(getattr(adapter, peft_name, None))
    targets = getattr(adapter, "target_modules", None)
    if isinstance(targets, set | frozenset | list | tuple):
        targets = sorted(targets)
    settings["lora_target_modules"] = targets
    # Modules that are trained whole, with gradients and optimizer states of their own.
    if trained_whole := getattr(adapter, "modules_to_save", None):
        settings["lora_modules_to_save"] = list(trained_whole)
    return {name: value for name, value in settings.items() if value is not None}


def _is_placeholder(model: Any) -> bool:
    """Return True for a model that a package would build which is not here."""
    return isinstance(model, Anything)


def _active_adapter(model: Any) -> Any:
    """Return the configuration of the adapter that is trained: the active one of several."""
    configs = dict(model.peft_config)
    active = model.active_adapters
    if callable(active):  # a method in transformers, a property in PEFT
        active = active()
    return configs[active[0]]


# Data.


def _data(captured: CapturedTrainer, absent: AbsentParts) -> Result:
    """Return the number of rows, and the length of prompts; None if only the trainer has them."""
    source = captured.arguments.get("train_dataset")
    result: Result = {"rows": None, "prompts": None}
    if "dataset" in absent.names:
        return result
    if source is not None and hasattr(source, "__len__"):  # not a stream
        result["rows"] = len(source)
    try:
        prompts = _prompt_lengths(captured, source)
        # Lengths by a synthetic tokenizer mean nothing.
        if prompts is not None and "tokenizer" in absent.names:
            raise LookupError("its tokenizer is not here")
        result["prompts"] = prompts
    except Exception as error:  # a dataset in a form that only the trainer supports
        result["prompts_why"] = f"{type(error).__name__}: {error}"[:300]
    return result


def _prompt_lengths(captured: CapturedTrainer, source: Any) -> dict[str, int] | None:
    if source is None or captured.method not in GENERATING:
        return None
    rows = itertools.islice(source, MAX_TOKENISED_ROWS)
    prompts = [row["prompt"] for row in rows]
    tokenizer = captured.arguments.get("processing_class")
    if not tokenizer:
        model = captured.arguments["model"]
        name = model if isinstance(model, str) else model.config._name_or_path
        tokenizer = dataset_sizes.load_tokenizer({"model": name})
    options = None
    if captured.configured is not None:
        options = captured.configured.now("chat_template_kwargs")
    lengths = sorted(dataset_sizes.prompt_lengths(tokenizer, prompts, options or {}))
    percentiles = {}
    for share in dataset_sizes.MEASURED_PERCENTILES:
        percentiles[str(share)] = dataset_sizes.percentile(lengths, share)
    return percentiles


# Names and files.


def _reward_name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", None)
    if not name:  # a model
        config = getattr(reward, "config", None)
        name = getattr(config, "_name_or_path", None)
    return str(name or type(reward).__name__)


def _class_name(callback: Any) -> str:
    callback_class = callback if isinstance(callback, type) else type(callback)
    return str(callback_class.__name__)


def _own_modules() -> list[str]:
    """Return the files of the script and of its own imports: those outside all installations."""
    worker = Path(__file__).resolve().parents[1]
    installations = (sys.prefix, sys.base_prefix, str(worker))
    files = set()
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not name:
            continue
        file = Path(name).resolve()
        is_installed = str(file).startswith(installations)
        is_library = any(folder in str(file) for folder in LIBRARIES)
        # Some modules name files that do not exist.
        if not is_installed and not is_library and file.is_file():
            files.add(str(file))
    return sorted(files)


# JSON.


def json_values(values: Settings) -> Result:
    """Return the values that JSON can hold, without secrets."""
    result = {}
    for name, value in values.items():
        if name not in SECRETS:
            json_value = _as_json(value)
            if json_value is not NOT_JSON:
                result[name] = json_value
    return result


def _json_or_none(value: Any) -> Any:
    json_value = _as_json(value)
    return None if json_value is NOT_JSON else json_value


def _as_json(value: Any) -> Any:
    """Convert to JSON types; NOT_JSON if that is impossible."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_as_json(item) for item in value]
        return NOT_JSON if NOT_JSON in items else items
    if isinstance(value, Mapping):
        members = {str(name): _as_json(member) for name, member in value.items()}
        return NOT_JSON if NOT_JSON in members.values() else members
    return NOT_JSON
