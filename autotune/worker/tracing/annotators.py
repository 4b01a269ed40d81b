"""Annotators of a trace: they mark phases, layers and parts of tensors as the step runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..model_memory import layers_of
from ..protocol import Result
from . import Spec, quantised
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

        def begin(*_: Any) -> None:
            self._scores = self.phase == "forward" and not torch.is_grad_enabled()
            if self._scores:
                self.enter("score")

        def end(*_: Any) -> None:
            if self._scores:
                self.enter("forward")

        for model in models:
            model.register_forward_pre_hook(begin)
            model.register_forward_hook(end)


class StepAnnotator(NullAnnotator):
    """Annotates one trainer's steps in one ledger."""

    skips_repeats = True

    def __init__(self, spec: Spec, *, tile: int | None = None) -> None:
        self.ledger = Ledger()
        workspaces = workspaces_for(spec)
        self.tracker = Tracker(self.ledger, workspaces=workspaces)
        self.tile = tile  # columns per tile, if logits are made in tiles of the vocabulary
        self.inventory: Result = {}
        self.notes: list[str] = []

    # 1. Phases and work.

    @property
    def phase(self) -> str:  # type: ignore[override]
        return self.ledger.phase

    def enter(self, phase: str) -> None:
        self.ledger.enter(phase)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        outer_phase = self.ledger.phase
        layer = self.ledger.layer
        self.ledger.enter(phase)
        yield  # after an exception the phase remains: it is where the step failed
        self.ledger.enter(outer_phase, layer=layer)

    def begin_step(self, number: int, *, last: bool) -> None:
        self.ledger.step = number
        if last:
            self.ledger.reset_work()

    def repeated_work(self, repeats: float) -> AbstractContextManager[None]:
        return self.ledger.repeated_work(repeats)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # 2. Parts of tensors.

    def mark_inputs(self, batch: Any) -> None:
        self.tracker.set_part(batch, "inputs")

    def mark_gradients(self, model: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        self.tracker.set_part(gradients, "gradients")

    def mark_optimizer(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        states = []
        for state in inner.state.values():
            states.append(dict(state) if isinstance(state, dict) else state)
        self.tracker.set_part(states, "optimizer")

    # 3. The model and its layers.

    def mark_model(self, model: Any) -> None:
        """Record the inventory; with any frozen parameter, trainable ones are adapters."""
        trainable = _trainable(model)
        all_parameters = list(model.parameters())
        if len(trainable) < len(all_parameters):
            self.tracker.set_part(trainable, "adapters")
        layers = layers_of(model)
        self.inventory = inventory(model, layers)
        self.tracker.vocabulary = self._logits_widths(model.config)

    def _logits_widths(self, config: Any) -> frozenset[int]:
        """Return last dimensions that identify logits: the vocabulary, a tile, or the last tile."""
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        vocabulary = int(config.vocab_size)
        widths = {vocabulary}
        if self.tile:
            widths |= {self.tile, vocabulary % self.tile}
        return frozenset(widths - {0})

    def mark_layers(self, model: Any) -> None:
        """Record which layer runs, from now on, of the trained model or a reference. Call it after
        sharding, which wraps modules.
        """
        for index, layer in enumerate(layers_of(model)):
            self._mark_layer(index, layer)

    def _mark_layer(self, index: int, layer: Any) -> None:
        ledger = self.ledger

        def forward_begins(
            module: Any,
            args: Any,
            kwargs: Any,
        ) -> None:
            ledger.enter(ledger.phase, layer=index)
            for hidden_states in differentiable((args, kwargs.get("hidden_states")))[:1]:
                hidden_states.register_hook(backward_ends)

        def forward_ends(
            module: Any,
            args: Any,
            kwargs: Any,
            output: Any,
        ) -> None:
            # A recomputed layer remains current until its backward is done.
            if ledger.phase != "backward":
                ledger.enter(ledger.phase)
            for tensor in differentiable(output)[:1]:
                tensor.register_hook(backward_begins)

        def backward_begins(gradient: Any) -> None:
            ledger.enter(ledger.phase, layer=index)

        def backward_ends(gradient: Any) -> None:
            if ledger.phase == "backward" and ledger.layer == index:
                ledger.enter("backward")

        layer.register_forward_pre_hook(forward_begins, with_kwargs=True)
        layer.register_forward_hook(forward_ends, with_kwargs=True)


def differentiable(tree: Any) -> list[Any]:
    """Return the tensors that require gradients."""
    tensors = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            tensors.append(leaf)
    return tensors


def inventory(model: Any, layers: list[Any]) -> Result:
    """Return counts and bytes of parameters and buffers."""
    parameters = list(model.parameters())
    trainable = _trainable(model)
    sizes = [parameter.numel() for parameter in parameters]
    layer_bytes = []
    layer_trainable = []
    for layer in layers:
        layer_bytes.append(_bytes(layer.parameters()))
        layer_trainable.append(_numbers(_trainable(layer)))
    return {
        "parameters": sum(sizes),
        "trainable_parameters": _numbers(trainable),
        "weight_bytes": _bytes([*parameters, *model.buffers()]),
        "trainable_bytes": _bytes(trainable),
        "layer_bytes": layer_bytes,
        "layer_trainable": layer_trainable,
        "largest_parameter": max(sizes, default=0),
        "statistics_bytes": _bytes(quantised.statistics(model)),
    }


def _trainable(module: Any) -> list[Any]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _numbers(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
