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

from ..protocol import Arguments
from ..tracing import (
    Spec,
    Untraceable,
    bitsandbytes_optimizers,
    fake_models,
    fsdp2,
    quantised,
    sharding_kind,
)
from ..tracing.annotators import NullAnnotator
from .expert_weights import weight_in_float32
from .losses import LOSSES, fuse_head, policy_loss

# torch's own optimizers, by the Trainer's names.
OPTIMIZERS: dict[str, tuple[str, Arguments]] = {
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

Settings = Mapping[str, Any]

# 1. The model.


def prepared(spec: Spec) -> Any:
    """Build the model on meta in the trainer's form: quantised, adapted, checkpointed, patched."""
    settings = spec["settings"]
    model_spec = spec["model"]
    config = model_spec.get("config") or {}
    trusts_code = spec.get("trust_remote_code")
    if config.get("auto_map") and not trusts_code:
        raise Untraceable(
            f"{model_spec['name']} has code of its own, which is not trusted. Trace it with"
            " --trust-remote-code."
        )
    adapter = spec.get("adapter")
    base = build_model(spec, model_spec.get("attn_implementation"))
    quantised.quantise(base, spec)
    model = adapt(base, adapter, widened=settings.get("autocast_adapter_dtype", True))
    checkpoint(model, settings, adapted=bool(adapter))
    if settings.get("float32_expert_weights"):
        weight_in_float32(model)
    for patch in settings.get("patches", ()):
        module, _, name = patch.partition(":")
        function = getattr(importlib.import_module(module), name)
        patched = function(model, spec)
        if patched is not None:
            model = patched
    return model.train()


def build_model(
    spec: Spec,
    attention: str | None,
    *,
    device: str = "meta",
    scores: bool = False,
) -> Any:
    """Build the base model with the requested number of layers."""
    model_spec = dict(spec["model"])
    trusted = bool(spec.get("trust_remote_code"))
    folder = model_spec.get("folder") if trusted else None
    config = fake_models.config_of(model_spec, folder, trust_remote_code=trusted)
    dtype = getattr(torch, model_spec["dtype"])
    model = fake_models.build(
        config,
        dtype,
        attention,
        device=device,
        trust_remote_code=trusted,
        scores=scores,
    )
    model.config._name_or_path = model.name_or_path = model_spec["name"]
    return model


def adapt(
    model: Any,
    adapter: Settings | None,
    *,
    widened: bool = True,
) -> Any:
    """Add PEFT's own adapter modules; `widened`: in float32, as PEFT creates them by default."""
    if not adapter:
        return model
    import peft

    # 1. The adapter's settings, by PEFT's names.
    settings = {}
    for name, value in adapter.items():
        if value is not None:
            settings[PEFT_NAMES.get(name, name)] = value
    known_names = inspect.signature(peft.LoraConfig).parameters
    unknown = sorted(set(settings) - set(known_names))
    if unknown:
        raise Untraceable(f"PEFT {peft.__version__} has no adapter setting {', '.join(unknown)}")
    settings.setdefault("task_type", "CAUSAL_LM")

    # 2. The adapter.
    options = {}
    if "autocast_adapter_dtype" in inspect.signature(peft.get_peft_model).parameters:
        options["autocast_adapter_dtype"] = widened
    with fake_models.adapters_on_meta():
        lora_config = peft.LoraConfig(**settings)
        return peft.get_peft_model(model, lora_config, **options)


def checkpoint(
    model: Any,
    settings: Settings,
    *,
    adapted: bool,
) -> None:
    """Enable gradient checkpointing like the Trainer, with input gradients for adapters."""
    if not settings.get("gradient_checkpointing"):
        return
    options = settings.get("gradient_checkpointing_kwargs")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    checkpointing = options or {}
    if adapted and checkpointing.get("use_reentrant", True):
        model.enable_input_require_grads()


# 2. The step.


class StandInStep:
    """A model with the parts that a trainer adds."""

    def __init__(
        self,
        model: Any,
        spec: Spec,
        annotator: NullAnnotator,
        after_backward: Callable[[], None],
    ) -> None:
        settings = spec["settings"]
        self.model = model
        self.spec = spec
        self.settings = settings
        self.annotator = annotator
        self.after_backward = after_backward
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss = settings.get("loss", "causal_lm")
        if self.loss not in LOSSES:
            raise Untraceable(f"loss={self.loss} is none of {', '.join(LOSSES)}")
        if self.loss == "logprobs_fused":
            fuse_head(model, settings["loss_options"], annotator)
        self.forward = mixed(model, settings, spec["device"]) if fsdp2.autocasts(spec) else model
        # Wherever DeepSpeed trains, norms and biases are a group of their own, without weight
        # decay.
        parameters: list[Any] = self.trained
        if sharding_kind(spec).startswith("zero"):
            parameters = groups_of(model)
        self.optimizer = optimizer_for(parameters, settings)

    def run(self) -> None:
        """Run the steps. A batch exists until the next one has been made, as in a trainer's loop:
        the variable `inputs` has to outlive a step.
        """
        steps = int(self.spec.get("steps") or 2)
        micro_steps = self._micro_steps()
        next_batch = batches(self.spec)
        next_scored_batch = None
        if self.settings.get("score"):
            next_scored_batch = batches(self.spec, self.settings["score"])
        for step in range(steps):
            self.annotator.begin_step(step, last=step == steps - 1)
            # Log-probabilities of rows are computed before a step, without gradients.
            if next_scored_batch is not None:
                self._score(next_scored_batch())
            for _ in range(micro_steps):
                inputs = next_batch()
                self.annotator.mark_inputs(inputs)
                self._micro_step(inputs, micro_steps)
            self._update()

    def _micro_steps(self) -> int:
        """Return the micro-steps of an optimizer step: as requested, or up to 2."""
        requested = self.spec.get("micro_steps")
        if requested:
            return int(requested)
        accumulation = self.settings.get("gradient_accumulation_steps") or 1
        return min(2, int(accumulation))

    def _micro_step(self, inputs: Mapping[str, Any], micro_steps: int) -> None:
        self.annotator.enter("forward")
        with offloaded(self.settings.get("activations_in_flight")):
            loss = self._loss(inputs)
        if self.settings.get("scores_in_step"):  # as a reference does, beside the policy's logits
            self._score(inputs)
        if micro_steps > 1:
            loss = loss / micro_steps
        self.annotator.enter("backward")
        loss.backward()
        self.after_backward()
        self.annotator.mark_gradients(self.model)

    def _update(self) -> None:
        self.annotator.enter("optimizer")
        max_norm = self.settings.get("max_grad_norm", 1.0)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(self.trained, max_norm)
        self.optimizer.step()
        self.annotator.mark_optimizer(self.optimizer)
        if self.settings.get("offloads_optimizer"):  # the next step allocates it again
            self.optimizer.state.clear()
        self.model.zero_grad()

    def _score(self, inputs: Mapping[str, Any]) -> None:
        self.annotator.enter("score")
        self.annotator.mark_inputs(inputs)
        with torch.no_grad():
            self._loss(inputs)

    def _loss(self, inputs: Mapping[str, Any]) -> Any:
        model_inputs = {name: inputs[name] for name in MODEL_INPUTS if name in inputs}
        if self.settings.get("use_cache") is not None:
            model_inputs["use_cache"] = self.settings["use_cache"]
        labels = inputs["labels"]
        if self.loss == "causal_lm":
            out = self.forward(**model_inputs, labels=labels)
            return out["loss"] if isinstance(out, dict) else out[0]
        options = self._loss_options()
        if options.get("completion_alone"):  # the positions before it have no logits
            completion = int(self.spec["lengths"]["completion"])
            model_inputs["logits_to_keep"] = completion + 1
            labels = labels[:, -completion - 1 :]
        return policy_loss(self.forward(**model_inputs), labels, self.loss, options)

    def _loss_options(self) -> Arguments:
        stated = self.settings.get("loss_options") or {}
        options = dict(stated)
        if not torch.is_grad_enabled():
            score = self.settings.get("score") or {}
            options.update(score.get("loss_options") or {})
        return options


def batches(spec: Spec, score: Settings | None = None) -> Callable[[], Arguments]:
    """Return a factory of batches at the longest length, or of the `score`'s rows and length."""
    lengths = spec["lengths"]
    rows = int(spec["settings"]["per_device_train_batch_size"])
    prompt_length = int(lengths["prompt"])
    length = prompt_length + int(lengths["completion"])
    if score is not None:
        rows = int(score.get("rows") or rows)
        length = int(score.get("length") or length)

    def batch() -> Arguments:
        shape = (rows, length)
        tensors = {
            "input_ids": torch.ones(shape, dtype=torch.long),
            "labels": torch.ones(shape, dtype=torch.long),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }
        if lengths.get("padded") and length > 1:  # odd rows are one token shorter
            tensors["attention_mask"][1::2, -1] = 0
        return tensors

    return batch


# 3. What a trainer adds to a model.


def mixed(
    model: Any,
    settings: Settings,
    device: str,
) -> Callable[..., Any]:
    """Apply accelerate's mixed precision: autocast around forward, outputs in float32."""
    if settings.get("bf16"):
        dtype = torch.bfloat16
    elif settings.get("fp16"):
        dtype = torch.float16
    else:
        return model  # type: ignore[no-any-return]
    from accelerate.utils import convert_outputs_to_fp32

    forward = torch.autocast(device, dtype=dtype)(model.__call__)
    return convert_outputs_to_fp32(forward)  # type: ignore[no-any-return]


def groups_of(model: Any) -> list[Arguments]:
    """Return the trainable parameters with and without weight decay."""
    decayed = []
    spared = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if SPARED.search(name):
            spared.append(parameter)
        else:
            decayed.append(parameter)
    return [{"params": parameters} for parameters in (decayed, spared) if parameters]


def optimizer_for(parameters: list[Any], settings: Settings) -> Any:
    """Build an optimizer by the Trainer's name. torch chooses batched updates by device."""
    name = settings.get("optim", "adamw_torch")
    learning_rate = settings.get("learning_rate", 1e-5)
    if name in OPTIMIZERS:
        class_name, options = OPTIMIZERS[name]
        optimizer_class = getattr(torch.optim, class_name)
        return optimizer_class(parameters, lr=learning_rate, **options)
    optimizer = bitsandbytes_optimizers.optimizer_for(name, parameters, lr=learning_rate)
    if optimizer is None:
        raise Untraceable(
            f"optim={name} has no stand-in in a generic step; {', '.join(OPTIMIZERS)} and"
            " bitsandbytes' have"
        )
    return optimizer


def offloaded(in_flight: int | None) -> Any:
    """Return hooks that keep at most `in_flight` saved activations on the device, the others on the
    host; None: no hooks.

    Values are not kept: a trace needs sizes alone.
    """
    if in_flight is None:
        return contextlib.nullcontext()
    on_device: deque[Any] = deque(maxlen=in_flight)

    def pack(tensor: Any) -> Any:
        is_activation = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
        if not is_activation or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return tensor
        on_device.append(tensor)
        return tensor.shape, tensor.dtype, tensor.device

    def unpack(packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        on_device.clear()
        shape, dtype, device = packed
        return torch.empty(shape, dtype=dtype, device=device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
