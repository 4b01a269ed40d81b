"""TRL's own trainers and loop without generation and without repeated micro-steps.

The same class runs on fake tensors, with annotations, and on real ones, without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..tracing import fsdp2
from ..tracing.annotators import NullAnnotator
from ..tracing.patching import attribute
from .hooks import in_phase, observed, within
from .trainer_run import TrainerRun

# Traced chunks of a batch that is scored in chunks: first, middle and last contain all transitions.
MAX_CHUNKS = 3
# Phases of whole methods, in those trainers that have them.
PHASES = {
    "_generate": "rollout",
    "_calculate_rewards": "reward",
    "_calculate_rewards_from_functions": "reward",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracePlan:
    """Micro-steps of the loop that are computed; the others would only repeat them."""

    optimizer_steps: int  # optimizer steps of the loop
    # Computed micro-steps by optimizer step. A step without an entry computes none.
    micro_steps: Mapping[int, frozenset[int]]

    def number(self, step: int) -> int:
        """Number of the step in the trace, where only computed steps count."""
        return sorted(self.micro_steps).index(step)


def trace_plan(
    *, accumulation: int, generate_every: int | None, steps: int, most: int | None
) -> TracePlan:
    """Plan `steps` optimizer steps, or enough to score beside the optimizer's state."""
    total = steps
    if generate_every is not None and generate_every >= accumulation:
        total = max(steps, -(-generate_every // accumulation) + 1)
    computed = [*range(steps - 1), total - 1]
    return TracePlan(
        optimizer_steps=total,
        micro_steps={
            step: _micro_steps(step, accumulation, generate_every, most or 2) for step in computed
        },
    )


def _micro_steps(
    step: int, accumulation: int, generate_every: int | None, most: int
) -> frozenset[int]:
    """Choose the first micro-steps, and one that generates while gradients exist."""
    chosen = list(range(min(most, accumulation)))
    if generate_every is not None and len(chosen) > 1:
        generating = [
            micro
            for micro in range(1, accumulation)
            if (step * accumulation + micro) % generate_every == 0
        ]
        if generating and generating[0] not in chosen:
            chosen[-1] = generating[0]
    return frozenset(chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLengths:
    """Tokens of prompts and completions."""

    prompt: int
    completion: int
    padded: bool  # true: rows of a batch differ in length, so masks contain zeros

    def prompts(self, rows: int) -> list[list[int]]:
        return [[3] * self._length(self.prompt, row % 2 == 0) for row in range(rows)]

    def completions(self, rows: int) -> list[list[int]]:
        return [
            [4] * self._length(self.completion, row % 2 == 1 or rows == 1) for row in range(rows)
        ]

    def _length(self, longest: int, is_longest: bool) -> int:
        return longest if is_longest or not self.padded else max(1, longest - 1)


def traced(
    method: type[TrainerRun],
    trainer_class: Any,
    annotator: NullAnnotator,
    plan: TracePlan,
    lengths: TracedLengths,
    *,
    casting: str,
    tokenizes: bool,
) -> Any:
    """Return a subclass that annotates its phases and uses synthetic completions.

    `tokenizes`: prompts have their length already, and images, so that the trainer processes them
    itself.
    """
    import torch

    in_phases = {
        name: in_phase(annotator, phase)
        for name, phase in PHASES.items()
        if hasattr(trainer_class, name)
    }

    class TracedTrainer(observed(trainer_class, in_phases)):  # type: ignore[misc]
        seen_micro_steps = 0

        # 1. Construction.

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """Do nothing: the model is on its device."""

        def create_accelerator_and_postprocess(self) -> None:
            self.args.deepspeed_plugin = (
                None  # it was for TRL's constructor alone: there is no engine here
            )
            super().create_accelerator_and_postprocess()
            self.accelerator.device_placement = False
            if casting == "engine":  # DeepSpeed's engine turns autocast off
                self.accelerator.native_amp = False
            if casting == "wrapper":  # FSDP2 casts itself, so accelerate does not wrap the model
                prepare = self.accelerator.prepare_model

                def prepare_without_autocast(*args: Any, **kwargs: Any) -> Any:
                    with attribute(self.accelerator, "native_amp", False):
                        return prepare(*args, **kwargs)

                self.accelerator.prepare_model = prepare_without_autocast
            clip = self.accelerator.clip_grad_norm_

            def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
                if self._step_number() not in plan.micro_steps:
                    return torch.zeros(())
                annotator.enter("optimizer")
                return clip(*args, **kwargs)

            self.accelerator.clip_grad_norm_ = clip_grad_norm_
            self.accelerator.backward = within(annotator, "backward", self.accelerator.backward)

        # 2. The loop.

        def train(self, *args: Any, **kwargs: Any) -> Any:
            annotator.mark_scoring(
                [
                    model
                    for model in (self.model, getattr(self, "ref_model", None))
                    if model is not None
                ]
            )
            return super().train(*args, **kwargs)

        def _step_number(self) -> int:
            return max(0, self.seen_micro_steps - 1) // int(self.args.gradient_accumulation_steps)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            micro = self.seen_micro_steps % int(self.args.gradient_accumulation_steps)
            self.seen_micro_steps += 1
            step = self._step_number()
            if micro == 0 and step in plan.micro_steps:
                annotator.begin_step(plan.number(step), last=step == max(plan.micro_steps))
            if micro not in plan.micro_steps.get(step, ()):
                if hasattr(self, "_step"):
                    self._step += 1
                if step not in plan.micro_steps:
                    self.accelerator.gradient_state._set_sync_gradients(
                        False
                    )  # no gradients for an optimizer step
                return torch.zeros((), device=self.accelerator.device)
            annotator.enter("forward")
            loss = super().training_step(model, inputs, *args, **kwargs)
            annotator.mark_gradients(model)
            return loss

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super()._prepare_inputs(*args, **kwargs)
            annotator.mark_inputs([inputs, getattr(self, "_buffered_inputs", None)])
            return inputs

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            annotator.enter("forward")
            return super().compute_loss(*args, **kwargs)

        # 3. Generation and scoring.

        def _tokenize_prompts(self, prompts: Any) -> Any:
            return (
                super()._tokenize_prompts(prompts)
                if tokenizes
                else (lengths.prompts(len(prompts)), None, {})
            )

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.args.use_vllm:
                fsdp2.begin_rollout(self.model)
            return method.single_turn(self, lengths.completions(len(prompt_ids)))

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            with annotator.inside("score"):
                batch = super()._generate_and_score_completions(*args, **kwargs)
            annotator.mark_inputs(batch)
            return batch

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: Any,
            attention_mask: Any,
            logits_to_keep: int,
            batch_size: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            """Score chunk by chunk; chunks beyond MAX_CHUNKS would repeat the others."""
            rows, few = len(input_ids), MAX_CHUNKS * (batch_size or len(input_ids))
            score = super()._get_per_token_logps_and_entropies
            if torch.is_grad_enabled() or rows <= few or not annotator.skips_repeats:
                return score(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
                )
            with annotator.repeated_work(rows / few):
                found = score(
                    model,
                    input_ids[:few],
                    attention_mask[:few],
                    logits_to_keep,
                    batch_size,
                    *args,
                    **kwargs,
                )
            return tuple(
                each if each is None or each.dim() == 0 else each.new_empty((rows, *each.shape[1:]))
                for each in found
            )

        # 4. Data: rows in their order, so that their combination in batches is deterministic.

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if hasattr(trainer_class, "_generate_single_turn"):
                return super()._get_train_sampler(*args, **kwargs)
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            annotator.note(
                "the pass before training that computes the reference log-probabilities is left out"
            )
            names = (
                ("ref_logps", "ref_KL_logps")
                if "label" in dataset.column_names
                else ("ref_chosen_logps", "ref_rejected_logps")
            )
            return dataset.map(lambda row: dict.fromkeys(names, 0.0))

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    TracedTrainer.__name__ = trainer_class.__name__
    return TracedTrainer


def trace_watcher(callback_class: Any, annotator: NullAnnotator) -> Any:
    """Return a callback that annotates the optimizer's part of a step."""

    class TraceWatcher(callback_class):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            annotator.enter("optimizer")

        def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if optimizer is not None:
                annotator.mark_optimizer(optimizer)

    return TraceWatcher()
