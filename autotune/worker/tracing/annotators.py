"""Annotators of a trace: they mark phases, layers and parts of tensors as the step runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..model_memory import layers_of
from . import quantised
from .ledger import Ledger
from .tracker import Tracker
from .workspaces import workspaces_for


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
