"""Adapter that traces a plain Hugging Face step of any causal language model.

It replaces frameworks whose own step cannot be traced. `worker/tracing` describes the specification. Further settings: `loss`
(`causal_lm`, or one of `losses`) and its `loss_options`; `score` (`rows` and `length` of a pass without gradients before each
step, those of the step by default); `use_cache`; `patches`, functions as `module:name` that are called with the model on meta
and the specification, for frameworks that replace parts of a model.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import releases
from ..tracing import Untraceable

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
IMPORTS = (
    "torch._subclasses.fake_tensor",
    "torch.utils.flop_counter",
    "accelerate.utils",
    "peft",
    "transformers.modeling_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.models.auto.modeling_auto",
)


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that a trace needs."""
    from ..tracing import kernels

    kernels.install_triton_stub()  # before any library checks for Triton
    for name in IMPORTS:
        importlib.import_module(name)
    for name in ("cuda_choices", "fake_models", "parameter_uses", "ledger"):
        importlib.import_module(f"..tracing.{name}", __package__)
    return releases.versions(PACKAGES)


def supported() -> tuple[str, str]:
    """Return the oldest and the newest tested release of transformers."""
    return "4.44", "5.17"


def load(request: Mapping[str, Any], recorder: Any) -> object:
    """Return a placeholder: traces share nothing."""
    return object()


def measure(loaded: object, request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    return trace(request)


def release(loaded: object) -> None:
    gc.collect()
    gc.freeze()  # modules and cached results stay: the collector, which runs within each trace, skips them from now on


def trace(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Trace the step of one specification. Return `autotune.core.trace.Trace` as JSON types."""
    warm(spec)
    from ..tracing import experts

    began = time.perf_counter()
    model, annotator, usage = _trace(spec)
    annotator.high_extra_bytes = experts.extra_bytes(model, annotator, spec, lambda worst: _trace(worst)[1])
    return document("generic", model, spec, annotator, usage, releases.versions(PACKAGES), began)


def _trace(spec: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the model after its steps, its annotator, and the parameters' uses or None."""
    from ..tracing import cuda_choices, fake_models, fsdp2, ledger
    from .step import StandInStep

    annotator = ledger.StepAnnotator(spec)
    with cuda_choices.as_on_cuda(spec), fsdp2.process_group(spec), fake_models.real_tensor_paths():
        model = prepared(spec)

        def steps(after_backward: Callable[[], None]) -> Any:
            run = StandInStep(model, spec, annotator, after_backward)
            run.run()
            return run.optimizer.param_groups

        usage = run_on_fake_tensors(spec, annotator, [model], steps)
    return model, annotator, usage


def run_on_fake_tensors(
    spec: Mapping[str, Any], annotator: Any, models: Sequence[Any], steps: Callable[[Callable[[], None]], Any]
) -> Any:
    """Run steps on models that are on meta, the trained one first. Return the parameters' uses, or None if nothing reads them.

    `steps` gets a function to call after each backward pass, and returns the optimizer's groups."""
    from ..tracing import experts, fake_models, fsdp2, parameter_uses, sharding_kind

    trained, tracker, kind = models[0], annotator.tracker, sharding_kind(spec)
    is_zero3 = kind == "zero3"
    with fake_models.fake_mode_with(tracker, spec["device"]):
        # 1. From meta to fake tensors, then sharded.
        for model in models:
            fake_models.materialise(model)
        annotator.mark_model(trained)
        for model in reversed(models):  # a reference is sharded when the trainer is made
            fsdp2.shard(model, spec, tracker, scores=model is not trained)
        annotator.mark_layers(trained)
        # 2. The steps.
        log = parameter_uses.ParameterUses(annotator.ledger, own_nodes=is_zero3)
        if kind in parameter_uses.KINDS:
            log.watch(trained, tracker)
        for model in models[1:] if is_zero3 else ():  # each is partitioned by an engine of its own
            log.watch(model, tracker, trains=False)
        with (
            fake_models.errors_as_untraceable(),
            experts.routed(trained, spec),
            parameter_uses.zero3_linear(spec),
            parameter_uses.frozen_units_hooked(trained, spec) as after_backward,
        ):
            groups = steps(after_backward)
        log.note_groups(groups)
        annotator.ledger.close()
    return log.as_json() if kind in parameter_uses.KINDS else None


def document(
    basis: str, model: Any, spec: Mapping[str, Any], annotator: Any, usage: Any, versions: Mapping[str, str], began: float
) -> dict[str, Any]:
    """Return `autotune.core.trace.Trace` as JSON types."""
    from ..model_memory import layers_of

    return {
        "schema": 1,
        "basis": basis,
        "versions": versions,
        "device": spec["device"],
        "layers": len(layers_of(model)),
        **annotator.ledger.as_json(),
        "work": annotator.ledger.work(),
        "inventory": annotator.inventory,
        "notes": annotator.notes,
        "high_extra_bytes": annotator.high_extra_bytes,
        "usage": usage,
        "seconds": round(time.perf_counter() - began, 3),
    }


def prepared(spec: Mapping[str, Any]) -> Any:
    """Build the model on meta in the trainer's form: quantised, adapted, checkpointed, patched."""
    from ..tracing import quantised
    from . import model as generic_model
    from . import step as generic_step

    settings, named = spec["settings"], spec["model"]
    if (named.get("config") or {}).get("auto_map") and not spec.get("trust_remote_code"):
        raise Untraceable(f"{named['name']} has code of its own, which is not trusted. Trace it with --trust-remote-code.")
    base = generic_model.build(spec, named.get("attn_implementation"))
    quantised.quantise(base, spec)
    model = generic_model.adapt(base, spec.get("adapter"), widened=settings.get("autocast_adapter_dtype", True))
    generic_step.checkpoint(model, settings, adapted=bool(spec.get("adapter")))
    for patch in settings.get("patches", ()):
        module, _, name = patch.partition(":")
        changed = getattr(importlib.import_module(module), name)(model, spec)
        model = model if changed is None else changed
    return model.train()
