"""TRL's own trainers and their own loop, with two things left out: what generates, and micro-steps that repeat others.

The same class runs on fake tensors, followed, and on real ones, where nobody follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..tracing.driver import Unwatched, within

ENOUGH_CHUNKS = 3
"""Of a batch that is scored chunk by chunk: with a first, a middle and a last one, all transitions between chunks are there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """Which of the loop's micro-steps are computed. The others would repeat them: nothing is different in memory."""

    optimizer_steps: int
    """How many optimizer steps the loop makes."""

    micro_steps: Mapping[int, frozenset[int]]
    """By optimizer step, the micro-steps of it that are computed. A step that is not named passes without any."""

    def number(self, step: int) -> int:
        """The step's number in the trace, where only computed steps count."""
        return sorted(self.micro_steps).index(step)


def course(*, accumulation: int, generate_every: int | None, steps: int, most: int | None) -> Course:
    """At least `steps` optimizer steps, and so many that new completions are scored while the optimizer's state exists."""
    total = steps
    if generate_every is not None and generate_every >= accumulation:
        total = max(steps, -(-generate_every // accumulation) + 1)
    computed = [*range(steps - 1), total - 1]
    return Course(
        optimizer_steps=total,
        micro_steps={step: _micro_steps(step, accumulation, generate_every, most or 2) for step in computed},
    )


def _micro_steps(step: int, accumulation: int, generate_every: int | None, most: int) -> frozenset[int]:
    """The first ones; among them one that generates anew while gradients are there, if the loop has such."""
    chosen = list(range(min(most, accumulation)))
    if generate_every is not None and len(chosen) > 1:
        anew = [micro for micro in range(1, accumulation) if (step * accumulation + micro) % generate_every == 0]
        if anew and anew[0] not in chosen:
            chosen[-1] = anew[0]
    return frozenset(chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long prompts and completions are, in tokens."""

    prompt: int
    completion: int
    padded: bool
    """Whether rows of a batch differ in length, so that masks are not all ones."""

    def prompts(self, rows: int) -> list[list[int]]:
        return [[3] * self._length(self.prompt, row % 2 == 0) for row in range(rows)]

    def completions(self, rows: int) -> list[list[int]]:
        return [[4] * self._length(self.completion, row % 2 == 1 or rows == 1) for row in range(rows)]

    def _length(self, longest: int, is_longest: bool) -> int:
        return longest if is_longest or not self.padded else max(1, longest - 1)


def followed(trainer_class: Any, watch: Unwatched, plan: Course, lengths: Lengths, casting: str = "autocast") -> Any:
    """The trainer's class, which tells where it is and generates nothing."""
    import torch

    class FollowedTrainer(trainer_class):  # type: ignore[misc]
        seen_micro_steps = 0

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """It is there."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.device_placement = False
            self._leave_casting_to_whom_it_belongs()
            self.accelerator.backward = within(watch, "backward", self.accelerator.backward)
            self.accelerator.clip_grad_norm_ = self._clipping(self.accelerator.clip_grad_norm_)

        def _leave_casting_to_whom_it_belongs(self) -> None:
            """DeepSpeed's engine turns autocast off altogether; FSDP2 casts by itself, and the model is not wrapped for it."""
            if casting == "engine":
                self.accelerator.native_amp = False
            if casting == "wrapper":
                prepare = self.accelerator.prepare_model
                self.accelerator.prepare_model = lambda *args, **kwargs: self._without_autocast(prepare, *args, **kwargs)

        def _without_autocast(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before, self.accelerator.native_amp = self.accelerator.native_amp, False
            try:
                return prepare(*args, **kwargs)
            finally:
                self.accelerator.native_amp = before

        def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
            def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
                if not self._computes_step():
                    return torch.zeros(())
                watch.enter("optimizer")
                return clip(*args, **kwargs)

            return clip_grad_norm_

        def train(self, *args: Any, **kwargs: Any) -> Any:
            watch.mark_scoring([model for model in (self.model, getattr(self, "ref_model", None)) if model is not None])
            return super().train(*args, **kwargs)

        # The loop, and where in it the step is.

        def _step_number(self) -> int:
            return max(0, self.seen_micro_steps - 1) // int(self.args.gradient_accumulation_steps)

        def _computes_step(self) -> bool:
            return self._step_number() in plan.micro_steps

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            micro = self.seen_micro_steps % int(self.args.gradient_accumulation_steps)
            self.seen_micro_steps += 1
            step = self._step_number()
            if micro == 0 and step in plan.micro_steps:
                watch.begin_step(plan.number(step), last=step == max(plan.micro_steps))
            if micro not in plan.micro_steps.get(step, ()):
                return self._passed_over()
            watch.enter("forward")
            loss = super().training_step(model, inputs, *args, **kwargs)
            watch.see_gradients(model)
            return loss

        def _passed_over(self) -> Any:
            if hasattr(self, "_step"):
                self._step += 1
            if not self._computes_step():
                self.accelerator.gradient_state._set_sync_gradients(False)  # nothing to step with
            return torch.zeros((), device=self.accelerator.device)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super()._prepare_inputs(*args, **kwargs)
            watch.see_inputs([inputs, getattr(self, "_buffered_inputs", None)])
            return inputs

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            watch.enter("forward")
            return super().compute_loss(*args, **kwargs)

        # What generates.

        def _tokenize_prompts(self, prompts: Any) -> Any:
            return lengths.prompts(len(prompts)), None, {}

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            completions = lengths.completions(len(prompt_ids))
            if "Rloo" in trainer_class.__name__ or "RLOO" in trainer_class.__name__:
                return completions
            return completions, [[0.0] * len(ids) for ids in completions] if self.use_vllm else None

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with watch.inside("rollout"):
                return super()._generate(*args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with watch.inside("reward"):
                return super()._calculate_rewards(*args, **kwargs)

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            with watch.inside("score"):
                batch = super()._generate_and_score_completions(*args, **kwargs)
            watch.see_inputs(batch)
            return batch

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            """Scores chunk after chunk: of more than three, the others repeat them."""
            rows, few = len(input_ids), ENOUGH_CHUNKS * (batch_size or len(input_ids))
            score = super()._get_per_token_logps_and_entropies
            if torch.is_grad_enabled() or rows <= few or not watch.leaves_out_repeats:
                return score(model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs)
            with watch.standing_for(rows / few):
                found = score(model, input_ids[:few], attention_mask[:few], logits_to_keep, batch_size, *args, **kwargs)
            return tuple(each if each is None or each.dim() == 0 else each.new_empty((rows, *each.shape[1:])) for each in found)

        # Rows are taken in order: which ones meet in a batch is not left to chance.

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if hasattr(trainer_class, "_generate_single_turn"):
                return super()._get_train_sampler(*args, **kwargs)
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            watch.note("the pass before training that computes the reference log-probabilities is left out")
            return dataset.map(lambda row: {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0})

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    FollowedTrainer.__name__ = trainer_class.__name__
    return FollowedTrainer


def watcher(callback_class: Any, watch: Unwatched) -> Any:
    """The callback that tells of the optimizer's part of a step."""

    class Watcher(callback_class):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watch.enter("optimizer")

        def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if optimizer is not None:
                watch.see_optimizer(optimizer)

    return Watcher()
