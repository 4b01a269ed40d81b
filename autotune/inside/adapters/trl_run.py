"""One trainer, from construction to its end: a few cycles of the real loop, observed."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import (
    trl_effective,
    trl_engine,
    trl_evaluation,
    trl_hooks,
    trl_material,
    trl_model,
    trl_models,
    trl_rollouts,
    trl_settings,
    trl_units,
    trl_watch,
)
from .trl_imports import with_vllm
from .trl_loaded import Loaded, install_engines

MADE_UP_TOKENS = 64
"""Length of made-up prompts where none was asked for."""

WITH_REFERENCES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl.trainer.dpo_trainer")
READER = "create_model_from_path"

COUNTED = ("weight_syncs", "sleeps", "wakes", "checkpoint_saves", "evaluations", "shortest_prompt", "shortest_completion")
"""What is told as it was counted."""


class Run:
    """One trainer, from construction to its end."""

    names = ("GRPOConfig", "GRPOTrainer")

    def __init__(
        self, loaded: Loaded, request: Mapping[str, Any], stage: Any, lengths: trl_settings.Lengths, *, stop_below: float | None,
        found: dict[str, Any], worst: bool,
    ) -> None:  # fmt: skip
        self.loaded, self.request, self.stage, self.lengths = loaded, request, stage, lengths
        self.plan: Mapping[str, Any] = request["plan"]
        self.stop_below, self.found, self.worst = stop_below, found, worst
        self.clock, self.seen = trl_material.RewardClock(), trl_hooks.Seen()
        self.loop_seconds, self.steps = 0.0, 0

    def go(self) -> dict[str, Any]:
        import trl

        self.loaded.doubtful = True
        before = trl_engine.rendezvous()
        config_class, _ = self._classes(trl)
        settings, model_settings = self._settings(trl, config_class)
        try:
            course = self._course(config_class, settings)
            if settings.get("use_vllm"):
                self._prepare_engine(settings)
            trainer, timing = self._build(trl, settings, model_settings, course)
            try:
                return self._train(trainer, timing)
            finally:
                trainer.accelerator.free_memory()
        finally:
            trl_engine.restore(before)

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        """The configuration's and the trainer's."""
        return getattr(trl, self.names[0]), getattr(trl, self.names[1])

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was asked for, as the configuration's part and the model's."""
        settings, model_settings = trl_settings.split(self.request["settings"], config_class, trl.ModelConfig)
        if trl_material.are_made_up(self.request.get("reward_funcs"), self.request.get("dataset")):
            settings["reward_weights"] = None  # they weigh the user's own
        return {**settings, **trl_evaluation.settings_of(self.request)}, model_settings

    def _data(self, config: Any, course: trl_units.Course) -> Any:
        """As many prompts as the course takes."""
        group = config.generation_batch_size // config.num_generations
        return self._rows(rows=group * course.rounds_of_prompts, group=group, seed=config.seed)

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        """The first prompts of the user's dataset, or made-up ones."""
        return trl_material.prompts(
            self.request.get("dataset"), rows=rows, group=group, tokenizer=self.loaded.tokenizer,
            tokens=self.lengths.prompt or MADE_UP_TOKENS, seed=seed,
        )  # fmt: skip

    def _ours(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        """What the trainer is given beside its callbacks."""
        return {
            "model": model,
            "reward_funcs": trl_material.rewards(self.request.get("reward_funcs"), self.request.get("dataset"), self.clock),
            "args": config,
            "train_dataset": data,
            "processing_class": self.loaded.tokenizer,
            "peft_config": trl.get_peft_config(model_settings),
        }

    def _observed(self, trainer_class: Any) -> Any:
        return trl_hooks.observed(trainer_class, self.stage, self.lengths, self.seen, self.rollouts)

    def _construct(self, trainer_class: Any, given: dict[str, Any]) -> Any:
        return trainer_class(**given)

    def _prepare_engine(self, settings: Mapping[str, Any]) -> None:
        """The engine of the load; where that asked for none, the one that this first run builds."""
        if settings.get("vllm_mode") == "server" and not self.loaded.request.get("server"):
            raise ValueError("vllm_mode='server' needs a server of its own, and this load asked for none.")
        if self.loaded.request.get("server"):
            if self.loaded.server is not None:
                self.loaded.server.share_client(with_vllm())
        elif self.loaded.engines is None:
            install_engines(self.loaded, self.stage)
        else:
            self.loaded.engines.stage = self.stage

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        arguments = trl_settings.training_arguments(
            settings,
            lengths=self.lengths,
            device=self.loaded.device,
            max_steps=max_steps,
            seed=int(self.request.get("seed", 42)),
            folder=self.loaded.scratch / "output",
            known=trl_settings.known_fields(config_class),
        )
        if self.loaded.server is not None:
            arguments |= self.loaded.server.arguments()
        return config_class(**arguments)

    def _course(self, config_class: Any, settings: Mapping[str, Any]) -> trl_units.Course:
        """How many units to run: the framework itself says what its settings amount to."""
        config = self._config(config_class, settings, 1)
        unit = trl_units.unit_of(
            steps_per_generation=config.steps_per_generation,
            num_iterations=config.num_iterations,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
        return trl_units.course_of(unit, self.plan)

    def _ending(self) -> trl_watch.Ending:
        return trl_watch.Ending(
            enough_steps=int(self.plan["optimizer_steps"]),
            stop_below=self.stop_below,
            cycle_spread=float(self.plan.get("cycle_spread") or trl_watch.CYCLE_SPREAD),
            soak_seconds=self.plan.get("soak_seconds"),
        )

    def _rollouts(self, config: Any, settings: Mapping[str, Any]) -> trl_rollouts.Rollouts:
        """A rollout's key, and the one to take over where the plan allows it and this rig has it."""
        self.rollout_key = trl_rollouts.key_of(
            settings, rows=config.generation_batch_size, prompt=self.lengths.prompt, completion=self.lengths.completion,
            typical=not self.worst, seed=config.seed,
        )  # fmt: skip
        source = self.loaded.library.get(self.rollout_key) if self.plan.get("reuse_rollouts") else None
        # CUDA's allocator keeps blocks of a rollout through the training after it: one is run for what it leaves there.
        return trl_rollouts.Rollouts(self.stage, source, real_first=0 if self.loaded.device == "cpu" else 1)

    def _build(self, trl: Any, settings: Mapping[str, Any], model_settings: Mapping[str, Any], course: Any) -> tuple[Any, Any]:
        import transformers

        loaded, stage = self.loaded, self.stage
        config_class, trainer_class = self._classes(trl)
        config = self._config(config_class, settings, course.optimizer_steps)
        model_arguments = trl.ModelConfig(**trl_settings.model_arguments(model_settings, loaded.request, trl.ModelConfig))
        model = loaded.model_for(model_arguments.attn_implementation, stage)
        trl_hooks.foresee(model, trl_model.layers_of(model), stage, self.lengths)
        ours = self._ours(trl, config, model, self._data(config, course), model_arguments)
        self.rollouts = self._rollouts(config, settings)
        watcher, timing = trl_watch.watcher(
            transformers.TrainerCallback, stage, self.seen, course, self._ending(), rollouts=self.rollouts,
            reward_seconds=lambda: self.clock.seconds, over_ranks=self._over_ranks, weigh=self._weigh,
        )  # fmt: skip
        self.watcher = watcher
        with _reference_models_made_here(loaded):
            self.trainer = self._construct(self._observed(trainer_class), {**ours, "callbacks": [watcher]})
        self.trainer.remove_callback(transformers.PrinterCallback)
        trl_hooks.observe(self.trainer, stage, self.seen)
        return self.trainer, timing

    def _train(self, trainer: Any, timing: Any) -> dict[str, Any]:
        import transformers

        world = int(os.environ.get("WORLD_SIZE") or 1) if self.stage.world_size > 1 else 1
        if trainer.accelerator.num_processes != world:
            raise RuntimeError(f"the trainer runs on {trainer.accelerator.num_processes} processes, and was started on {world}.")
        # The first candidate on an engine built it between seeding and sampling; seeding again makes all candidates alike.
        transformers.set_seed(trainer.args.seed + trainer.accelerator.process_index)
        began = time.perf_counter()
        try:
            with trl_hooks.counting_sleep(trainer, self.seen):
                trainer.train()
                if self.worst:
                    self._after_training(trainer)
        finally:
            self.loop_seconds, self.steps = time.perf_counter() - began, self.watcher.steps
            self.found |= {"world_size": trainer.accelerator.num_processes, "optimizer_steps": self.steps}
            self.found["effective"] = trl_effective.read(trainer, self.seen, self.loaded.engines)
            self.found["exercised"] = self._exercised(timing)
        norm = None if self.seen.gradient_norm is None else float(self.seen.gradient_norm)
        self.found["gradient_norm"] = norm
        self.loaded.doubtful = norm is None or not math.isfinite(norm)
        return {
            "completion_tokens": self.lengths.completion,
            "cycle_seconds": timing.seconds,
            "cycle_loss_tokens": timing.loss_tokens,
            "prompt_tokens": timing.prompt_tokens,
            "phase_seconds": timing.phase_seconds,
            "user_reward_seconds": timing.reward_seconds,
            "cut_short": timing.cut_short,
            "borrowed_seconds": timing.borrowed_seconds,
        }

    def with_borrowed_peaks(self, found: dict[str, Any]) -> dict[str, Any]:
        """A rollout that was not run again needs what it needed."""
        if self.rollouts.source is None or not self.rollouts.borrowed:
            return found
        peaks = dict(found["phase_peak_bytes"])
        for phase, peak in self.rollouts.source.peak_bytes.items():
            peaks[phase] = max(peak, peaks.get(phase, 0))
        return {**found, "phase_peak_bytes": peaks, "peak_bytes": max(found["peak_bytes"], *peaks.values())}

    def remember(self, found: Mapping[str, Any]) -> None:
        """Keep what was generated for the candidates that come after this one."""
        kept = self.rollouts.kept(found.get("phase_peak_bytes") or {})
        if kept is not None:
            self.loaded.library.put(self.rollout_key, kept)

    def _exercised(self, timing: trl_watch.Timing) -> dict[str, Any]:
        """What this run went through, as counted while it did."""
        seen = self.seen
        return {
            "optimizer_steps": self.steps,
            "generations": self.rollouts.run,
            "borrowed_generations": self.rollouts.borrowed,
            **{name: getattr(seen, name) for name in COUNTED},
            "longest_prompt": seen.longest_prompt or None,
            "longest_completion": seen.longest_completion or None,
            "seconds": self.loop_seconds,
            "cycles": timing.cycles,
        }

    def _after_training(self, trainer: Any) -> None:
        """What a real run does now and then: evaluate, and save."""
        if trl_evaluation.wanted(self.request):
            self.seen.evaluations = 0
            if self.plan.get("evaluate"):
                trl_evaluation.evaluate(trainer, self._rows)
                self.seen.evaluations += 1
        if self.plan.get("save_checkpoint"):
            self._save(trainer)
            self.seen.checkpoint_saves += 1

    def _weigh(self) -> None:
        self.found["model_bytes"] = trl_models.weigh(self.trainer)

    def _over_ranks(self, seconds: float, tokens: int) -> tuple[float, int]:
        """The slowest rank's seconds and all ranks' tokens."""
        import torch

        accelerator = self.trainer.accelerator
        figures = accelerator.gather(torch.tensor([[seconds, float(tokens)]], device=accelerator.device))
        return float(figures[:, 0].max()), int(figures[:, 1].sum())

    def _save(self, trainer: Any) -> None:
        """What a checkpoint costs in memory, and not a byte of it kept."""
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
        finally:
            shutil.rmtree(self.loaded.scratch / "output", ignore_errors=True)


@contextmanager
def _reference_models_made_here(loaded: Loaded) -> Iterator[None]:
    """A trainer reads its reference model from the model's folder. Where that holds no weights, it gets a copy in memory."""
    found = [sys.modules[name] for name in WITH_REFERENCES if name in sys.modules]
    real = {module: reader for module in found if (reader := getattr(module, READER, None)) is not None}
    if loaded.request["model"]["weights"] == "real":
        real = {}
    for module in real:
        setattr(module, READER, lambda *_, **__: loaded.another())
    try:
        yield
    finally:
        for module, reader in real.items():
            setattr(module, READER, reader)
