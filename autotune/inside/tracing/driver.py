"""Who says where the step is: phases, layers, and what a storage turned out to be, told to the ledger as the step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .ledger import Ledger
from .tracker import Tracker


class Unwatched:
    """A run that nobody follows: what the same step is driven with on real tensors."""

    phase = ""
    leaves_out_repeats = False
    """Whether of many like chunks of a batch only a few are run."""

    @contextmanager
    def standing_for(self, repeats: float) -> Iterator[None]:
        yield

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        yield

    def enter(self, phase: str) -> None: ...

    def see_inputs(self, batch: Any) -> None: ...

    def see_gradients(self, model: Any) -> None: ...

    def see_optimizer(self, optimizer: Any) -> None: ...

    def see_model(self, model: Any) -> None: ...

    def begin_step(self, number: int, *, last: bool) -> None: ...

    def note(self, text: str) -> None: ...

    def mark_scoring(self, models: list[Any]) -> None:
        """A pass without gradients inside the forward phase is one that scores: the reference model's."""
        for model in models:
            model.register_forward_pre_hook(self._scoring_begins)
            model.register_forward_hook(self._scoring_ends)

    def _scoring_begins(self, *_: Any) -> None:
        self._scores = self.phase == "forward" and not torch.is_grad_enabled()
        if self._scores:
            self.enter("score")

    def _scoring_ends(self, *_: Any) -> None:
        if self._scores:
            self.enter("forward")


class Follower(Unwatched):
    """Follows one trainer's steps into one ledger."""

    leaves_out_repeats = True

    def __init__(self, ledger: Ledger, tracker: Tracker, *, tile: int | None = None) -> None:
        self.ledger, self.tracker = ledger, tracker
        self.tile = tile  # of the vocabulary, where logits are made piece by piece
        self.inventory: dict[str, Any] = {}
        self.notes: list[str] = []
        self.high_extra_bytes = 0

    @property
    def phase(self) -> str:  # type: ignore[override]
        return self.ledger.phase

    @contextmanager
    def standing_for(self, repeats: float) -> Iterator[None]:
        with self.tracker.standing_for(repeats):
            yield

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        before, layer = self.ledger.phase, self.ledger.layer
        self.ledger.enter(phase)
        yield  # where an exception passes, the phase stays as it was: it is where the step came to
        self.ledger.enter(before, layer=layer)

    def enter(self, phase: str) -> None:
        self.ledger.enter(phase)

    def see_inputs(self, batch: Any) -> None:
        self.tracker.call_it(batch, "inputs")

    def see_gradients(self, model: Any) -> None:
        self.tracker.call_it([parameter.grad for parameter in model.parameters()], "gradients")

    def see_optimizer(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self.tracker.call_it([dict(state) if isinstance(state, dict) else state for state in inner.state.values()], "optimizer")

    def see_model(self, model: Any) -> None:
        """Frozen or not, by what kind of training it is: where anything is frozen, what learns is an adapter."""
        parameters = list(model.parameters())
        if any(not parameter.requires_grad for parameter in parameters):
            self.tracker.call_it([parameter for parameter in parameters if parameter.requires_grad], "adapters")
        self.inventory = inventory(model, layers_of(model))
        self.tracker.vocabulary = vocabulary(model, self.tile)

    def mark_layers(self, model: Any) -> None:
        """From here on the ledger is told which layer runs. Sharding comes before: it wraps what it finds."""
        for index, layer in enumerate(layers_of(model)):
            self._mark(index, layer)

    def stop(self) -> None:
        """What is let go of after the step is no part of it."""
        self.ledger.close()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def begin_step(self, number: int, *, last: bool) -> None:
        self.ledger.step = number
        if last:
            self.tracker.forget_work()

    def _mark(self, index: int, layer: Any) -> None:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            self.ledger.enter(self.ledger.phase, layer=index)
            for tensor in _differentiable((args, kwargs.get("hidden_states"))):
                tensor.register_hook(left)

        def left(gradient: Any) -> None:
            if self.ledger.phase == "backward" and self.ledger.layer == index:
                self.ledger.enter("backward")

        def reached(gradient: Any) -> None:
            self.ledger.enter(self.ledger.phase, layer=index)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self.ledger.phase != "backward":  # a recomputed layer stays the current one until its gradients are through
                self.ledger.enter(self.ledger.phase)
            for tensor in _differentiable(output):
                tensor.register_hook(reached)

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after, with_kwargs=True)


def _differentiable(tree: Any) -> list[Any]:
    """The hidden states of a layer's call: the first tensor that gradients go through."""
    from torch.utils._pytree import tree_leaves

    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return found[:1]


def layers_of(model: Any) -> list[Any]:
    """The decoder's layers, found as the longest list of modules; empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def vocabulary(model: Any, tile: int | None) -> frozenset[int]:
    """By which a tensor of logits is known: its last dimension is the vocabulary, or a tile of it, or what is left of it."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    size = int(config.vocab_size)
    return frozenset({size, *((tile, size % tile) if tile else ())}) - {0}


def inventory(model: Any, layers: list[Any]) -> dict[str, Any]:
    """Parameters and buffers as they are now."""
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    held = [*parameters, *model.buffers()]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in trainable),
        "weight_bytes": sum(_bytes(tensor) for tensor in held),
        "trainable_bytes": sum(_bytes(tensor) for tensor in trainable),
        "layer_bytes": [sum(_bytes(parameter) for parameter in layer.parameters()) for layer in layers],
        "layer_trainable": [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers],
        "largest_parameter": max((parameter.numel() for parameter in parameters), default=0),
    }


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def work(tracker: Tracker) -> list[dict[str, Any]]:
    """What each phase of the last step computes."""
    return [
        {
            "phase": phase,
            "flops": {dtype: count for (where, dtype), count in tracker.flops.items() if where == phase},
            "moved_bytes": tracker.moved[phase],
            "kernels": kernels,
            "in_layers": {what: count for (where, what), count in tracker.in_layers.items() if where == phase},
        }
        for phase, kernels in tracker.kernels.items()
    ]


Wrapper = Callable[..., Any]


def within(watch: Unwatched, phase: str, method: Wrapper) -> Wrapper:
    """The same method, in a phase."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with watch.inside(phase):
            return method(*args, **kwargs)

    return inside
