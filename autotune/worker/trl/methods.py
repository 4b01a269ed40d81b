"""TRL's training methods in one table, and those of them that generate: RLOO and online DPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import hooks, seams
from .async_grpo_method import AsyncGrpoRun
from .offline_methods import DpoRun, KtoRun, RewardRun, SftRun
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths
    from .trainer_settings import ForcedLengths

COMPLETIONS = 2  # of online DPO, per prompt


class RlooRun(TrainerRun):
    """GRPO's loop with another advantage and another loss. Its generation returns the
    completions alone.
    """

    module, names = seams.RLOO, ("RLOOConfig", "RLOOTrainer")

    @staticmethod
    def single_turn(trainer: Any, completions: list[list[int]]) -> Any:
        return completions


class OnlineDpoRun(TrainerRun):
    """Online DPO: each micro-step generates, compares and learns from two completions per prompt.

    Prompts are tokenised inside the generation, and get their length there.
    """

    module, names = seams.ONLINE_DPO, ("OnlineDPOConfig", "OnlineDPOTrainer")
    in_scripts = has_cycles = takes_images = False

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """Set the completion length, and `max_length`, at which rows are cut on the left."""
        row = (self.lengths.prompt or DEFAULT_PROMPT_TOKENS) + self.lengths.completion
        longest = min(int(settings.get("max_length") or row), row)
        forced = {"max_new_tokens": self.lengths.completion, "max_length": longest}
        return super()._config(config_class, {**settings, **forced}, max_steps)

    def _arguments(
        self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any
    ) -> dict[str, Any]:
        """Add the reference under full tuning: under ZeRO-3 the trainer can't copy one."""
        arguments = super()._arguments(trl, config, model, data, model_settings)
        return (
            arguments
            if arguments["peft_config"] is not None
            else {**arguments, "ref_model": self.loaded.another()}
        )

    def _hooks(self) -> dict[str, hooks.Hook]:
        import torch

        recorder, scoring = self.recorder, hooks.scoring(self.recorder)

        def generate(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            tokenizer = trainer.processing_class
            trainer.processing_class = _FittingTokenizer(tokenizer, self.lengths)
            try:
                with recorder.inside("rollout"):
                    return self.rollouts.turn(lambda: original(*args, **kwargs))
            finally:
                trainer.processing_class = tokenizer

        def forward(
            trainer: Any,
            original: Any,
            model: Any,
            prompt_ids: Any,
            prompt_mask: Any,
            ids: Any,
            mask: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if torch.is_grad_enabled():
                kept = max(0, min(prompt_ids.size(1), trainer.max_length - ids.size(1)))
                self.seen.add_batch(
                    {
                        "prompt_mask": prompt_mask[:, prompt_mask.size(1) - kept :],
                        "completion_mask": mask,
                    }
                )
            return scoring(
                trainer, original, model, prompt_ids, prompt_mask, ids, mask, *args, **kwargs
            )

        return {
            "training_step": hooks.in_phase(recorder, "forward"),
            "_generate": generate,
            "_calculate_rewards_from_functions": hooks.in_phase(recorder, "reward"),
            "_forward": forward,
        }

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        import torch

        class SyntheticCompletions(plain):  # type: ignore[misc]
            def _generate(self, model: Any, prompts: Sequence[Any], images: Any = None) -> Any:
                rows = COMPLETIONS * len(prompts)
                prompt_ids, completion_ids = lengths.prompts(rows), lengths.completions(rows)
                device = self.accelerator.device
                return (
                    *_padded(torch, prompt_ids, device, left=True),
                    *_padded(torch, completion_ids, device, left=False),
                    None,
                )

        SyntheticCompletions.__name__ = plain.__name__
        return SyntheticCompletions

    @classmethod
    def traced_arguments(
        cls, spec: Mapping[str, Any], reference: Callable[[], Any]
    ) -> dict[str, Any]:
        return {**super().traced_arguments(spec, reference), "ref_model": reference()}


class _FittingTokenizer:
    """Tokenizer whose prompts get their forced length before they are padded to each other."""

    def __init__(self, tokenizer: Any, lengths: ForcedLengths) -> None:
        self._tokenizer, self._lengths = tokenizer, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        padding = {
            name: kwargs.pop(name)
            for name in ("padding", "padding_side", "return_tensors")
            if name in kwargs
        }
        rows = [
            hooks.fit(list(ids), self._lengths)
            for ids in self._tokenizer(text=text, **kwargs)["input_ids"]
        ]
        return self._tokenizer.pad({"input_ids": rows}, **padding)


def _padded(
    torch: Any, rows: Sequence[Sequence[int]], device: Any, *, left: bool
) -> tuple[Any, Any]:
    """Return token ids and their mask, each row padded to the longest."""
    longest = max(len(row) for row in rows)
    fill = [[0] * (longest - len(row)) for row in rows]
    ids = [[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, fill, strict=True)]
    masks = [
        [*gap, *[1] * len(row)] if left else [*[1] * len(row), *gap]
        for row, gap in zip(rows, fill, strict=True)
    ]
    return torch.tensor(ids, device=device), torch.tensor(masks, device=device)


METHODS: Mapping[str, type[TrainerRun]] = {
    "grpo": TrainerRun,
    "rloo": RlooRun,
    "sft": SftRun,
    "dpo": DpoRun,
    "kto": KtoRun,
    "reward": RewardRun,
    "online-dpo": OnlineDpoRun,
    "async-grpo": AsyncGrpoRun,
}


def method_of(request: Mapping[str, Any]) -> type[TrainerRun]:
    return METHODS[str(request.get("method") or "grpo")]


def trainer_of(request: Mapping[str, Any]) -> Any:
    """Import the method's trainer class."""
    method = method_of(request)
    try:
        return method.classes()[1]
    except (ModuleNotFoundError, AttributeError) as error:
        import trl

        raise seams.UnsupportedFramework(
            f"TRL {trl.__version__} has no {method.names[1]} in {method.module}; releases"
            f" {method.oldest} to {method.newest} have: pip install 'trl=={method.newest}'"
        ) from error
