"""Traces a plain Hugging Face step: any causal language model, full or with adapters, and the Trainer's own order of things.

Stands in where a framework's own step cannot be followed. `inside/tracing` has the specification; beside what is said there,
settings may hold `loss` (`causal_lm`, or one of `generic_losses`) and its `loss_options`, `score` (`rows` and `length` of a pass
without gradients before each step, the step's own where they are not said), `use_cache`, and `patches`: functions as
`module:name`, each called with the model on meta and the specification, for frameworks that replace parts of a model.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from typing import Any

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
    """Import what any trace needs."""
    from ..tracing import kernels

    kernels.stand_in_for_triton()  # before anything asks whether Triton is there
    for name in IMPORTS:
        importlib.import_module(name)
    for name in ("cuda_choices", "driver", "fake", "fsdp", "ledger", "tracker", "uses"):
        importlib.import_module(f"..tracing.{name}", __package__)
    return versions()


def supported() -> tuple[str, str]:
    """Of transformers."""
    return "4.44", "5.17"


def load(request: Mapping[str, Any], stage: Any) -> object:
    """Nothing is kept between traces."""
    return object()


def measure(loaded: object, request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    """One trace."""
    return trace(request)


def release(loaded: object) -> None:
    gc.collect()
    gc.freeze()  # modules and what operations gave stay: the collector, which runs within every trace, need not walk them again


def trace(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Follow one specification's step. As `autotune.trace.Trace`, in JSON's kinds."""
    warm(spec)
    from ..tracing import cuda_choices, driver, fake, frozen_units, fsdp, uses, zero_linear
    from ..tracing.ledger import Ledger
    from ..tracing.tracker import Tracker

    began = time.perf_counter()
    ledger = Ledger()
    tracker = Tracker(ledger, workspaces=cuda_choices.workspaces_for(spec))
    follower = driver.Follower(ledger, tracker)
    with cuda_choices.as_on_cuda(spec), fsdp.process_group(spec), fake.as_if_real():
        model = prepared(spec)
        with fake.without_memory(tracker, spec["device"]):
            model = _in_place(model, follower, spec)
            log = uses.of(spec, ledger)
            if uses.wanted(spec):
                log.watch(model, tracker)
            with (
                fake.explained(),
                zero_linear.as_under_zero3(spec),
                frozen_units.followed(model, spec) as done_with_backward,
            ):
                step(model, spec, follower, done_with_backward)
            follower.stop()
    return {
        "schema": 1,
        "basis": "generic",
        "versions": versions(),
        "device": spec["device"],
        "layers": len(driver.layers_of(model)),
        **ledger.as_json(),
        "work": driver.work(tracker),
        "inventory": follower.inventory,
        "notes": follower.notes,
        "high_extra_bytes": follower.high_extra_bytes,
        "usage": log.as_json() if uses.wanted(spec) else None,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _in_place(model: Any, follower: Any, spec: Mapping[str, Any]) -> Any:
    """From meta to fake; what sharding changes about it before the first step."""
    from ..tracing import fake, fsdp

    fake.swap_in(model, fake.empty_on("cpu"))
    follower.see_model(model)
    model = fsdp.shard(model, spec, follower.tracker)
    follower.mark_layers(model)
    return model


def prepared(spec: Mapping[str, Any]) -> Any:
    """The model on meta as the trainer gets it: adapted, checkpointed, patched."""
    from ..tracing import quantised
    from . import generic_model, generic_step

    settings = spec["settings"]
    adapted = bool(spec.get("adapter"))
    base = generic_model.build(spec)
    quantised.quantise(base, spec)
    model = generic_model.adapt(base, spec.get("adapter"), widened=settings.get("autocast_adapter_dtype", True))
    generic_step.checkpoint(model, settings, adapted=adapted)
    for patch in settings.get("patches", ()):
        module, _, name = patch.partition(":")
        changed = getattr(importlib.import_module(module), name)(model, spec)
        model = model if changed is None else changed
    return model.train()


def step(model: Any, spec: Mapping[str, Any], watch: Any, after_backward: Callable[[], None] = lambda: None) -> None:
    from ..tracing import fsdp
    from . import generic_step

    settings = spec["settings"]
    micro_steps = spec.get("micro_steps") or min(2, int(settings.get("gradient_accumulation_steps") or 1))
    taken = generic_step.Step(model, settings, watch=watch, device=spec["device"], autocasts=fsdp.autocasts(spec))
    taken.after_backward, taken.completion = after_backward, int(spec["lengths"]["completion"])
    if settings.get("score"):
        taken.scored = batches(spec, settings["score"])
    taken.run(batches(spec), steps=int(spec.get("steps") or 2), micro_steps=micro_steps)


def batches(spec: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> Callable[[], dict[str, Any]]:
    """Rows of the longest length, or `other` rows and length; where they are padded, every second one is a token shorter."""
    import torch

    lengths = spec["lengths"]
    rows, length = int(spec["settings"]["per_device_train_batch_size"]), int(lengths["prompt"]) + int(lengths["completion"])
    if other is not None:
        rows, length = int(other.get("rows") or rows), int(other.get("length") or length)

    def batch() -> dict[str, Any]:
        made = {name: torch.ones((rows, length), dtype=torch.long) for name in ("input_ids", "labels", "attention_mask")}
        if lengths.get("padded") and length > 1:
            made["attention_mask"][1::2, -1] = 0
        return made

    return batch


def versions() -> dict[str, str]:
    """Of the packages whose code is followed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


__all__ = ["Untraceable", "load", "measure", "release", "supported", "trace", "warm"]
