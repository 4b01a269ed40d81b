"""Adapter that traces a step of TRL's own trainers on tensors without memory.

`worker/tracing` describes request and result. The trainer is constructed from the settings around a model on meta, its
parameters become fake tensors, and its own `train` runs; only generation is left out. `run` does the same on real tensors,
for counting allocators.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..stand_in.trace import document, run_on_fake_tensors
from ..stand_in.trace import load as load
from ..stand_in.trace import release as release
from . import grpo_probe, hooks, methods, seams, trainer_state
from .seams import supported as supported


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that a trace needs."""
    from ..tracing import kernels

    kernels.install_triton_stub()  # before any library checks for Triton
    versions = grpo_probe.warm({**load, "engine": None, "device": "cpu"})
    for method in methods.METHODS.values():
        if not method.run.module.startswith("trl.experimental"):  # not in all releases: imported on request
            importlib.import_module(method.run.module)
    for name in ("torch._subclasses.fake_tensor", "torch.utils.flop_counter", "torch.optim"):
        importlib.import_module(name)
    return versions


def measure(loaded: object, request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    return trace(request)


def trace(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Trace the step of one specification. Return `autotune.core.trace.Trace` as JSON types."""
    from ..tracing import experts

    began = time.perf_counter()
    trainer, annotator, usage = _trace(spec)
    annotator.high_extra_bytes = experts.extra_bytes(trainer.model, annotator, spec, lambda worst: _trace(worst)[1])
    versions = grpo_probe.installed([*grpo_probe.PACKAGES])
    lengths = spec["lengths"]
    seen = SimpleNamespace(longest_prompt=lengths["prompt"], longest_completion=lengths["completion"])
    effective = {**trainer_state.effective_settings(trainer, seen, None), "device": spec["device"]}
    if usage is not None:
        usage["forgets_order"] = _forgets_order(spec)
    return {**document("traced", trainer.model, spec, annotator, usage, versions, began), "effective": effective}


def _forgets_order(spec: Mapping[str, Any]) -> bool:
    """Return True if ZeRO-3 records the order of the modules anew after each rollout: the trainer
    generates with all weights gathered, and this TRL says so to DeepSpeed when it puts the hooks back."""
    settings, traced = spec["settings"], methods.method_of(spec).traced
    if settings.get("use_vllm") or traced is None or not traced.generates:
        return False
    if settings.get("ds3_gather_for_generation") is False:  # the hooks stay where they are
        return False
    add_hooks = getattr(importlib.import_module("trl.models.utils"), "add_hooks", None)
    return add_hooks is not None and "_invalidate_trace" in inspect.getsource(add_hooks)


def _trace(spec: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the trainer after its steps, its annotator, and the parameters' uses or None."""
    from ..tracing import cuda_choices, fake_models, fsdp2, kernels, ledger
    from . import trace_build

    # Tile of the vocabulary that TRL projects at once; None in releases that project all of it.
    tile = getattr(importlib.import_module(seams.UTILS), "_CHUNKED_LOGPROB_CHUNK_SIZE", None)
    annotator = ledger.StepAnnotator(spec, tile=None if tile is None else int(tile))
    with (
        tempfile.TemporaryDirectory() as scratch,
        cuda_choices.as_on_cuda(spec),
        fsdp2.process_group(spec),
        fake_models.real_tensor_paths(),
        trace_build.traced_method(spec).kernel(spec),
    ):
        with fake_models.adapters_on_meta():
            trainer = trace_build.build(spec, annotator, Path(scratch), device="meta")

        def steps(after_backward: Callable[[], None]) -> Any:
            hooks.wrap(trainer.accelerator, "backward", after=lambda *_, **__: after_backward())
            trainer.train()
            return trainer.optimizer.param_groups

        usage = run_on_fake_tensors(spec, annotator, models_of(trainer), steps)
    for note in kernels.liger_notes(spec):
        annotator.note(note)
    return trainer, annotator, usage


def run(spec: Mapping[str, Any], annotator: Any = None, before: Callable[[Any], None] = lambda trainer: None) -> Any:
    """Run the same on real tensors on the CPU. `before` is called between loading and the loop."""
    from ..tracing import ledger
    from . import trace_build

    with tempfile.TemporaryDirectory() as scratch, trace_build.traced_method(spec).kernel(spec):
        trainer = trace_build.build(spec, annotator or ledger.NullAnnotator(), Path(scratch), device="cpu")
        before(trainer)
        trainer.train()
    return trainer


def models_of(trainer: Any) -> list[Any]:
    """Return the trainer's models with parameters."""
    return [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
