"""Construction of TRL's trainers from a trace's settings, around a model on meta or a real one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import synthetic
from ..stand_in.model import build as build_model
from ..tracing import Untraceable, fake_models, fsdp2, ledger, patching, quantised
from . import base_model, grpo_probe, image_inputs, methods, seams, training_arguments
from .traced_method import TracedMethod
from .traced_trainer import TracedLengths, TracePlan, trace_plan, trace_watcher, traced

# Size of the tokenizer's vocabulary. No id is read, so it need not cover the model's.
TOKENIZER_VOCABULARY = 512
# Settings that need a device or a launcher. Sharding has its own field in the specification.
DROPPED = frozenset({"tf32", "deepspeed", "fsdp", "fsdp_config", "use_cpu", "torch_compile", "sharding"})
# Settings with their own field in the specification, too.
LENGTHS = frozenset({"max_prompt_length", "max_completion_length", "max_length", "max_new_tokens"})


def build(spec: Mapping[str, Any], annotator: ledger.NullAnnotator, scratch: Path, *, device: str) -> Any:
    """Construct the trainer as a script does, around a model on `device`."""
    import transformers
    import trl

    grpo_probe.be_quiet()
    # 1. Configuration.
    method = traced_method(spec)
    config_class, trainer_class = methods.method_of(spec).run.classes()
    wanted = {name: value for name, value in spec["settings"].items() if name not in DROPPED | LENGTHS}
    if wanted.get("use_vllm"):
        wanted["vllm_mode"] = "colocate"  # the place of the engine does not affect the training step
    settings, model_settings = training_arguments.split(wanted, config_class, trl.ModelConfig)
    if spec["settings"].get("torch_compile"):
        annotator.note("torch_compile: traced without; fused kernels keep less and are faster, which a probe measures")
    lengths = TracedLengths(**spec["lengths"])
    plan = _plan(config_class, settings, spec, lengths, scratch)
    arguments = _config(config_class, settings, spec, lengths, scratch, max_steps=plan.optimizer_steps)
    if (spec.get("sharding") or {}).get("kind") == "zero3":
        # TRL reads it: adapters keep the model's dtype, and checkpointing is reentrant beside them.
        arguments.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    model_arguments = trl.ModelConfig(**training_arguments.model_arguments(model_settings, spec, trl.ModelConfig))
    # 2. Models.
    attention = method.attention or model_arguments.attn_implementation
    model = model_of(spec, attention=attention, device=device)
    adapter = trl.get_peft_config(model_arguments)
    special = method.arguments(spec, settings, lambda: None if adapter else model_of(spec, attention, device))
    trainer_class = method.trainer_class(trainer_class, annotator, lengths)
    # 3. The trainer.
    images = spec.get("images")
    processing = _processing(scratch, model, images)
    casting = "autocast" if fsdp2.autocasts(spec) else "wrapper" if fsdp2.wanted(spec) else "engine"

    def another() -> Any:
        made = model_of(spec, attention, device)
        return made if images is None else image_inputs.with_ids(made, processing.tokenizer)

    with _without_disk_and_engine(methods.method_of(spec).run.module, another):
        trainer = traced(method, trainer_class, annotator, plan, lengths, casting=casting, tokenizes=images is not None)(
            **{
                "model": model,
                "args": arguments,
                "train_dataset": _rows(spec, arguments, plan, lengths, processing),
                "processing_class": processing,
                "peft_config": adapter,
                "callbacks": [trace_watcher(transformers.TrainerCallback, annotator)],
                **special,
            }
        )
    trainer.remove_callback(transformers.PrinterCallback)
    _check_router_loss(trainer, model)
    method.prepare(trainer, arguments)
    return trainer


def _check_router_loss(trainer: Any, model: Any) -> None:
    """Refuse what fails in TRL's fused head: its loss of the routers reads a field that some configs lack."""
    text, utils = model.config.get_text_config(), importlib.import_module(seams.UTILS)
    fused = hasattr(utils, "add_fused_lm_head")
    if fused and getattr(trainer, "aux_loss_enabled", False) and not hasattr(text, "num_experts"):
        raise Untraceable(
            f"TRL's load-balancing loss reads num_experts, which the config of {text.model_type} lacks: the training step "
            "fails with this release. Set router_aux_loss_coef to 0.0"
        )


def traced_method(spec: Mapping[str, Any]) -> TracedMethod:
    """Return the method's differences from the others."""
    method, known = spec["method"], {name: found.traced for name, found in methods.METHODS.items() if found.traced is not None}
    if method not in known:
        raise Untraceable(f"no trainer of TRL is called for by the method {method!r}; there are {', '.join(known)}")
    return known[method]


def model_of(spec: Mapping[str, Any], attention: str | None, device: str) -> Any:
    model = build_model(spec, attention, device=device, scores=traced_method(spec).scores)
    if device == "meta":
        quantised.quantise(model, spec)
        fake_models.join_pieces(model)
    return model


def _plan(
    config_class: Any, settings: Mapping[str, Any], spec: Mapping[str, Any], lengths: TracedLengths, scratch: Path
) -> TracePlan:
    """Plan from the framework's own completed settings."""
    config = _config(config_class, settings, spec, lengths, scratch, max_steps=1)
    steps = getattr(config, "steps_per_generation", None)
    return trace_plan(
        accumulation=config.gradient_accumulation_steps,
        generate_every=None if steps is None else steps * getattr(config, "num_iterations", 1),
        steps=int(spec.get("steps") or 2),
        most=spec.get("micro_steps"),
    )


def _config(
    config_class: Any, settings: Mapping[str, Any], spec: Mapping[str, Any], lengths: TracedLengths, scratch: Path, *,
    max_steps: int,
) -> Any:  # fmt: skip
    # 1. Arguments.
    known = training_arguments.known_fields(config_class)
    forced = training_arguments.ForcedLengths(prompt=lengths.prompt, completion=lengths.completion, pad_prompts=True)
    arguments = training_arguments.training_arguments(
        config_class, settings, lengths=forced, device="cpu", max_steps=max_steps, seed=42, folder=scratch / "output"
    )
    if "max_completion_length" in known:
        arguments["max_completion_length"] = lengths.completion
    if "max_new_tokens" in known:
        arguments |= {"max_new_tokens": lengths.completion, "max_length": lengths.prompt + lengths.completion}
    elif "max_length" in known:
        # Rows have their length already; only packing needs it.
        arguments["max_length"] = lengths.prompt + lengths.completion if settings.get("packing") else None
    if "weight_decay" in settings:
        arguments["weight_decay"] = settings["weight_decay"]
    # 2. The configuration of one of `ranks` ranks: a generation batch has all ranks' rows.
    ranks = int((spec.get("sharding") or {}).get("ranks") or 1)

    class Config(config_class):  # type: ignore[misc]
        completed = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.completed = True

        @property
        def world_size(self) -> int:
            return super().world_size if self.completed else ranks

    Config.__name__ = config_class.__name__
    return Config(**arguments)


def _rows(spec: Mapping[str, Any], arguments: Any, plan: TracePlan, lengths: TracedLengths, processing: Any) -> Any:
    from datasets import Dataset

    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * plan.optimizer_steps
    method, images = traced_method(spec), spec.get("images")
    if images is None:
        return Dataset.from_dict(method.columns(arguments, rows, lengths))
    # Rows that the trainer processes itself: texts and images.
    found = method.image_column(lengths)
    if found is None:
        raise Untraceable(f"images: rows of {spec['method']} have none. Leave --image-size out, or use sft, grpo or rloo")
    rows = max(rows, getattr(arguments, "generation_batch_size", 0))
    return image_inputs.dataset(processing, images, *found, rows, generates=method.generates)


def _processing(scratch: Path, model: Any, images: Mapping[str, Any] | None) -> Any:
    """Return a synthetic tokenizer, or the model's processor with one if rows have images."""
    folder = scratch / "tokenizer"
    vision: dict[str, Any] = {} if images is None else {"vision_config": {}}
    synthetic.write_model_folder(folder, {"vocab_size": TOKENIZER_VOCABULARY, "model_type": "qwen2", **vision})
    tokenizer = base_model.tokenizer(folder, trust_remote_code=False)
    tokenizer.batch_decode = lambda rows, **_: [""] * len(rows)  # decoding takes time, and its result is not used
    if images is None:
        return tokenizer
    return image_inputs.processor_of(tokenizer, image_inputs.with_ids(model, tokenizer).config, images)


@contextlib.contextmanager
def _without_disk_and_engine(trainer_module: str, make: Callable[[], Any]) -> Iterator[None]:
    """Replace reads of reference models from disk, and the engine: a trace has neither."""
    module: Any = importlib.import_module(trainer_module)
    replacements: dict[str, Any] = {
        seams.REFERENCE_LOADER: lambda *_, **__: make(),
        "VLLMGeneration": _NoEngine,
        "hash_module": lambda *_: "",  # of weights that do not exist
        "get_peak_flops_per_device": lambda *_: None,  # asks the GPU for its name
        "get_act_offloading_ctx_manager": fake_models.offloaded_activations,
    }
    with contextlib.ExitStack() as stack:
        for name in replacements.keys() & vars(module).keys():
            stack.enter_context(patching.swapped(vars(module), name, replacements[name]))
        yield


class _NoEngine:
    """Engine that is never used, because completions are synthetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def sync_weights(self) -> None: ...
