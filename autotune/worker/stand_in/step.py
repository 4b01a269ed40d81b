"""Optimizer steps in the order of Hugging Face's Trainer, around any causal language model on meta.

For frameworks whose trainer cannot be traced: the model's own loss or the log-probabilities of the
labels, accelerate's mixed precision, torch's clipping and optimizers.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..tracing import Untraceable, bitsandbytes_optimizers, fake_models, fsdp2, quantised
from ..tracing.annotators import NullAnnotator
from .losses import LOSSES, fuse_head, policy_loss

# torch's own optimizers, by the Trainer's names.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("AdamW", {}),
    "adamw_torch_fused": ("AdamW", {"fused": True}),
    "sgd": ("SGD", {}),
}
SPARED = re.compile(r"bias|norm|\bln_")  # names of parameters without weight decay
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
MIN_OFFLOADED_BYTES = 1024
# PEFT's names of adapter settings that differ from those of TRL's ModelConfig.
PEFT_NAMES = {
    "lora_r": "r",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
}


def prepared(spec: Mapping[str, Any]) -> Any:
    """Build the model on meta in the trainer's form: quantised, adapted, checkpointed, patched."""
    settings, named = spec["settings"], spec["model"]
    if (named.get("config") or {}).get("auto_map") and not spec.get("trust_remote_code"):
        raise Untraceable(
            f"{named['name']} has code of its own, which is not trusted. Trace it with"
            " --trust-remote-code."
        )
    base = build_model(spec, named.get("attn_implementation"))
    quantised.quantise(base, spec)
    model = adapt(base, spec.get("adapter"), widened=settings.get("autocast_adapter_dtype", True))
    checkpoint(model, settings, adapted=bool(spec.get("adapter")))
    for patch in settings.get("patches", ()):
        module, _, name = patch.partition(":")
        changed = getattr(importlib.import_module(module), name)(model, spec)
        model = model if changed is None else changed
    return model.train()


def build_model(
    spec: Mapping[str, Any], attention: str | None, *, device: str = "meta", scores: bool = False
) -> Any:
    """Build the base model with the requested number of layers."""
    model_spec, trust = dict(spec["model"]), bool(spec.get("trust_remote_code"))
    config = fake_models.config_of(
        model_spec, model_spec.get("folder") if trust else None, trust_remote_code=trust
    )
    dtype = getattr(torch, model_spec["dtype"])
    model = fake_models.build(
        config, dtype, attention, device=device, trust_remote_code=trust, scores=scores
    )
    model.config._name_or_path = model.name_or_path = model_spec["name"]
    return model


def adapt(model: Any, adapter: Mapping[str, Any] | None, *, widened: bool = True) -> Any:
    """Add PEFT's own adapter modules; `widened`: in float32, as PEFT creates them by default."""
    if not adapter:
        return model
    import peft

    settings = {
        PEFT_NAMES.get(name, name): value for name, value in adapter.items() if value is not None
    }
    unknown = sorted(set(settings) - set(inspect.signature(peft.LoraConfig).parameters))
    if unknown:
        raise Untraceable(f"PEFT {peft.__version__} has no adapter setting {', '.join(unknown)}")
    settings.setdefault("task_type", "CAUSAL_LM")
    more = {}
    if "autocast_adapter_dtype" in inspect.signature(peft.get_peft_model).parameters:
        more["autocast_adapter_dtype"] = widened
    with fake_models.adapters_on_meta():
        return peft.get_peft_model(model, peft.LoraConfig(**settings), **more)


class StandInStep:
    """A model with the parts that a trainer adds."""

    def __init__(
        self,
        model: Any,
        spec: Mapping[str, Any],
        annotator: NullAnnotator,
        after_backward: Callable[[], None],
    ) -> None:
        settings = spec["settings"]
        self.model, self.spec, self.settings = model, spec, settings
        self.annotator, self.after_backward = annotator, after_backward
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss = settings.get("loss", "causal_lm")
        if self.loss not in LOSSES:
            raise Untraceable(f"loss={self.loss} is none of {', '.join(LOSSES)}")
        if self.loss == "logprobs_fused":
            fuse_head(model, settings["loss_options"])
        self.forward = mixed(model, settings, spec["device"]) if fsdp2.autocasts(spec) else model
        # Wherever DeepSpeed trains, norms and biases are a group of their own, without weight
        # decay.
        spares_norms = str((spec.get("sharding") or {}).get("kind")).startswith("zero")
        self.optimizer = optimizer_for(groups_of(model) if spares_norms else self.trained, settings)

    def run(self) -> None:
        spec, settings, annotator = self.spec, self.settings, self.annotator
        steps = int(spec.get("steps") or 2)
        micro_steps = spec.get("micro_steps") or min(
            2, int(settings.get("gradient_accumulation_steps") or 1)
        )
        batch, scored = (
            batches(spec),
            batches(spec, settings["score"]) if settings.get("score") else None,
        )
        for number in range(steps):
            annotator.begin_step(number, last=number == steps - 1)
            if (
                scored is not None
            ):  # rows whose log-probabilities are computed before a step, without gradients
                self._score(scored())
            for _ in range(micro_steps):
                inputs = (
                    batch()
                )  # the previous batch still exists meanwhile, as in a trainer's loop
                annotator.mark_inputs(inputs)
                self._micro_step(inputs, micro_steps)
            annotator.enter("optimizer")
            norm = settings.get("max_grad_norm", 1.0)
            if norm:
                torch.nn.utils.clip_grad_norm_(self.trained, norm)
            self.optimizer.step()
            annotator.mark_optimizer(self.optimizer)
            if settings.get("offloads_optimizer"):  # the next step allocates it again
                self.optimizer.state.clear()
            self.model.zero_grad()

    def _micro_step(self, inputs: Mapping[str, Any], micro_steps: int) -> None:
        self.annotator.enter("forward")
        with offloaded(self.settings.get("activations_in_flight")):
            loss = self._loss(inputs)
        if micro_steps > 1:
            loss = loss / micro_steps
        self.annotator.enter("backward")
        loss.backward()
        self.after_backward()
        self.annotator.mark_gradients(self.model)

    def _score(self, inputs: Mapping[str, Any]) -> None:
        self.annotator.enter("score")
        self.annotator.mark_inputs(inputs)
        with torch.no_grad():
            self._loss(inputs)

    def _loss(self, inputs: Mapping[str, Any]) -> Any:
        given = {name: inputs[name] for name in MODEL_INPUTS if name in inputs}
        if self.settings.get("use_cache") is not None:
            given["use_cache"] = self.settings["use_cache"]
        if self.loss == "causal_lm":
            out = self.forward(**given, labels=inputs["labels"])
            return out["loss"] if isinstance(out, dict) else out[0]
        options = dict(self.settings.get("loss_options") or {})
        if not torch.is_grad_enabled():
            options |= (self.settings.get("score") or {}).get("loss_options") or {}
        labels = inputs["labels"]
        if options.get("completion_alone"):  # the positions before it have no logits
            completion = int(self.spec["lengths"]["completion"])
            given["logits_to_keep"] = completion + 1
            labels = labels[:, -completion - 1 :]
        return policy_loss(self.forward(**given), labels, self.loss, options)


def batches(
    spec: Mapping[str, Any], other: Mapping[str, Any] | None = None
) -> Callable[[], dict[str, Any]]:
    """Return a factory of batches at the longest length, or of `other` rows and length."""
    lengths = spec["lengths"]
    rows, length = (
        int(spec["settings"]["per_device_train_batch_size"]),
        int(lengths["prompt"]) + int(lengths["completion"]),
    )
    if other is not None:
        rows, length = int(other.get("rows") or rows), int(other.get("length") or length)

    def batch() -> dict[str, Any]:
        made = {
            name: torch.ones((rows, length), dtype=torch.long)
            for name in ("input_ids", "labels", "attention_mask")
        }
        if lengths.get("padded") and length > 1:  # odd rows are one token shorter
            made["attention_mask"][1::2, -1] = 0
        return made

    return batch


def mixed(model: Any, settings: Mapping[str, Any], device: str) -> Callable[..., Any]:
    """Apply accelerate's mixed precision: autocast around forward, outputs in float32."""
    kind = (
        torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else None
    )
    if kind is None:
        return model  # type: ignore[no-any-return]
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(torch.autocast(device, dtype=kind)(model.__call__))  # type: ignore[no-any-return]


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Return the trainable parameters with and without weight decay."""
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[SPARED.search(name) is not None].append(parameter)
    return [{"params": group} for group in groups if group]


def optimizer_for(trained: list[Any], settings: Mapping[str, Any]) -> Any:
    """Build an optimizer by the Trainer's name. torch chooses batched updates by device."""
    name = settings.get("optim", "adamw_torch")
    rate = settings.get("learning_rate", 1e-5)
    if name in OPTIMIZERS:
        kind, options = OPTIMIZERS[name]
        return getattr(torch.optim, kind)(trained, lr=rate, **options)
    made = bitsandbytes_optimizers.optimizer_for(name, trained, lr=rate)
    if made is None:
        raise Untraceable(
            f"optim={name} has no stand-in in a generic step; {', '.join(OPTIMIZERS)} and"
            " bitsandbytes' have"
        )
    return made


def checkpoint(model: Any, settings: Mapping[str, Any], *, adapted: bool) -> None:
    """Enable gradient checkpointing like the Trainer, with input gradients for adapters."""
    if not settings.get("gradient_checkpointing"):
        return
    options = settings.get("gradient_checkpointing_kwargs")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if adapted and (options or {}).get("use_reentrant", True):
        model.enable_input_require_grads()


def offloaded(in_flight: int | None) -> Any:
    """Return hooks that keep at most `in_flight` saved activations on the device, the others on the
    host; None: no hooks.

    Values are not kept: a trace needs sizes alone.
    """
    if in_flight is None:
        return contextlib.nullcontext()
    copied: deque[Any] = deque(maxlen=in_flight)

    def pack(tensor: Any) -> Any:
        if (
            isinstance(tensor, torch.nn.Parameter)
            or tensor.nbytes < MIN_OFFLOADED_BYTES
            or not tensor.is_floating_point()
        ):
            return tensor
        copied.append(tensor)
        return tensor.shape, tensor.dtype, tensor.device

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        copied.clear()
        shape, dtype, device = packed
        return torch.empty(shape, dtype=dtype, device=device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
