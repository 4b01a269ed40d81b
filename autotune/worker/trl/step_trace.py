"""Adapter that traces a step of TRL's own trainers on tensors without memory.

`worker/tracing` describes request and result. The trainer is constructed from the settings around a
model on meta, its parameters become fake tensors, and its own `train` runs; only generation is left
out. `run` does the same on real tensors, for counting allocators.
"""

from __future__ import annotations

import importlib
import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import synthetic
from ..stand_in.trace import load as load
from ..stand_in.trace import release as release
from ..stand_in.trace import traced_on_fake_tensors
from ..tracing import Untraceable
from . import base_model, grpo_probe, hooks, methods, seams, trainer_settings, training_data
from .seams import supported as supported
from .trainer_run import TrainerRun

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths, TracePlan

# Size of the tokenizer's vocabulary. No id is read, so it need not cover the model's.
TOKENIZER_VOCABULARY = 512
# Settings that need a device or a launcher. Sharding has its own field in the specification.
DROPPED = frozenset(
    {"tf32", "deepspeed", "fsdp", "fsdp_config", "use_cpu", "torch_compile", "sharding"}
)
# Settings with their own field in the specification, too.
LENGTHS = frozenset({"max_prompt_length", "max_completion_length", "max_length", "max_new_tokens"})


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that a trace needs."""
    from ..tracing import kernels

    kernels.install_triton_stub()  # before any library checks for Triton
    versions = grpo_probe.warm({**load, "engine": None, "device": "cpu"})
    for method in methods.METHODS.values():
        if not method.module.startswith(
            "trl.experimental"
        ):  # not in all releases: imported on request
            importlib.import_module(method.module)
    for name in ("torch._subclasses.fake_tensor", "torch.utils.flop_counter", "torch.optim"):
        importlib.import_module(name)
    return versions


def measure(loaded: object, request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    return trace(request)


def trace(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Trace the step of one specification. Return `autotune.core.trace.Trace` as JSON types."""
    # Tile of the vocabulary that TRL projects at once; None in releases that project all of it.
    tile = getattr(importlib.import_module(seams.UTILS), "_CHUNKED_LOGPROB_CHUNK_SIZE", None)
    document, trainer = traced_on_fake_tensors(
        spec, _built_on_meta, basis="traced", tile=None if tile is None else int(tile)
    )
    seen = SimpleNamespace(
        longest_prompt=spec["lengths"]["prompt"], longest_completion=spec["lengths"]["completion"]
    )
    if document["usage"] is not None:
        document["usage"]["forgets_order"] = _forgets_order(spec)
    document["versions"] = grpo_probe.installed([*grpo_probe.PACKAGES])
    document["effective"] = {
        **trainer_settings.effective_settings(trainer, seen, None),
        "device": spec["device"],
    }
    return document


@contextmanager
def _built_on_meta(
    spec: Mapping[str, Any], annotator: Any
) -> Iterator[tuple[Any, list[Any], Callable[..., Any]]]:
    """Yield the trainer, its models, and the function that runs its steps."""
    from ..tracing import fake_models, kernels

    with tempfile.TemporaryDirectory() as scratch, traced_method(spec).traced_kernel(spec):
        with fake_models.adapters_on_meta():
            trainer = build(spec, annotator, Path(scratch), device="meta")

        def steps(after_backward: Callable[[], None]) -> Any:
            hooks.wrap(trainer.accelerator, "backward", after=lambda *_, **__: after_backward())
            trainer.train()
            return trainer.optimizer.param_groups

        yield (
            trainer,
            [
                model
                for model in (trainer.model, getattr(trainer, "ref_model", None))
                if model is not None
            ],
            steps,
        )
    for note in kernels.liger_notes(spec):
        annotator.note(note)


def _forgets_order(spec: Mapping[str, Any]) -> bool:
    """Return True if ZeRO-3 records the order of the modules anew after each rollout: the trainer
    generates with all weights gathered, and this TRL says so to DeepSpeed when it puts the hooks
    back.
    """
    settings = spec["settings"]
    if settings.get("use_vllm") or not methods.method_of(spec).generates:
        return False
    if settings.get("ds3_gather_for_generation") is False:  # the hooks stay where they are
        return False
    add_hooks = getattr(importlib.import_module("trl.models.utils"), "add_hooks", None)
    return add_hooks is not None and "_invalidate_trace" in inspect.getsource(add_hooks)


def run(
    spec: Mapping[str, Any],
    annotator: Any = None,
    before: Callable[[Any], None] = lambda trainer: None,
) -> Any:
    """Run the same on real tensors on the CPU. `before` is called between loading and the loop."""
    from ..tracing import annotators

    with tempfile.TemporaryDirectory() as scratch, traced_method(spec).traced_kernel(spec):
        trainer = build(spec, annotator or annotators.NullAnnotator(), Path(scratch), device="cpu")
        before(trainer)
        trainer.train()
    return trainer


def build(spec: Mapping[str, Any], annotator: Any, scratch: Path, *, device: str) -> Any:
    """Construct the trainer as a script does, around a model on `device`."""
    import transformers
    import trl

    from ..tracing import fake_models, fsdp2
    from .traced_trainer import TracedLengths, trace_plan, trace_watcher, traced

    grpo_probe.be_quiet()
    # 1. Configuration.
    method = traced_method(spec)
    config_class, trainer_class = method.classes()
    wanted = {
        name: value for name, value in spec["settings"].items() if name not in DROPPED | LENGTHS
    }
    if wanted.get("use_vllm"):
        wanted["vllm_mode"] = (
            "colocate"  # the place of the engine does not affect the training step
        )
    settings, model_settings = trainer_settings.split(wanted, config_class, trl.ModelConfig)
    if spec["settings"].get("torch_compile"):
        annotator.note(
            "torch_compile: traced without; fused kernels keep less and are faster, which a probe"
            " measures"
        )
    lengths = TracedLengths(**spec["lengths"])
    arguments = _config(config_class, settings, spec, lengths, scratch)
    generation_steps = getattr(arguments, "steps_per_generation", None)
    plan = trace_plan(
        accumulation=arguments.gradient_accumulation_steps,
        generate_every=(
            None
            if generation_steps is None
            else generation_steps * getattr(arguments, "num_iterations", 1)
        ),
        steps=int(spec.get("steps") or 2),
        most=spec.get("micro_steps"),
    )
    arguments.max_steps = plan.optimizer_steps
    if (spec.get("sharding") or {}).get("kind") == "zero3":
        # TRL reads it: adapters keep the model's dtype, and checkpointing is reentrant beside them.
        arguments.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    model_arguments = trl.ModelConfig(
        **trainer_settings.model_arguments(model_settings, spec, trl.ModelConfig)
    )
    # 2. Models.
    attention = method.attention or model_arguments.attn_implementation
    model = model_of(spec, attention, device)
    adapter = trl.get_peft_config(model_arguments)
    special = method.traced_arguments(
        spec, lambda: None if adapter else model_of(spec, attention, device)
    )
    # 3. The trainer.
    images = spec.get("images")
    processing = _processing(scratch, model, images)
    casting = "autocast" if fsdp2.autocasts(spec) else "wrapper" if fsdp2.wanted(spec) else "engine"

    def another(*_: Any, **__: Any) -> Any:
        made = model_of(spec, attention, device)
        return made if images is None else training_data.with_ids(made, processing.tokenizer)

    trainer_class = traced(
        method,
        method.traced_class(trainer_class, lengths),
        annotator,
        plan,
        lengths,
        casting=casting,
        tokenizes=images is not None,
    )
    without_disk_and_engine: dict[str, Any] = {
        seams.REFERENCE_LOADER: another,
        "VLLMGeneration": _NoEngine,
        "hash_module": lambda *_: "",  # of weights that do not exist
        "get_peak_flops_per_device": lambda *_: None,  # asks the GPU for its name
        "get_act_offloading_ctx_manager": fake_models.offloaded_activations,
    }
    with method.replaced(without_disk_and_engine):
        trainer = trainer_class(
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
    if generation_steps is not None:  # this rank's part of a group
        trainer.num_generations = math.gcd(
            arguments.per_device_train_batch_size * generation_steps, arguments.num_generations
        )
    return trainer


def _check_router_loss(trainer: Any, model: Any) -> None:
    """Refuse what fails in TRL's fused head: its loss of the routers reads a field that some
    configs lack.
    """
    text, utils = model.config.get_text_config(), importlib.import_module(seams.UTILS)
    fused = hasattr(utils, "add_fused_lm_head")
    if fused and getattr(trainer, "aux_loss_enabled", False) and not hasattr(text, "num_experts"):
        raise Untraceable(
            f"TRL's load-balancing loss reads num_experts, which the config of {text.model_type}"
            " lacks: the training step fails with this release. Set router_aux_loss_coef to 0.0"
        )


def traced_method(spec: Mapping[str, Any]) -> type[TrainerRun]:
    method, known = (
        spec["method"],
        {name: found for name, found in methods.METHODS.items() if found.traced},
    )
    if method not in known:
        raise Untraceable(
            f"no trainer of TRL is called for by the method {method!r}; there are"
            f" {', '.join(known)}"
        )
    return known[method]


def model_of(spec: Mapping[str, Any], attention: str | None, device: str) -> Any:
    from ..stand_in.step import build_model
    from ..tracing import fake_models, quantised

    model = build_model(spec, attention, device=device, scores=traced_method(spec).scores)
    if device == "meta":
        quantised.quantise(model, spec)
        fake_models.join_pieces(model)
    return model


def _config(
    config_class: Any,
    settings: Mapping[str, Any],
    spec: Mapping[str, Any],
    lengths: TracedLengths,
    scratch: Path,
) -> Any:
    # 1. Arguments.
    known = trainer_settings.known_fields(config_class)
    forced = trainer_settings.ForcedLengths(
        prompt=lengths.prompt, completion=lengths.completion, pad_prompts=True
    )
    arguments = trainer_settings.arguments_of(
        config_class,
        settings,
        lengths=forced,
        device="cpu",
        max_steps=1,
        seed=42,
        folder=scratch / "output",
    )
    if "max_completion_length" in known:
        arguments["max_completion_length"] = lengths.completion
    if "max_new_tokens" in known:
        arguments |= {
            "max_new_tokens": lengths.completion,
            "max_length": lengths.prompt + lengths.completion,
        }
    elif "max_length" in known:
        # Rows have their length already; only packing needs it.
        arguments["max_length"] = (
            lengths.prompt + lengths.completion if settings.get("packing") else None
        )
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


def _rows(
    spec: Mapping[str, Any],
    arguments: Any,
    plan: TracePlan,
    lengths: TracedLengths,
    processing: Any,
) -> Any:
    from datasets import Dataset

    rows = (
        arguments.per_device_train_batch_size
        * arguments.gradient_accumulation_steps
        * plan.optimizer_steps
    )
    method, images = traced_method(spec), spec.get("images")
    if method.generates or images is not None:
        rows = max(rows, getattr(arguments, "generation_batch_size", 0))
    if images is None:
        return Dataset.from_dict(method.traced_columns(arguments, rows, lengths))
    # Rows that the trainer processes itself: texts and images.
    if not method.takes_images:
        raise Untraceable(
            f"images: rows of {spec['method']} have none. Leave --image-size out, or use sft, grpo"
            " or rloo"
        )
    column, tokens = (
        ("prompt", lengths.prompt)
        if method.generates
        else ("messages", lengths.prompt + lengths.completion)
    )
    return training_data.image_rows(
        processing, images, column, tokens, rows, generates=method.generates
    )


def _processing(scratch: Path, model: Any, images: Mapping[str, Any] | None) -> Any:
    """Return a synthetic tokenizer, or the model's processor with one if rows have images."""
    folder = scratch / "tokenizer"
    vision: dict[str, Any] = {} if images is None else {"vision_config": {}}
    synthetic.write_model_folder(
        folder, {"vocab_size": TOKENIZER_VOCABULARY, "model_type": "qwen2", **vision}
    )
    tokenizer = base_model.tokenizer(folder, trust_remote_code=False)
    tokenizer.batch_decode = lambda rows, **_: (
        [""] * len(rows)
    )  # decoding takes time, and its result is not used
    if images is None:
        return tokenizer
    return training_data.processor_of(
        tokenizer, training_data.with_ids(model, tokenizer).config, images
    )


class _NoEngine:
    """Engine that is never used, because completions are synthetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def sync_weights(self) -> None: ...
