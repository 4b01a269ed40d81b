"""Optimizer steps as Hugging Face's Trainer makes them, around any causal language model.

For what has no trainer that could be followed here: the model's own loss or log-probabilities of the labels, accelerate's
way with mixed precision, torch's own clipping and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..tracing import Untraceable, quantised
from ..tracing.driver import Unwatched
from .generic_losses import LOSSES, policy_loss

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("AdamW", {}),
    "adamw_torch_fused": ("AdamW", {"fused": True}),
    "sgd": ("SGD", {}),
}
"""torch's own, by the Trainer's names."""

TO_THE_MODEL = ("input_ids", "attention_mask", "position_ids")


class Step:
    """The model with what a trainer puts around it."""

    def __init__(self, model: Any, settings: Mapping[str, Any], *, watch: Unwatched, device: str, autocasts: bool = True) -> None:
        self.model, self.settings, self.watch = model, settings, watch
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss = settings.get("loss", "causal_lm")
        if self.loss not in LOSSES:
            raise Untraceable(f"loss={self.loss} is none of {', '.join(LOSSES)}")
        self.forward = mixed(model, settings, device) if autocasts else model
        self.optimizer = optimizer_for(self.trained, settings)
        self.after_backward: Callable[[], None] = lambda: None
        self.scored: Callable[[], Mapping[str, Any]] | None = None
        """Makes the rows whose log-probabilities are wanted before a step, without gradients."""
        self.completion = 0
        """Tokens at a row's end that are the completion's."""

    def run(self, batch: Callable[[], Mapping[str, Any]], *, steps: int, micro_steps: int) -> None:
        for number in range(steps):
            self.watch.begin_step(number, last=number == steps - 1)
            if self.scored is not None:
                self._score(self.scored())
            for _ in range(micro_steps):
                inputs = batch()  # the one before is still held while it is made, as in a trainer's loop
                self.watch.see_inputs(inputs)
                self._micro_step(inputs, micro_steps)
            self.watch.enter("optimizer")
            self._update()

    def _micro_step(self, inputs: Mapping[str, Any], micro_steps: int) -> None:
        self.watch.enter("forward")
        loss = self._loss(inputs)
        if micro_steps > 1:
            loss = loss / micro_steps
        self.watch.enter("backward")
        loss.backward()
        self.after_backward()
        self.watch.see_gradients(self.model)

    def _score(self, inputs: Mapping[str, Any]) -> None:
        self.watch.enter("score")
        self.watch.see_inputs(inputs)
        with torch.no_grad():
            self._loss(inputs)

    def _loss(self, inputs: Mapping[str, Any]) -> Any:
        given = {name: inputs[name] for name in TO_THE_MODEL if name in inputs}
        if self.settings.get("use_cache") is not None:
            given["use_cache"] = self.settings["use_cache"]
        if self.loss == "causal_lm":
            out = self.forward(**given, labels=inputs["labels"])
            return out["loss"] if isinstance(out, dict) else out[0]
        options = {**(self.settings.get("loss_options") or {}), **({} if torch.is_grad_enabled() else self._scoring())}
        labels = inputs["labels"]
        if options.get("completion_alone"):  # the positions before it have no logits
            given["logits_to_keep"] = self.completion + 1
            labels = labels[:, -self.completion - 1 :]
        return policy_loss(self.forward(**given), labels, self.loss, options)

    def _scoring(self) -> Mapping[str, Any]:
        """How a pass for the log-probabilities alone differs."""
        return (self.settings.get("score") or {}).get("loss_options") or {}

    def _update(self) -> None:
        norm = self.settings.get("max_grad_norm", 1.0)
        if norm:
            torch.nn.utils.clip_grad_norm_(self.trained, norm)
        self.optimizer.step()
        self.watch.see_optimizer(self.optimizer)
        self.model.zero_grad()


def mixed(model: Any, settings: Mapping[str, Any], device: str) -> Callable[..., Any]:
    """accelerate's way: autocast around forward, and every output of it in float32."""
    kind = torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else None
    if kind is None:
        return model  # type: ignore[no-any-return]
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(torch.autocast(device, dtype=kind)(model.__call__))  # type: ignore[no-any-return]


def optimizer_for(trained: list[Any], settings: Mapping[str, Any]) -> Any:
    """By the Trainer's own names. Whether updates are batched is torch's own choice for the device."""
    name = settings.get("optim", "adamw_torch")
    rate = settings.get("learning_rate", 1e-5)
    if name in PLAIN:
        kind, options = PLAIN[name]
        return getattr(torch.optim, kind)(trained, lr=rate, **options)
    made = quantised.optimizer_for(name, trained, lr=rate)
    if made is None:
        raise Untraceable(f"optim={name} has no stand-in in a generic step; {', '.join(PLAIN)} and bitsandbytes' have")
    return made


def checkpoint(model: Any, settings: Mapping[str, Any], *, adapted: bool) -> None:
    """As the Trainer turns it on, with PEFT's way of letting gradients in."""
    if not settings.get("gradient_checkpointing"):
        return
    options = settings.get("gradient_checkpointing_kwargs")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if adapted and (options or {}).get("use_reentrant", True):
        model.enable_input_require_grads()
