"""TRL's own trainers and loop without generation and without repeated micro-steps.

The same class runs on fake tensors, with annotations, and on real ones, without.
"""

from __future__ import annotations

from typing import Any

from ..tracing import fsdp2
from ..tracing.annotators import NullAnnotator
from ..tracing.patching import attribute
from .hooks import in_phase, observed, within
from .trace_plan import TracedLengths, TracePlan
from .training_method import TrainingMethod

# Traced chunks of a batch that is scored in chunks: first, middle and last contain all transitions.
MAX_CHUNKS = 3
# Phases of whole methods, in those trainers that have them.
PHASE_BY_FUNCTION = {
    "_generate": "rollout",
    "_calculate_rewards": "reward",
    "_calculate_rewards_from_functions": "reward",
}


def traced(
    method: type[TrainingMethod],
    trainer_class: Any,
    annotator: NullAnnotator,
    plan: TracePlan,
    lengths: TracedLengths,
    *,
    casting: str,
    tokenizes: bool,
) -> Any:
    """Return a subclass that annotates its phases and uses synthetic completions.

    casting: what casts the operands, "autocast", the "engine" or the "wrapper" of sharding.
    tokenizes: prompts have their length already, and images, so that the trainer processes them
    itself.
    """
    import torch

    phase_hooks = {}
    for name, phase in PHASE_BY_FUNCTION.items():
        if hasattr(trainer_class, name):
            phase_hooks[name] = in_phase(annotator, phase)

    class TracedTrainer(observed(trainer_class, phase_hooks)):  # type: ignore[misc]
        started_micro_steps = 0

        # 1. Construction.

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """Do nothing: the model is on its device."""

        def create_accelerator_and_postprocess(self) -> None:
            # It was for TRL's constructor alone: there is no engine here.
            self.args.deepspeed_plugin = None
            super().create_accelerator_and_postprocess()
            accelerator = self.accelerator
            accelerator.device_placement = False
            if casting == "engine":  # DeepSpeed's engine turns autocast off
                accelerator.native_amp = False
            if casting == "wrapper":  # FSDP2 casts itself, so accelerate does not wrap the model
                prepare = accelerator.prepare_model

                def prepare_without_autocast(*args: Any, **kwargs: Any) -> Any:
                    with attribute(accelerator, "native_amp", False):
                        return prepare(*args, **kwargs)

                accelerator.prepare_model = prepare_without_autocast
            clip = accelerator.clip_grad_norm_

            def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
                if self._step_number() not in plan.micro_steps:
                    return torch.zeros(())
                annotator.enter("optimizer")
                return clip(*args, **kwargs)

            accelerator.clip_grad_norm_ = clip_grad_norm_
            accelerator.backward = within(annotator, "backward", accelerator.backward)

        # 2. The loop.

        def train(self, *args: Any, **kwargs: Any) -> Any:
            annotator.mark_scoring(models_of(self))
            return super().train(*args, **kwargs)

        def _step_number(self) -> int:
            accumulation = int(self.args.gradient_accumulation_steps)
            return max(0, self.started_micro_steps - 1) // accumulation

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            micro_step = self.started_micro_steps % int(self.args.gradient_accumulation_steps)
            self.started_micro_steps += 1
            step = self._step_number()
            if micro_step == 0 and step in plan.micro_steps:
                last_step = max(plan.micro_steps)
                annotator.begin_step(plan.number(step), last=step == last_step)
            if micro_step not in plan.micro_steps.get(step, ()):
                return self._skip_micro_step(step)
            annotator.enter("forward")
            loss = super().training_step(model, inputs, *args, **kwargs)
            annotator.mark_gradients(model)
            return loss

        def _skip_micro_step(self, step: int) -> Any:
            if hasattr(self, "_step"):
                self._step += 1
            if step not in plan.micro_steps:  # no gradients for an optimizer step
                self.accelerator.gradient_state._set_sync_gradients(False)
            return torch.zeros((), device=self.accelerator.device)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super()._prepare_inputs(*args, **kwargs)
            buffered = getattr(self, "_buffered_inputs", None)
            annotator.mark_inputs([inputs, buffered])
            return inputs

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            annotator.enter("forward")
            return super().compute_loss(*args, **kwargs)

        # 3. Generation and scoring.

        def _tokenize_prompts(self, prompts: Any) -> Any:
            if tokenizes:
                return super()._tokenize_prompts(prompts)
            return lengths.prompts(len(prompts)), None, {}

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.args.use_vllm:
                fsdp2.begin_rollout(self.model)
            drawn = lengths.completions(len(prompt_ids))
            return method.single_turn(self, drawn)

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

            def score(ids: Any, mask: Any) -> Any:
                return super(TracedTrainer, self)._get_per_token_logps_and_entropies(
                    model, ids, mask, logits_to_keep, batch_size, *args, **kwargs
                )

            rows = len(input_ids)
            traced_rows = MAX_CHUNKS * (batch_size or rows)
            if torch.is_grad_enabled() or rows <= traced_rows or not annotator.skips_repeats:
                return score(input_ids, attention_mask)
            with annotator.repeated_work(rows / traced_rows):
                outputs = score(input_ids[:traced_rows], attention_mask[:traced_rows])
            return tuple(_with_rows(output, rows) for output in outputs)

        # 4. Data: rows in their order, so that their combination in batches is deterministic.

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            if hasattr(trainer_class, "_generate_single_turn"):
                return super()._get_train_sampler(*args, **kwargs)
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            annotator.note(
                "the pass before training that computes the reference log-probabilities is left out"
            )
            names = ("ref_chosen_logps", "ref_rejected_logps")
            if "label" in dataset.column_names:  # KTO
                names = ("ref_logps", "ref_KL_logps")
            return dataset.map(lambda row: dict.fromkeys(names, 0.0))

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    TracedTrainer.__name__ = trainer_class.__name__
    return TracedTrainer


def models_of(trainer: Any) -> list[Any]:
    """Return the trained model, and a reference if there is one."""
    reference = getattr(trainer, "ref_model", None)
    return [model for model in (trainer.model, reference) if model is not None]


def _with_rows(output: Any, rows: int) -> Any:
    """Return a tensor like this output, of a batch with this number of rows."""
    if output is None or output.dim() == 0:
        return output
    return output.new_empty((rows, *output.shape[1:]))


def trace_watcher(callback_class: Any, annotator: NullAnnotator) -> Any:
    """Return a callback that annotates the optimizer's part of a step."""

    class TraceWatcher(callback_class):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            annotator.enter("optimizer")

        def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if optimizer is not None:
                annotator.mark_optimizer(optimizer)

    return TraceWatcher()
