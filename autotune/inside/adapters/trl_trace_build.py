"""TRL's trainers constructed from a specification's settings, around a model that holds nothing or around a real one."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import made_up
from ..tracing import Untraceable, driver, fake, fsdp, quantised, swap
from . import trl_grpo, trl_methods, trl_model, trl_settings, trl_trace_online
from .trl_trace_trainer import Course, Lengths, course, followed, watcher

IN_GROUPS = ("grpo", "rloo")
"""Methods that compare the completions of a group."""

ONLINE = "online-dpo"

SMALL_VOCABULARY = 512
"""Of the tokenizer: no id is ever read, so it need not cover the model's."""

DROPPED = frozenset({"tf32", "deepspeed", "fsdp", "fsdp_config", "use_cpu", "torch_compile", "sharding"})
"""Settings that would look for a device or a launcher. Sharding is asked for by itself."""

LENGTHS = frozenset({"max_prompt_length", "max_completion_length", "max_length", "max_new_tokens"})
"""Asked for by themselves as well."""


def build(spec: Mapping[str, Any], watch: driver.Unwatched, scratch: Path, *, device: str) -> Any:
    """The trainer, constructed as a script would: around a model on `device`."""
    import transformers
    import trl

    _be_quiet()
    config_class, trainer_class = _classes(spec["method"])
    wanted = {name: value for name, value in spec["settings"].items() if name not in DROPPED | LENGTHS}
    if wanted.get("use_vllm"):
        wanted["vllm_mode"] = "colocate"  # where the engine is makes no difference to the training step
    settings, model_settings = trl_settings.split(wanted, config_class, trl.ModelConfig)
    lengths = Lengths(**spec["lengths"])
    plan = _course(config_class, settings, spec, lengths, scratch)
    arguments = _config(config_class, settings, spec, lengths, scratch, max_steps=plan.optimizer_steps)
    model_arguments = trl.ModelConfig(**trl_settings.model_arguments(model_settings, spec, trl.ModelConfig))
    model = model_of(spec, attention=model_arguments.attn_implementation, device=device)
    special: dict[str, Any] = {}
    adapter = trl.get_peft_config(model_arguments)
    if spec["method"] in (*IN_GROUPS, ONLINE):
        special["reward_funcs"] = [_reward]
    if spec["method"] == ONLINE:
        trainer_class = trl_trace_online.generating_nothing(trainer_class, watch, lengths)
        special["ref_model"] = None if adapter else model_of(spec, model_arguments.attn_implementation, device)
    with _made_here(spec["method"], lambda: model_of(spec, model_arguments.attn_implementation, device)):
        trainer = followed(trainer_class, watch, plan, lengths, _casting(spec))(
            model=model,
            args=arguments,
            train_dataset=_rows(spec["method"], arguments, plan, lengths),
            processing_class=_tokenizer(scratch),
            peft_config=adapter,
            callbacks=[watcher(transformers.TrainerCallback, watch)],
            **special,
        )
    trainer.remove_callback(transformers.PrinterCallback)
    if spec["method"] in IN_GROUPS:
        rows = arguments.per_device_train_batch_size * arguments.steps_per_generation
        trainer.num_generations = math.gcd(rows, arguments.num_generations)  # of a group, what lies on this rank
    return trainer


def _classes(method: str) -> tuple[Any, Any]:
    """The configuration's and the trainer's, from the trainer's own module."""
    found = trl_methods.METHODS.get(method)
    if found is None:
        known = ", ".join(trl_methods.METHODS)
        raise Untraceable(f"no trainer of TRL is called for by the method {method!r}; there are {known}")
    config_name, trainer_name = found.run.names
    module = importlib.import_module(found.module)
    return getattr(module, config_name), getattr(module, trainer_name)


def _casting(spec: Mapping[str, Any]) -> str:
    """Who brings numbers to the precision that is asked for."""
    if fsdp.autocasts(spec):
        return "autocast"
    return "wrapper" if fsdp.wanted(spec) else "engine"


def model_of(spec: Mapping[str, Any], attention: str | None, device: str) -> Any:
    import torch

    asked, trust = spec["model"], bool(spec.get("trust_remote_code"))
    folder = asked["folder"] if trust else None
    config = fake.config_of(dict(asked), folder, trust_remote_code=trust)
    model = fake.build(config, getattr(torch, asked["dtype"]), attention, device=device, trust_remote_code=trust)
    if device == "meta":
        quantised.quantise(model, spec)
    model.config._name_or_path = model.name_or_path = asked["name"]
    return model


def _course(config_class: Any, settings: Mapping[str, Any], spec: Mapping[str, Any], lengths: Lengths, scratch: Path) -> Course:
    """Of the framework's own settings, completed by itself."""
    config = _config(config_class, settings, spec, lengths, scratch, max_steps=1)
    every = getattr(config, "steps_per_generation", None)
    return course(
        accumulation=config.gradient_accumulation_steps,
        generate_every=None if every is None else every * getattr(config, "num_iterations", 1),
        steps=int(spec.get("steps") or 2),
        most=spec.get("micro_steps"),
    )


def _config(
    config_class: Any, settings: Mapping[str, Any], spec: Mapping[str, Any], lengths: Lengths, scratch: Path, *, max_steps: int
) -> Any:
    known = trl_settings.known_fields(config_class)
    arguments = trl_settings.training_arguments(
        settings,
        lengths=trl_settings.Lengths(prompt=lengths.prompt, completion=lengths.completion, pad_prompts=True),
        device="cpu",
        max_steps=max_steps,
        seed=42,
        folder=scratch / "output",
        known=known,
    )
    if "max_completion_length" in known:
        arguments["max_completion_length"] = lengths.completion
    if "max_new_tokens" in known:
        arguments |= {"max_new_tokens": lengths.completion, "max_length": lengths.prompt + lengths.completion}
    elif "max_length" in known:
        # Rows come at their length already; only packing must be told how long its rows are.
        arguments["max_length"] = lengths.prompt + lengths.completion if settings.get("packing") else None
    if "weight_decay" in settings:
        arguments["weight_decay"] = settings["weight_decay"]
    return _as_one_of(config_class, int((spec.get("sharding") or {}).get("ranks") or 1))(**arguments)


def _as_one_of(config_class: Any, ranks: int) -> Any:
    """The settings as each of so many ranks has them: a generation batch is made of all ranks' rows."""

    class Config(config_class):  # type: ignore[misc]
        whole = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.whole = True

        @property
        def world_size(self) -> int:
            return super().world_size if self.whole else ranks

    Config.__name__ = config_class.__name__
    return Config


def _rows(method: str, arguments: Any, plan: Course, lengths: Lengths) -> Any:
    from datasets import Dataset

    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * plan.optimizer_steps
    if method in IN_GROUPS:
        return Dataset.from_dict({"prompt": ["a"] * max(rows, arguments.generation_batch_size)})
    if method == ONLINE:
        return Dataset.from_dict({"prompt": ["a"] * rows})
    if method == "sft":
        whole = Lengths(prompt=lengths.prompt + lengths.completion, completion=1, padded=lengths.padded)
        return Dataset.from_dict({"input_ids": whole.prompts(rows), "labels": whole.prompts(rows)})
    prompts, completions = lengths.prompts(rows), lengths.completions(rows)
    return Dataset.from_dict({"prompt_ids": prompts, "chosen_ids": completions, "rejected_ids": completions})


def _reward(completions: Any, **_: Any) -> list[float]:
    return [float(index % 2) for index, _ in enumerate(completions)]


def _tokenizer(scratch: Path) -> Any:
    folder = scratch / "tokenizer"
    made_up.write_model_folder(folder, {"vocab_size": SMALL_VOCABULARY, "model_type": "qwen2"})
    tokenizer = trl_model.tokenizer(folder, trust_remote_code=False)
    tokenizer.batch_decode = lambda rows, **_: [""] * len(rows)  # nobody reads it, and spelling out every token takes its time
    return tokenizer


@contextlib.contextmanager
def _made_here(method: str, make: Callable[[], Any]) -> Iterator[None]:
    """Reference models are read from the model's folder, and engines start: here there are no weights and no engine."""
    module: Any = importlib.import_module(trl_methods.METHODS[method].module)
    stand_ins: dict[str, Any] = {"create_model_from_path": lambda *_, **__: make(), "VLLMGeneration": _NoEngine}
    stand_ins["hash_module"] = lambda *_: ""  # of weights that are not there
    with contextlib.ExitStack() as stack:
        for name in stand_ins.keys() & vars(module).keys():
            stack.enter_context(swap.swapped(vars(module), name, stand_ins[name]))
        yield


class _NoEngine:
    """An engine that is never asked: completions are made up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def sync_weights(self) -> None: ...


def _be_quiet() -> None:
    trl_grpo._be_quiet()
