"""TRL's training methods in one table, and those of them that generate: RLOO and online DPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..protocol import Arguments, Request, Settings
from . import hooks, seams
from .async_grpo_method import AsyncGrpoRun
from .offline_methods import DpoRun, KtoRun, RewardRun, SftRun
from .trace_plan import TracedLengths
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun
from .trainer_settings import ForcedLengths

COMPLETIONS = 2  # of online DPO, per prompt


class RlooRun(TrainerRun):
    """GRPO's loop with another advantage and another loss.

    Its generation returns completions without log-probabilities.
    """

    module = seams.RLOO
    names = ("RLOOConfig", "RLOOTrainer")

    @staticmethod
    def single_turn(trainer: Any, completions: list[list[int]]) -> Any:
        return completions


class OnlineDpoRun(TrainerRun):
    """Online DPO: each micro-step generates, compares and learns from two completions per prompt.

    Prompts are tokenised inside the generation, and get their length there.
    """

    module = seams.ONLINE_DPO
    names = ("OnlineDPOConfig", "OnlineDPOTrainer")
    in_scripts = has_cycles = takes_images = False

    def _config(
        self,
        config_class: Any,
        settings: Settings,
        max_steps: int,
    ) -> Any:
        """Set the completion length, and `max_length`, at which rows are cut on the left."""
        prompt_tokens = self.lengths.prompt or DEFAULT_PROMPT_TOKENS
        row_tokens = prompt_tokens + self.lengths.completion
        stated_length = int(settings.get("max_length") or row_tokens)
        max_length = min(stated_length, row_tokens)
        forced = {"max_new_tokens": self.lengths.completion, "max_length": max_length}
        all_settings = {**settings, **forced}
        return super()._config(config_class, all_settings, max_steps)

    def _arguments(
        self,
        trl: Any,
        config: Any,
        model: Any,
        data: Any,
        model_settings: Any,
    ) -> Arguments:
        """Add the reference under full tuning: under ZeRO-3 the trainer can't copy one."""
        arguments = super()._arguments(trl, config, model, data, model_settings)
        if arguments["peft_config"] is None:
            arguments["ref_model"] = self.loaded.another()
        return arguments

    def _hooks(self) -> dict[str, hooks.Hook]:
        recorder = self.recorder
        return {
            "training_step": hooks.in_phase(recorder, "forward"),
            "_generate": self._generate,
            "_calculate_rewards_from_functions": hooks.in_phase(recorder, "reward"),
            "_forward": self._forward,
        }

    def _generate(self, trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Hook of a generation: its prompts get their length."""
        tokenizer = trainer.processing_class
        trainer.processing_class = _FittingTokenizer(tokenizer, self.lengths)
        try:
            with self.recorder.inside("rollout"):
                return self.rollouts.turn(lambda: original(*args, **kwargs))
        finally:
            trainer.processing_class = tokenizer

    def _forward(
        self,
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
        """Hook of a forward pass: a scoring one, or one that is trained on, whose tokens count."""
        import torch

        if torch.is_grad_enabled():
            # As in the trainer: of a row that is too long, the start of the prompt is cut off.
            free_tokens = trainer.max_length - ids.size(1)
            room = max(0, free_tokens)
            first = prompt_mask.size(1) - min(prompt_ids.size(1), room)
            self.counts.add_batch({"prompt_mask": prompt_mask[:, first:], "completion_mask": mask})
        return hooks.scoring(self.recorder)(
            trainer, original, model, prompt_ids, prompt_mask, ids, mask, *args, **kwargs
        )

    # The trainer in a trace.

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        class SyntheticCompletions(plain):  # type: ignore[misc]
            def _generate(
                self,
                model: Any,
                prompts: Sequence[Any],
                images: Any = None,
            ) -> Any:
                rows = COMPLETIONS * len(prompts)
                device = self.accelerator.device
                prompt_ids, prompt_mask = _padded(lengths.prompts(rows), device, on_left=True)
                ids, mask = _padded(lengths.completions(rows), device, on_left=False)
                return prompt_ids, prompt_mask, ids, mask, None

        SyntheticCompletions.__name__ = plain.__name__
        return SyntheticCompletions

    @classmethod
    def traced_arguments(cls, spec: Request, reference: Callable[[], Any]) -> Arguments:
        return {**super().traced_arguments(spec, reference), "ref_model": reference()}


class _FittingTokenizer:
    """Tokenizer whose prompts get their forced length before they are padded to each other."""

    def __init__(self, tokenizer: Any, lengths: ForcedLengths) -> None:
        self._tokenizer = tokenizer
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        padding = {}
        for name in ("padding", "padding_side", "return_tensors"):
            if name in kwargs:
                padding[name] = kwargs.pop(name)
        encoding = self._tokenizer(text=text, **kwargs)
        encoded = encoding["input_ids"]
        rows = [hooks.fit(list(ids), self._lengths) for ids in encoded]
        return self._tokenizer.pad({"input_ids": rows}, **padding)


def _padded(
    rows: Sequence[Sequence[int]],
    device: Any,
    *,
    on_left: bool,
) -> tuple[Any, Any]:
    """Return token ids and their mask, each row padded to the longest."""
    import torch

    longest = max(len(row) for row in rows)
    ids = []
    masks = []
    for row in rows:
        padding = [0] * (longest - len(row))
        tokens = list(row)
        mask = [1] * len(row)
        ids.append(padding + tokens if on_left else tokens + padding)
        masks.append(padding + mask if on_left else mask + padding)
    return torch.tensor(ids, device=device), torch.tensor(masks, device=device)


RUNS_BY_METHOD: Mapping[str, type[TrainerRun]] = {
    "grpo": TrainerRun,
    "rloo": RlooRun,
    "sft": SftRun,
    "dpo": DpoRun,
    "kto": KtoRun,
    "reward": RewardRun,
    "online-dpo": OnlineDpoRun,
    "async-grpo": AsyncGrpoRun,
}


def method_of(request: Request) -> type[TrainerRun]:
    return RUNS_BY_METHOD[str(request.get("method") or "grpo")]


def trainer_of(request: Request) -> Any:
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
