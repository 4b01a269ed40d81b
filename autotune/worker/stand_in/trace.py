"""Adapter that traces a plain Hugging Face step of any causal language model.

It replaces frameworks whose own step cannot be traced. `worker/tracing` describes the
specification. Further settings: `loss` (`causal_lm`, or one of `losses`) and its `loss_options`;
`score` (`rows` and `length` of a pass without gradients before each step, those of the step by
default); `use_cache`; `patches`, functions as `module:name` that are called with the model on meta
and the specification, for frameworks that replace parts of a model.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .. import releases
from ..protocol import Request, Result
from ..tracing import Spec

STEP_PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
IMPORTS = (
    "torch._subclasses.fake_tensor",
    "torch.utils.flop_counter",
    "accelerate.utils",
    "peft",
    "transformers.modeling_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.models.auto.modeling_auto",
)

Steps = Callable[[Callable[[], None]], Any]
"""Runs the steps, with a function to call after each backward pass; returns the optimizer's groups.
"""
BuiltOnMeta = Callable[..., AbstractContextManager[Any]]
"""See `traced_on_fake_tensors`."""


def warm(load: Request) -> dict[str, str]:
    """Import everything that a trace needs."""
    from ..tracing import kernels

    kernels.install_triton_stub()  # before any library checks for Triton
    for name in IMPORTS:
        importlib.import_module(name)
    for name in ("cuda_choices", "fake_models", "parameter_uses", "annotators"):
        importlib.import_module(f"..tracing.{name}", __package__)
    return releases.versions(STEP_PACKAGES)


def supported() -> tuple[str, str]:
    """Return the oldest and the newest tested release of transformers."""
    return "4.44", "5.17"


def load(request: Request, recorder: Any) -> object:
    """Return a placeholder: traces share nothing."""
    return object()


def measure(
    loaded: object,
    request: Request,
    recorder: Any,
) -> Result:
    return trace(request)


def release(loaded: object) -> None:
    gc.collect()
    # Modules and cached results stay: the collector, which runs within each trace, skips them from
    # now on.
    gc.freeze()


def trace(spec: Spec) -> Result:
    """Trace the step of one specification. Return `autotune.core.trace.Trace` as JSON types."""
    warm(spec)
    document, _ = traced_on_fake_tensors(spec, _built_on_meta, basis="generic")
    return {**document, "versions": releases.versions(STEP_PACKAGES)}


@contextmanager
def _built_on_meta(
    spec: Spec, annotator: Any
) -> Iterator[tuple[Any, list[Any], Callable[..., Any]]]:
    """Yield the model twice, alone and as the list of all models, and the function that runs its
    steps.
    """
    from .step import StandInStep, prepared

    model = prepared(spec)

    def steps(after_backward: Callable[[], None]) -> Any:
        step = StandInStep(model, spec, annotator, after_backward)
        step.run()
        return step.optimizer.param_groups

    yield model, [model], steps


def traced_on_fake_tensors(
    spec: Spec,
    built_on_meta: BuiltOnMeta,
    *,
    basis: str,
    tile: int | None = None,
) -> tuple[Result, Any]:
    """Return the trace, without versions, and what was built.

    `built_on_meta` gets the specification and the annotator. It opens what the steps need, and
    yields three things: anything, the models on meta, the trained one first, and a function that
    runs the steps. `tile`: see `StepAnnotator`.
    """
    from ..model_memory import layers_of
    from ..tracing import experts

    began = time.perf_counter()
    built, models, annotator, usage = _run(spec, built_on_meta, tile)

    def annotator_of(worst: Spec) -> Any:
        _, _, worst_annotator, _ = _run(worst, built_on_meta, tile)
        return worst_annotator

    extra_bytes = experts.extra_bytes(models[0], annotator, spec, annotator_of)
    document = {
        "schema": 1,
        "basis": basis,
        "device": spec["device"],
        "layers": len(layers_of(models[0])),
        **annotator.ledger.as_json(),
        "work": annotator.ledger.work(),
        "inventory": annotator.inventory,
        "notes": annotator.notes,
        "high_extra_bytes": extra_bytes,
        "usage": usage,
        "seconds": round(time.perf_counter() - began, 3),
    }
    return document, built


def _run(
    spec: Spec,
    built_on_meta: BuiltOnMeta,
    tile: int | None,
) -> tuple[Any, list[Any], Any, Any]:
    """Return what was built, its models, the annotator, and the parameters' uses, or None if
    nothing reads them.
    """
    from ..tracing import annotators, cuda_choices, fake_models, fsdp2

    annotator = annotators.StepAnnotator(spec, tile=tile)
    with (
        cuda_choices.as_on_cuda(spec),
        fsdp2.process_group(spec),
        fake_models.real_tensor_paths(),
        built_on_meta(spec, annotator) as (built, models, steps),
    ):
        usage = _run_on_fake_tensors(spec, annotator, models, steps)
    return built, models, annotator, usage


def _run_on_fake_tensors(
    spec: Spec,
    annotator: Any,
    models: Sequence[Any],
    steps: Steps,
) -> Any:
    """Run the steps. Return the parameters' uses."""
    from ..tracing import experts, fake_models, fsdp2, parameter_uses, sharding_kind

    tracker = annotator.tracker
    kind = sharding_kind(spec)
    trained, *other_models = models
    is_zero3 = kind == "zero3"
    with fake_models.fake_mode_with(tracker, spec["device"]):
        # 1. From meta to fake tensors, then sharded: a reference when the trainer is made.
        for model in models:
            fake_models.materialise(model)
        annotator.mark_model(trained)
        for model in reversed(models):
            fsdp2.shard(model, spec, tracker, scores=model is not trained)
        for model in models:
            annotator.mark_layers(model)

        # 2. Uses of parameters. Under ZeRO-3 each model is partitioned by an engine of its own.
        log = parameter_uses.ParameterUses(annotator.ledger, own_nodes=is_zero3)
        if kind in parameter_uses.SHARDING_KINDS:
            log.watch(trained, tracker)
        if is_zero3:
            for model in other_models:
                log.watch(model, tracker, trains=False)

        # 3. The steps.
        with (
            fake_models.errors_as_untraceable(),
            experts.routed(trained, spec),
            parameter_uses.zero3_linear(spec),
            parameter_uses.frozen_units_hooked(trained, spec) as after_backward,
        ):
            groups = steps(after_backward)
        log.note_groups(groups)
        annotator.ledger.close()
    return log.as_json() if kind in parameter_uses.SHARDING_KINDS else None
