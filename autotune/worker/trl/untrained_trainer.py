"""Trainer of a script that is only predicted: what the script changes between the construction and
the training is recorded, and decides the prediction like what came before.

    trainer = SFTTrainer(model, args=config)
    trainer.model.gradient_checkpointing_enable()
    trainer.args.per_device_train_batch_size = 2
    trainer.train()

Nothing of the trainer is there but its arguments: every other attribute is a placeholder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .placeholder import Anything

_MODELS = ("model", "model_wrapped")
_REPLACED = frozenset(
    {
        "args",
        "compute_loss",
        "create_optimizer",
        "optimizer",
        "ref_model",
        "training_step",
    }
)
"""Attributes of a trainer that decide memory where a script assigns them itself."""


class UntrainedTrainer:
    """Object that a script gets instead of its trainer. `train`: ends the script."""

    def __init__(
        self,
        captured: Any,
        train: Callable[[Any], None],
    ) -> None:
        values = self.__dict__
        values["_captured"] = captured
        values["_train"] = train
        values["_assigned"] = {}

    def add_callback(self, callback: Any) -> None:
        self._captured.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        """Do nothing: a prediction has no callbacks."""

    pop_callback = remove_callback

    def train(
        self,
        *_: Any,
        **__: Any,
    ) -> None:
        self._train(self._captured)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._assigned:
            return self._assigned[name]
        captured = self._captured
        if name in _MODELS:
            return self._model()
        if name == "args" and captured.configured is not None:
            return captured.configured.config
        value = captured.arguments.get("processing_class" if name == "tokenizer" else name)
        return Anything() if value is None else value

    def __setattr__(
        self,
        name: str,
        value: Any,
    ) -> None:
        self._assigned[name] = value
        if name == "model":
            self._captured.arguments["model"] = value
        elif name in _REPLACED:
            self._captured.replaced.append(name)

    def _model(self) -> Any:
        """Return the model with its adapter, as a trainer has it."""
        captured = self._captured
        if captured.built_model is None:
            captured.built_model = _with_adapter(
                _built(captured.arguments.get("model")),
                captured.arguments.get("peft_config"),
            )
        return captured.built_model


def _built(model: Any) -> Any:
    """Return the model, built where the script named it only."""
    if not isinstance(model, str) or isinstance(model, Anything):
        return Anything() if model is None else model
    transformers = importlib.import_module("transformers")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    except (OSError, ValueError):  # no text model, whose settings nothing here changes
        return Anything()


def _with_adapter(model: Any, adapter: Any) -> Any:
    peft = importlib.import_module("peft")
    has_adapter = hasattr(model, "peft_config") and not isinstance(model, Anything)
    if has_adapter or not isinstance(adapter, peft.PeftConfig):
        return model
    try:
        return peft.get_peft_model(model, adapter)
    except (AttributeError, TypeError, ValueError):  # a model that PEFT does not know
        return model
