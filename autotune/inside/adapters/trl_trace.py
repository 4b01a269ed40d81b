"""Follows a step of TRL's own trainers (GRPO, RLOO, SFT, DPO, online DPO) on tensors without memory.

What is asked for and answered: `inside/tracing`'s docstring. The trainer is really constructed from the settings around a model
on meta, its parameters become fake ones, and its own `train` runs; only what generates is left out. `run` drives the same on
real tensors, for whoever wants to count what that takes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import trl_effective, trl_grpo
from .trl_versions import supported as supported


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import what any trace needs."""
    from ..tracing import kernels
    from . import trl_methods

    kernels.stand_in_for_triton()  # before anything asks whether Triton is there
    versions = trl_grpo.warm({**load, "engine": None, "device": "cpu"})
    for method in trl_methods.METHODS.values():
        if not method.module.startswith("trl.experimental"):  # where there is one: imported when it is asked for
            importlib.import_module(method.module)
    for name in ("torch._subclasses.fake_tensor", "torch.utils.flop_counter", "torch.optim"):
        importlib.import_module(name)
    return versions


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
    from ..tracing import driver

    began = time.perf_counter()
    trainer, follower, usage = _follow(spec)
    follower.high_extra_bytes = _extra_where_data_decide(trainer, follower, spec)
    return {
        "schema": 1,
        "basis": "traced",
        "versions": trl_grpo.installed([*trl_grpo.PACKAGES]),
        "device": spec["device"],
        "layers": len(driver.layers_of(trainer.model)),
        **follower.ledger.as_json(),
        "work": driver.work(follower.tracker),
        "inventory": follower.inventory,
        "notes": follower.notes,
        "high_extra_bytes": follower.high_extra_bytes,
        "effective": _effective(trainer, spec),
        "usage": usage,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _follow(spec: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The trainer after its steps, who followed it, and when each parameter was used (where sharding asks for that)."""
    from ..tracing import cuda_choices, driver, experts, fake, frozen_units, fsdp, liger, uses, zero_linear
    from ..tracing.ledger import Ledger
    from ..tracing.tracker import Tracker
    from . import trl_trace_build

    ledger = Ledger()
    follower = driver.Follower(ledger, Tracker(ledger, workspaces=cuda_choices.workspaces_for(spec)), tile=_tile())
    with _scratch() as scratch, cuda_choices.as_on_cuda(spec), fsdp.process_group(spec), fake.as_if_real():
        with fake.adapters_on_meta():
            trainer = trl_trace_build.build(spec, follower, scratch, device="meta")
        with fake.without_memory(follower.tracker, spec["device"]):
            _put_parameters_in_place(trainer, follower, spec)
            log = uses.of(spec, ledger)
            if uses.wanted(spec):
                log.watch(trainer.model, follower.tracker)
            with (
                fake.explained(),
                experts.follow(trainer.model, spec),
                zero_linear.as_under_zero3(spec),
                frozen_units.followed(trainer.model, spec) as done_with_backward,
            ):
                _after_each_backward(trainer.accelerator, done_with_backward)
                trainer.train()
            follower.stop()
    for note in liger.notes(spec):
        follower.note(note)
    return trainer, follower, log.as_json() if uses.wanted(spec) else None


def _extra_where_data_decide(trainer: Any, follower: Any, spec: Mapping[str, Any]) -> int:
    """How much more it takes when every token goes to the same experts."""
    from ..tracing import experts

    if spec.get("routing") == "one" or not experts.depends_on_routing(trainer.model):
        return 0
    follower.note(experts.NOTE)
    _, worst, _ = _follow({**spec, "routing": "one"})
    return int(max(0, worst.ledger.peak - follower.ledger.peak))


def _after_each_backward(accelerator: Any, then: Callable[[], None]) -> None:
    backward = accelerator.backward

    def backward_and_then(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        then()

    accelerator.backward = backward_and_then


def _put_parameters_in_place(trainer: Any, follower: Any, spec: Mapping[str, Any]) -> None:
    """From meta to fake; what sharding changes about them before the first step."""
    from ..tracing import fake, fsdp

    for model in models_of(trainer):
        fake.swap_in(model, fake.empty_on("cpu"))
    follower.see_model(trainer.model)
    for model in models_of(trainer):
        fsdp.shard(model, spec, follower.tracker)
    follower.mark_layers(trainer.model)


def run(spec: Mapping[str, Any], watch: Any = None, before: Callable[[Any], None] = lambda trainer: None) -> Any:
    """The same on real tensors of this machine's CPU. `before` is called when all is loaded and the loop begins."""
    from ..tracing import driver
    from . import trl_trace_build

    with _scratch() as scratch:
        trainer = trl_trace_build.build(spec, watch or driver.Unwatched(), scratch, device="cpu")
        before(trainer)
        trainer.train()
    return trainer


def models_of(trainer: Any) -> list[Any]:
    """Everything with parameters that the trainer holds."""
    return [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]


def _effective(trainer: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    lengths = spec["lengths"]
    seen = SimpleNamespace(longest_prompt=lengths["prompt"], longest_completion=lengths["completion"])
    found = trl_effective.read(trainer, seen, None)
    return {**found, "device": spec["device"]}


def _tile() -> int | None:
    """How much of the vocabulary TRL projects at once; None in releases that project all of it."""
    size = getattr(importlib.import_module("trl.trainer.utils"), "_CHUNKED_LOGPROB_CHUNK_SIZE", None)
    return None if size is None else int(size)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
