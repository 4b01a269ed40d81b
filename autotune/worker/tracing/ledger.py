"""Ledger of a trace, and the annotator that writes to it as the step runs.

The ledger has allocations with their parts, events, marks of the step's phases and layers, and the
work of each phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..model_memory import layers_of
from . import quantised
from .tracker import Tracker
from .workspaces import workspaces_for

PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspaces",
    "inputs",
    "kv_cache",
    "communication",
)
_NUMBER = {part: number for number, part in enumerate(PARTS)}


class Ledger:
    """Append-only record; only the part of an allocation may be corrected later."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        self.current_stream: Callable[[], int] | None = None
        """Number of the stream that a block is requested on; None: all are torch's default, 0."""
        self.products: dict[bool, int] = {}
        self.marks: list[dict[str, Any]] = []
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.moved: dict[str, float] = defaultdict(float)
        self.kernels: dict[str, int] = defaultdict(int)
        self.in_layers: dict[tuple[str, str], float] = defaultdict(float)
        self.live = 0
        self.peak = 0
        self.phase = "load"
        self.step = 0
        self.layer: int | None = None
        self.closed = False
        self.enter("load")

    def enter(self, phase: str, *, layer: int | None = None) -> None:
        """Mark the phase and layer that begin with the next event."""
        self.phase, self.layer = phase, layer
        mark = {"event": len(self.events), "phase": phase, "step": self.step, "layer": layer}
        if self.marks and self.marks[-1]["event"] == len(self.events):
            self.marks[-1] = mark
        else:
            self.marks.append(mark)

    def allocate(self, size: int, part: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.parts.append(_NUMBER[part])
        self.events.append(number + 1)
        if self.current_stream is not None and (stream := self.current_stream()):
            self.streams[number] = stream
        self.live += size
        self.peak = max(self.peak, self.live)
        return number

    def free(self, number: int) -> None:
        if self.closed:
            return
        self.events.append(-(number + 1))
        self.live -= self.sizes[number]

    def note_product(self) -> None:
        """Note the latest allocation at the first matrix product of each thread: autograd has
        its own.
        """
        if self.phase in ("score", "forward", "backward") and self.sizes:
            self.products.setdefault(self.phase == "backward", len(self.sizes) - 1)

    def set_part(self, number: int, part: str) -> None:
        """Correct the part of an allocation."""
        self.parts[number] = _NUMBER[part]

    def close(self) -> None:
        """End the trace: later frees are not part of the step."""
        self.closed = True

    def as_json(self) -> dict[str, Any]:
        return {
            "sizes": self.sizes,
            "parts": self.parts,
            "part_names": list(PARTS),
            "events": self.events,
            "marks": self.marks,
            "streams": self.streams,
            "products": [self.products[one] for one in sorted(self.products)],
        }

    # Work.

    def count(self, moved_bytes: int, flops: float, dtype: str) -> None:
        """Count an operation; `dtype` is empty without matrix products."""
        phase = self.phase
        self.moved[phase] += moved_bytes
        self.kernels[phase] += 1
        if dtype:
            self.flops[phase, dtype] += flops
        if self.layer is not None:
            self.in_layers[phase, "moved_bytes"] += moved_bytes
            self.in_layers[phase, "kernels"] += 1
            if dtype:
                self.in_layers[phase, dtype] += flops

    def reset_work(self) -> None:
        """Reset the counters: the last optimizer step is reported."""
        for counted in (self.flops, self.moved, self.kernels, self.in_layers):
            counted.clear()

    @contextmanager
    def repeated_work(self, repeats: float) -> Iterator[None]:
        """Count the work `repeats` times; memory is recorded once."""
        counts: list[dict[Any, Any]] = [self.flops, self.moved, self.kernels, self.in_layers]
        before = [dict(count) for count in counts]
        yield
        for count, earlier in zip(counts, before, strict=True):
            for key, now in count.items():
                count[key] = earlier.get(key, 0) + type(now)((now - earlier.get(key, 0)) * repeats)

    def work(self) -> list[dict[str, Any]]:
        """Return the work of each phase of the last step."""
        return [
            {
                "phase": phase,
                "flops": {
                    dtype: count for (where, dtype), count in self.flops.items() if where == phase
                },
                "moved_bytes": self.moved[phase],
                "kernels": kernels,
                "in_layers": {
                    what: count for (where, what), count in self.in_layers.items() if where == phase
                },
            }
            for phase, kernels in self.kernels.items()
        ]


class NullAnnotator:
    """Annotator that does nothing: drives the same step on real tensors."""

    phase = ""
    skips_repeats = False
    """True if only a few of many equal chunks of a batch are run."""

    def repeated_work(self, repeats: float) -> AbstractContextManager[None]:
        return nullcontext()

    def inside(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, phase: str) -> None: ...
    def mark_inputs(self, batch: Any) -> None: ...
    def mark_gradients(self, model: Any) -> None: ...
    def mark_optimizer(self, optimizer: Any) -> None: ...
    def mark_model(self, model: Any) -> None: ...
    def begin_step(self, number: int, *, last: bool) -> None: ...
    def note(self, text: str) -> None: ...

    def mark_scoring(self, models: list[Any]) -> None:
        """Mark passes without gradients in the forward phase as scoring (the reference model's)."""

        def begins(*_: Any) -> None:
            self._scores = self.phase == "forward" and not torch.is_grad_enabled()
            if self._scores:
                self.enter("score")

        def ends(*_: Any) -> None:
            if self._scores:
                self.enter("forward")

        for model in models:
            model.register_forward_pre_hook(begins)
            model.register_forward_hook(ends)


class StepAnnotator(NullAnnotator):
    """Annotates one trainer's steps in one ledger."""

    skips_repeats = True

    def __init__(self, spec: Mapping[str, Any], *, tile: int | None = None) -> None:
        self.ledger = Ledger()
        self.tracker = Tracker(self.ledger, workspaces=workspaces_for(spec))
        self.tile = tile  # columns per tile, if logits are made in tiles of the vocabulary
        self.inventory: dict[str, Any] = {}
        self.notes: list[str] = []

    @property
    def phase(self) -> str:  # type: ignore[override]
        return self.ledger.phase

    def repeated_work(self, repeats: float) -> AbstractContextManager[None]:
        return self.ledger.repeated_work(repeats)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        before, layer = self.ledger.phase, self.ledger.layer
        self.ledger.enter(phase)
        yield  # after an exception the phase remains: it is where the step failed
        self.ledger.enter(before, layer=layer)

    def enter(self, phase: str) -> None:
        self.ledger.enter(phase)

    def mark_inputs(self, batch: Any) -> None:
        self.tracker.set_part(batch, "inputs")

    def mark_gradients(self, model: Any) -> None:
        self.tracker.set_part([parameter.grad for parameter in model.parameters()], "gradients")

    def mark_optimizer(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self.tracker.set_part(
            [dict(state) if isinstance(state, dict) else state for state in inner.state.values()],
            "optimizer",
        )

    def mark_model(self, model: Any) -> None:
        """Record the inventory; with any frozen parameter, trainable ones are adapters."""
        parameters = list(model.parameters())
        if any(not parameter.requires_grad for parameter in parameters):
            self.tracker.set_part(
                [parameter for parameter in parameters if parameter.requires_grad], "adapters"
            )
        self.inventory = inventory(model, layers_of(model))
        # Last dimensions that identify logits: the vocabulary, a tile, or the last tile.
        config = (
            model.config.get_text_config()
            if hasattr(model.config, "get_text_config")
            else model.config
        )
        size, tile = int(config.vocab_size), self.tile
        self.tracker.vocabulary = frozenset({size, *((tile, size % tile) if tile else ())}) - {0}

    def mark_layers(self, model: Any) -> None:
        """Record which layer runs, from now on. Call it after sharding, which wraps modules."""
        for index, layer in enumerate(layers_of(model)):
            self._mark(index, layer)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def begin_step(self, number: int, *, last: bool) -> None:
        self.ledger.step = number
        if last:
            self.ledger.reset_work()

    def _mark(self, index: int, layer: Any) -> None:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            self.ledger.enter(self.ledger.phase, layer=index)
            for tensor in differentiable((args, kwargs.get("hidden_states")))[
                :1
            ]:  # the hidden states
                tensor.register_hook(left)

        def left(gradient: Any) -> None:
            if self.ledger.phase == "backward" and self.ledger.layer == index:
                self.ledger.enter("backward")

        def reached(gradient: Any) -> None:
            self.ledger.enter(self.ledger.phase, layer=index)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if (
                self.ledger.phase != "backward"
            ):  # a recomputed layer remains current until its backward is done
                self.ledger.enter(self.ledger.phase)
            for tensor in differentiable(output)[:1]:
                tensor.register_hook(reached)

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after, with_kwargs=True)


def differentiable(tree: Any) -> list[Any]:
    """Return the tensors that require gradients."""
    return [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def inventory(model: Any, layers: list[Any]) -> dict[str, Any]:
    """Return counts and bytes of parameters and buffers."""
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    held = [*parameters, *model.buffers()]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in trainable),
        "weight_bytes": sum(tensor.nbytes for tensor in held),
        "trainable_bytes": sum(tensor.nbytes for tensor in trainable),
        "layer_bytes": [
            sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers
        ],
        "layer_trainable": [
            sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers
        ],
        "largest_parameter": max((parameter.numel() for parameter in parameters), default=0),
        "statistics_bytes": sum(tensor.nbytes for tensor in quantised.statistics(model)),
    }
