"""Inspection of the user's script: its trainer and settings as JSON, without training.

    python autotune/worker look < REQUESTS

A request, one line:

    {"script": path, "arguments": [...], "method": "grpo" | null, "device": "cpu" | "cuda",
     "ranks": n | null, "absent": true, "model": name | null,
     "stand_in": name | null, "fills": false,
     "passed_over": [[file, line, kind of a statement], ...],
     "former": {"renamed": {former: present}, "removed": [...], "moved": {name: default}},
     "gpus": {"count": n, "name": ..., "capability": [major, minor], "memory_bytes": n} | null}

With `absent`, models are built without weights, and what is not here is replaced: rows, tokenizers,
packages. `model`, else `stand_in`, and, with `fills`, placeholders stand for arguments that were
not given (`missing_arguments`). A config is requested by one line, {"config_of": name}, and
answered by one, the config or null.

The answer:

    {"method": "grpo", "trainer": "GRPOTrainer", "is_own": false,
     "own_rows": false,
     "model": {"name": ... | null, "given": bool, "config": {...} | null, "dtype": ...,
               "attn_implementation": ... | null, "load_in_4bit": bool, "load_in_8bit": bool},
     "settings": {name: value}, "left": [settings that JSON cannot hold],
     "raw": {name: value}, "changed": [...], "expanded": [...],
     "adapter": {...} | null, "optimizers": bool, "rewards": [names], "callbacks": [names],
     "special": [names], "rows": n | null, "prompts": {percentile: tokens} | null,
     "trainer_place": place, "train_place": place | null, "config_place": place | null,
     "ended_by": name | null, "modules": [files of the user's own],
     "former": {former name: value}, "absent": {kind of part: [names]},
     "unsloth": {argument of its functions: value}}

or, if the script reaches no trainer:

    {"error": {"kind": "crashed" | "too_long" | "ended" | "no_trainer" | "two_trainers"
               | "odd_trainer" | "no_model" | "unknown_model" | "other_adapter" | "absent_config",
               "text": ..., "line": n, "log": ...,
               "check": {"file": ..., "line": n, "kind": ..., "text": ...} | null}}
"""

from __future__ import annotations

import enum
import gc
import importlib
import importlib.metadata
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from .. import cuda_before_fork, dataset_sizes, processes
from ..library_imports import kept_imports
from ..protocol import Request, Result, Settings, decode, encode
from ..tracing.patching import attribute, swapped
from . import (
    absent_data,
    absent_fire,
    absent_models,
    absent_packages,
    absent_unsloth,
    absent_values,
    composed_config,
    missing_arguments,
    named_gpus,
    searched_values,
    time_limit,
    user_source,
)
from .former_arguments import FormerArguments
from .methods import RUNS_BY_METHOD
from .script_capture import (
    CapturedCall,
    CapturedTrainer,
    ScriptFailed,
    catch,
    classes_by_method,
    defaults_of,
    differs,
    is_library,
)
from .vllm_engines import without_vllm

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

MAX_LOG_CHARACTERS = 4000
LIBRARIES = ("site-packages", "dist-packages")

NOT_JSON = ...
"""Marker in place of a value that JSON cannot hold. None is a value."""


def main() -> None:
    """Answer requests until stdin ends: each in a fork, so that libraries are imported once."""
    # Frameworks and scripts print to stdout: the reply goes to the real one, everything else to
    # stderr.
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        line = sys.stdin.readline()
        # A script that never builds its trainer must not outlive who asked for it.
        processes.exit_with_parent(decode(line)["parent"])
        _import_libraries()
        while line:
            _answer_in_fork(decode(line), real)
            line = sys.stdin.readline()
        os._exit(0)  # skips exit handlers, which are the libraries' own


def _import_libraries() -> None:
    """Import what every inspection needs. A library that fails here fails in the inspection, whose
    answer says so.
    """
    with suppress(Exception), kept_imports():
        torch = importlib.import_module("torch")
        with cuda_before_fork.query_in_child_process(torch):
            without_vllm()
            for name in ("datasets", "pandas", "peft", "transformers", "trl"):
                importlib.import_module(name)
            classes_by_method()
    gc.freeze()


def _answer_in_fork(request: Request, real: TextIO) -> None:
    """Answer in a child, whose end by a signal or without an answer is this process's end too."""
    if _has_used_cuda():
        _answer(request, real)
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        processes.exit_with_parent(worker)
        _answer(request, real)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(worker, -code)
    elif code > 0:
        os._exit(code)


def _has_used_cuda() -> bool:
    """Return True if CUDA was initialised: a fork can't use it, and only one answer is given."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _answer(request: Request, real: TextIO) -> NoReturn:
    try:
        answer = _inspect(request, real)
        sys.stdout.flush()
        real.write(encode(answer) + "\n")
        real.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # skips the script's threads and exit handlers


def _inspect(request: Request, real: TextIO) -> Result:
    former = FormerArguments(request.get("former") or {})
    absent = AbsentParts()
    try:
        without_vllm()
        accepted = _accepted_as_on(request.get("device"), request.get("ranks"))
        limit = time_limit.limited(request.get("seconds"))
        with accepted, absent.replaced(request, real), limit:
            captured = catch(
                request["script"],
                request["arguments"],
                request.get("method"),
                former,
                takes_own=bool(request.get("absent")),
            )
            if captured.arguments.get("model") is None:
                captured.arguments["model"] = request.get("stand_in")
            answer = describe(captured, absent)
            answer["former"] = _json_values(former.given)
    except ScriptFailed as failure:
        answer = {"error": _describe_failure(failure)}
    except time_limit.TooLong as late:  # a script that caught the first one
        second_failure = ScriptFailed("too_long", str(late))
        answer = {"error": _describe_failure(second_failure)}
    answer["absent"] = absent.names
    return answer


@contextmanager
def _accepted_as_on(device: str | None, ranks: int | None) -> Iterator[None]:
    """Let transformers accept settings of a GPU on a machine without one: bf16 is TRL's default.

    Nothing runs on the device: the script ends at its trainer. Batches are those of all ranks."""
    import torch
    from transformers import training_args

    with ExitStack() as stack:
        if device == "cuda" and not torch.cuda.is_available():
            for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
                stack.enter_context(swapped(vars(training_args), name, _supported))
            stack.enter_context(attribute(torch.cuda, "is_bf16_supported", _supported))
        if ranks is not None:
            world_size = property(lambda _: ranks)
            owner = training_args.TrainingArguments
            stack.enter_context(attribute(owner, "world_size", world_size))
            # The other ranks, for which this one would wait, are not there.
            stack.enter_context(attribute(owner, "main_process_first", _no_wait))
        yield


def _supported(*_: Any, **__: Any) -> bool:
    return True


def _no_wait(*_: Any, **__: Any) -> nullcontext[None]:
    return nullcontext()


class AbsentParts:
    """Parts of the script that were replaced, by kind."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def report(self, kind: str, name: str) -> None:
        names = self.names.setdefault(kind, [])
        if name not in names:
            names.append(name)

    @contextmanager
    def replaced(self, request: Request, channel: TextIO) -> Iterator[None]:
        """Replace what is not here, if the request allows it."""
        if not request.get("absent"):
            yield
            return

        def config_of(name: str) -> Any:
            question = encode({"config_of": name})
            channel.write(question + "\n")
            channel.flush()
            return decode(sys.stdin.readline())

        with ExitStack() as stack:
            stack.enter_context(absent_data.placeholders(self.report))
            checks = [user_source.Check(*place) for place in request.get("passed_over", ())]
            stack.enter_context(user_source.without_checks(checks, is_library))
            fills = bool(request.get("fills"))
            stack.enter_context(absent_data.own_files(is_library, self.report, finds=fills))
            stack.enter_context(absent_data.frames(self.report))
            stack.enter_context(absent_models.without_weights(config_of, self.report))
            script = Path(request["script"])
            stack.enter_context(absent_packages.placeholders(script, is_library, self.report))
            stack.enter_context(absent_packages.former_names(is_library, self.report))
            model = request.get("model")
            if model is None and request.get("stand_in"):
                model = missing_arguments.UnstatedModel(request["stand_in"])
            absent_fire.model[0] = model
            composed_config.report_choice[0] = self.report
            arguments = missing_arguments.completed(model, fills, self.report)
            stack.enter_context(arguments)
            stack.enter_context(missing_arguments.secrets(is_library, self.report))
            stack.enter_context(absent_values.zeros())
            stack.enter_context(searched_values.largest(script, self.report))
            stack.enter_context(time_limit.no_pauses(is_library))
            if request.get("gpus"):
                stack.enter_context(
                    named_gpus.seen_by_user(request["gpus"], is_library, self.report)
                )
            yield


def _describe_failure(failure: ScriptFailed) -> Result:
    cause = failure.__cause__
    log = ""
    if cause is not None:
        lines = traceback.format_exception(type(cause), cause, cause.__traceback__)
        log = "".join(lines)[-MAX_LOG_CHARACTERS:]
    return {"kind": failure.kind, "text": str(failure), "log": log, **failure.facts}


def describe(captured: CapturedTrainer, absent: AbsentParts) -> Result:
    arguments = captured.arguments
    if isinstance(arguments.get("args"), absent_packages.Anything):
        raise ScriptFailed("absent_config", captured.trainer_class.__name__)
    configuration = _without_placeholders(_configuration(captured), absent)
    if arguments.get("model") is None:
        raise ScriptFailed("no_model", captured.trainer_class.__name__)
    settings = configuration.settings
    json_settings = _json_values(settings)
    callback_names = dataset_sizes.listed(arguments.get("callbacks"))
    callbacks = [*callback_names, *captured.callbacks]
    rewards = dataset_sizes.listed(arguments.get("reward_funcs"))
    optimizers = arguments.get("optimizers") or ()
    return {
        "method": captured.method,
        "trainer": captured.trainer_class.__name__,
        "is_own": captured.is_own,
        "own_rows": arguments.get("data_collator") is not None,
        "model": _model(arguments, settings, captured.is_own),
        "settings": json_settings,
        "left": sorted(set(settings) - set(json_settings) - SECRETS),
        "raw": _json_values(configuration.raw),
        "changed": configuration.changed,
        "expanded": configuration.expanded,
        "adapter": _adapter(arguments, absent),
        "optimizers": any(optimizer is not None for optimizer in optimizers),
        "rewards": [_reward_name(reward) for reward in rewards],
        "callbacks": [_class_name(callback) for callback in callbacks],
        "special": [name for name in SPECIAL if arguments.get(name)],
        **_data(captured, absent),
        "trainer_place": _place(captured.place),
        "train_place": _place(captured.train_place),
        "config_place": _place(configuration.place),
        "ended_by": captured.ended_by,
        "modules": _own_modules(),
        "unsloth": _json_values(absent_unsloth.stated),
    }


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


def _without_placeholders(configuration: _Configuration, absent: AbsentParts) -> _Configuration:
    """Return the configuration without values that come from a part which is not here."""
    cleaned = []
    for values in (configuration.settings, configuration.raw):
        without_placeholders: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(value, absent_packages.Anything):
                without_placeholders[name] = value
            elif name in SIZES_OF_A_STEP:
                absent.report("setting", name)
        cleaned.append(without_placeholders)
    settings, raw = cleaned
    return configuration._replace(settings=settings, raw=raw)


def _place(call: CapturedCall | None) -> Result | None:
    return None if call is None else asdict(call)


# Model and adapter.


def _model(
    arguments: Settings,
    settings: Settings,
    is_own: bool,
) -> Result:
    model = arguments["model"]
    quantisation = arguments.get("quantization_config")
    if isinstance(model, str):
        options = dict(settings.get("model_init_kwargs") or {})
        quantisation = quantisation or options.get("quantization_config")
        # TRL loads a model in float32, transformers as its checkpoint has it.
        dtype = settings.get("dtype", "auto" if is_own else None)
        for name in ("torch_dtype", "dtype"):
            dtype = options.get(name, dtype)
        return {
            "name": model,
            "given": False,
            "config": None,
            "dtype": _dtype(dtype),
            "attn_implementation": _json_or_none(options.get("attn_implementation")),
            "load_in_4bit": _flag(quantisation, "load_in_4bit"),
            "load_in_8bit": _flag(quantisation, "load_in_8bit"),
        }
    base = model.get_base_model() if hasattr(model, "peft_config") else model
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


def _adapter(arguments: Settings, absent: AbsentParts) -> Result | None:
    adapter = arguments.get("peft_config")
    if adapter is None and hasattr(arguments["model"], "peft_config"):
        configs = arguments["model"].peft_config.values()
        adapter = next(iter(configs))
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


def _json_values(values: Settings) -> Result:
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
