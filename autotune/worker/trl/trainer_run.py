"""A run of GRPO's real loop, from construction to end, and what other methods' runs share with it.

`go` works in four stages: settings, plan, construction (`_build`) and the loop (`_train`).
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from ..model_memory import layers_of
from ..protocol import Arguments, Request, Result, Settings
from . import hooks, rollouts, seams, step_timer, trainer_settings, training_data, vllm_engines
from .loaded_model import LoadedModel
from .training_method import TrainingMethod

DEFAULT_PROMPT_TOKENS = 64  # length of synthetic prompts if none was requested
# Counts of a run that are reported as they are.
EVENTS = (
    "weight_syncs",
    "sleeps",
    "wakes",
    "checkpoint_saves",
    "evaluations",
    "shortest_prompt",
    "shortest_completion",
)


def finite(number: Any) -> float | None:
    """Return the number; None for one that overflowed, which no message can carry."""
    if number is None or not math.isfinite(float(number)):
        return None
    return float(number)


class TrainerRun(TrainingMethod):
    """Run of a trainer. Subclasses for other methods, or for a script, override stages."""

    def __init__(
        self,
        loaded: LoadedModel,
        request: Request,
        recorder: Any,
        lengths: trainer_settings.ForcedLengths,
        *,
        stop_below: float | None,
        result: Result,
        is_worst_case: bool,
    ) -> None:
        self.loaded = loaded
        self.request = request
        self.recorder = recorder
        self.plan: Request = request["plan"]
        self.lengths = lengths
        self.stop_below = stop_below
        self.result = result  # filled during the run: a run that fails reports what it has
        self.is_worst_case = is_worst_case
        self.varied_lengths = rollouts.VariedLengths(lengths.completion)
        self.reward_clock = training_data.RewardClock()
        self.counts = hooks.LoopCounts()
        self.loop_seconds = 0.0
        self.steps = 0

    def go(self) -> Result:
        """Run the trainer, and return the speed of its cycles."""
        import trl

        self.loaded.doubtful = True
        with vllm_engines.ranks_restored():
            config_class, _ = self._classes()
            settings, model_settings = self._settings(trl, config_class)
            plan = self._measurement_plan(config_class, settings)
            if settings.get("use_vllm"):
                self._prepare_engine(settings)
            trainer = self._build(trl, settings, model_settings, plan)
            try:
                return self._train(trainer)
            finally:
                trainer.accelerator.free_memory()

    # 1. Settings and plan.

    def _classes(self) -> tuple[Any, Any]:
        return self.classes()

    def _settings(self, trl: Any, config_class: Any) -> tuple[Arguments, Arguments]:
        """Return the settings of the configuration and those of the model."""
        settings, model_settings = trainer_settings.split(
            self.request["settings"], config_class, trl.ModelConfig
        )
        if not self.rewarded:
            return settings, model_settings
        data = self.request.get("dataset") or {}
        reward_functions = self.request.get("reward_funcs")
        if not (reward_functions or data.get("reward_model_name_or_path")):
            settings["reward_weights"] = None  # they belong to the user's own rewards
        return {**settings, **self._evaluation_settings()}, model_settings

    def _evaluation_settings(self) -> Arguments:
        """Batch sizes and precision of the user's evaluation; its schedule is the probe's."""
        evaluation = self.request.get("evaluation") or {}
        return dict(evaluation.get("settings") or {})

    def _measurement_plan(
        self, config_class: Any, settings: Settings
    ) -> step_timer.MeasurementPlan:
        """Compute the units from the framework's own completed settings."""
        config = self._config(config_class, settings, 1) if self.has_cycles else None
        return step_timer.measurement_plan(self.plan, config)

    def _config(
        self,
        config_class: Any,
        settings: Settings,
        max_steps: int,
    ) -> Any:
        seed = int(self.request.get("seed", 42))
        arguments = trainer_settings.arguments_of(
            config_class,
            settings,
            lengths=self.lengths,
            device=self.loaded.device,
            max_steps=max_steps,
            seed=seed,
            folder=self.loaded.scratch / "output",
        )
        if self.loaded.server is not None:
            arguments |= self.loaded.server.arguments()
        config = config_class(**arguments)
        gpu_count = getattr(config, "n_gpu", 1)
        if self.recorder.world_size == 1 and gpu_count > 1:
            # CUDA, initialised before they were hidden, shows a server's GPUs: no batch is spread
            # over them
            config._n_gpu = 1
        return config

    def _prepare_engine(self, settings: Settings) -> None:
        """Use the engine of the load, or install the factory that builds one in this run."""
        loaded = self.loaded
        has_server = bool(loaded.request.get("server"))
        if settings.get("vllm_mode") == "server" and not has_server:
            raise ValueError(
                "vllm_mode='server' needs a server of its own, and this load asked for none."
            )
        if has_server:
            if loaded.server is not None:
                loaded.server.share_client(vllm_engines.with_vllm())
        elif loaded.engines is None:
            vllm_engines.install(loaded, self.recorder)
        else:
            loaded.engines.recorder = self.recorder

    # 2. Construction.

    def _build(
        self,
        trl: Any,
        settings: Settings,
        model_settings: Settings,
        plan: Any,
    ) -> Any:
        import transformers

        # Configuration, model and data.
        loaded = self.loaded
        recorder = self.recorder
        config_class, trainer_class = self._classes()
        config = self._config(config_class, settings, plan.optimizer_steps)
        model_arguments = trl.ModelConfig(
            **trainer_settings.model_arguments(model_settings, loaded.request, trl.ModelConfig)
        )
        self.model = loaded.model_for(model_arguments.attn_implementation, recorder)
        layers = layers_of(self.model)
        hooks.watch_progress(self.model, layers, recorder, self.lengths)
        data = self._data(config, plan)
        arguments = self._arguments(trl, config, self.model, data, model_arguments)
        # Timing.
        self.rollouts = self._rollouts(config, settings)
        self.timer = self._step_timer(transformers.TrainerCallback, plan)
        arguments["callbacks"] = [self.timer]
        # The trainer.
        observed_class = hooks.observed(trainer_class, self._hooks())
        loader = self._loader()
        replacements = {} if loader is None else {seams.REFERENCE_LOADER: loader}
        with self.replaced(replacements):
            trainer = self._construct(observed_class, arguments)
        trainer.remove_callback(transformers.PrinterCallback)
        hooks.observe(trainer, recorder, self.counts)
        self.timer.trainer = trainer
        return trainer

    def _data(self, config: Any, plan: step_timer.MeasurementPlan) -> Any:
        """Return the rows that the plan consumes."""
        if self.has_cycles:
            min_rows = rows = config.generation_batch_size // config.num_generations
        else:
            min_rows = 1
            rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
            rows *= self.recorder.world_size
        return self._rows(
            rows=rows * plan.rounds_of_prompts,
            min_rows=min_rows,
            seed=config.seed,
        )

    def _rows(
        self,
        *,
        rows: int,
        min_rows: int,
        seed: int,
    ) -> Any:
        """Return prompts of the user's dataset, or synthetic ones."""
        from datasets import Dataset

        source = training_data.user_dataset(self.request.get("dataset"))
        if source is not None:
            return self._of_dataset(
                source,
                rows=rows,
                min_rows=min_rows,
                limit=self.lengths.prompt,
            )
        tokens = self.lengths.prompt or DEFAULT_PROMPT_TOKENS
        images = self.request.get("images")
        if images:
            return training_data.image_rows(
                self.processing, images, "prompt", tokens, rows, generates=True
            )
        prompts = training_data.synthetic_prompts(rows, self.loaded.tokenizer, tokens, seed)
        return Dataset.from_list(prompts)

    def _of_dataset(
        self,
        source: Any,
        *,
        rows: int,
        min_rows: int,
        limit: int | None,
    ) -> Any:
        """Return the first rows, which get the forced length, or the longest ones with images."""
        if not self.request.get("images"):
            return training_data.exactly(source, rows=rows, min_rows=min_rows)
        return training_data.longest_rows(
            source,
            self.processing,
            limit=limit,
            rows=rows,
            min_rows=min_rows,
        )

    @functools.cached_property
    def processing(self) -> Any:
        """Tokenizer of the trainer, or the model's processor if rows have images.

        The processor is that of the model's folder, or a synthetic one.
        """
        loaded = self.loaded
        images = self.request.get("images")
        if images is None:
            return loaded.tokenizer
        from transformers import AutoConfig, AutoProcessor

        folder = str(loaded.folder)
        if (loaded.folder / "preprocessor_config.json").is_file():
            return AutoProcessor.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        return training_data.processor_of(loaded.tokenizer, config, images)

    def _arguments(
        self,
        trl: Any,
        config: Any,
        model: Any,
        data: Any,
        model_settings: Any,
    ) -> Result:
        """Return the trainer's arguments, without its callbacks."""
        arguments: Arguments = {}
        if self.rewarded:
            arguments["reward_funcs"] = training_data.rewards(
                self.request.get("reward_funcs"), self.request.get("dataset"), self.reward_clock
            )
        return {
            **arguments,
            "model": model,
            "args": config,
            "train_dataset": data,
            "processing_class": self.processing,
            "peft_config": trl.get_peft_config(model_settings),
        }

    def _injected(self, config: Any) -> Arguments:
        """Return arguments that are the probe's own, whatever a script gives."""
        return {}

    def _rollouts(self, config: Any, settings: Settings) -> rollouts.Rollouts:
        """Return the rollouts of this run, with a cached one if the plan allows it."""
        if not self.has_cycles:
            return rollouts.Rollouts(self.recorder)
        self.rollout_key = rollouts.key_of(
            settings,
            rows=config.generation_batch_size,
            prompt=self.lengths.prompt,
            completion=self.lengths.completion,
            typical=not self.is_worst_case,
            seed=config.seed,
        )
        source = None
        if self.plan.get("reuse_rollouts"):
            source = self.loaded.rollout_cache.get(self.rollout_key)
        # CUDA's allocator keeps blocks of a rollout through the training after it: one runs for its
        # effect there.
        real_first = 0 if self.loaded.device == "cpu" else 1
        return rollouts.Rollouts(self.recorder, source, real_first=real_first)

    def _step_timer(
        self, callback_class: Any, plan: step_timer.MeasurementPlan
    ) -> step_timer.StepTimer:
        class TimerCallback(step_timer.StepTimer, callback_class):  # type: ignore[misc]
            pass

        return TimerCallback(
            plan,
            step_timer.StopRule.of_plan(self.plan, self.stop_below),
            recorder=self.recorder,
            counts=self.counts,
            rollouts=self.rollouts,
            reward_clock=self.reward_clock,
        )

    def _hooks(self) -> dict[str, hooks.Hook]:
        """Return the hooks of the trainer's methods; `seams` lists them all."""

        def tokenize(_: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            prompts, *extra = original(*args, **kwargs)
            # An image's tokens can't be cut, and rows with images have their length already.
            if not self.request.get("images"):
                prompts = [hooks.fit(list(prompt), self.lengths) for prompt in prompts]
            return (prompts, *extra)

        def generate_turn(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            if not trainer.model.training:  # an evaluation
                return original(*args, **kwargs)
            return self.rollouts.turn(lambda: original(*args, **kwargs))

        def generate_and_score(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            if trainer.model.training:
                self.counts.add_batch(batch)
            return batch

        recorder = self.recorder
        return {
            "_tokenize_prompts": tokenize,
            "_generate": hooks.in_phase(recorder, "rollout"),
            "_generate_single_turn": generate_turn,
            "_calculate_rewards": hooks.in_phase(recorder, "reward"),
            "_get_per_token_logps_and_entropies": hooks.scoring(recorder),
            "compute_loss": hooks.in_phase(recorder, "forward"),
            "_generate_and_score_completions": generate_and_score,
        }

    def _loader(self) -> Callable[..., Any] | None:
        """Return the replacement of TRL's loader of reference models.

        A folder without weights can't be read. None: TRL's own loader stays.
        """
        if self.loaded.request["model"]["weights"] == "real":
            return None
        return lambda *_, **__: self.loaded.another()

    def _construct(self, trainer_class: Any, arguments: Arguments) -> Any:
        return trainer_class(**arguments)

    # 3. The loop.

    def _train(self, trainer: Any) -> Result:
        import transformers

        self._check_world_size(trainer)
        # The first candidate on an engine built it between seeding and sampling; a second seed
        # makes all candidates equal.
        process_index = trainer.accelerator.process_index
        transformers.set_seed(trainer.args.seed + process_index)
        drawn = self.lengths.drawn
        draws: rollouts.Draws | None = None
        seed = int(self.request.get("seed", 42))
        if self.lengths.varied:
            draws = self.varied_lengths
        elif drawn:
            draws = rollouts.LengthDraws(drawn, seed)
        began = time.perf_counter()
        try:
            with (
                hooks.counting_sleep(trainer, self.counts),
                rollouts.ending_at(draws, trainer, self.model),
            ):
                trainer.train()
                if self.is_worst_case:
                    self._evaluate_and_save(trainer)
        finally:
            self.loop_seconds = time.perf_counter() - began
            self._report(trainer)
        self.result["gradient_norm"] = finite(self.counts.gradient_norm)
        self.loaded.doubtful = self.result["gradient_norm"] is None
        usual_length = self.lengths.completion
        mean_completion = round(fmean(drawn)) if drawn else usual_length
        return {"completion_tokens": mean_completion, "drawn": bool(drawn), **self.timer.speed}

    def _check_world_size(self, trainer: Any) -> None:
        world_size = 1
        if self.recorder.world_size > 1:
            world_size = int(os.environ.get("WORLD_SIZE") or 1)
        processes = trainer.accelerator.num_processes
        if processes != world_size:
            raise RuntimeError(
                f"the trainer runs on {processes} processes, and was started on {world_size}."
            )

    def _report(self, trainer: Any) -> None:
        """Record the facts of the loop, also of one that failed."""
        self.steps = self.timer.steps
        if self.timer.model_bytes is not None:
            self.result["model_bytes"] = self.timer.model_bytes
        self.result["world_size"] = trainer.accelerator.num_processes
        self.result["optimizer_steps"] = self.steps
        self.result["effective"] = trainer_settings.effective_settings(
            trainer, self.counts, self.loaded.engines
        )
        self.result["exercised"] = self._exercised()

    def _exercised(self) -> Result:
        """Return what happened in the loop, so that a measurement without it is recognised."""
        counts = self.counts
        return {
            "optimizer_steps": self.steps,
            "generations": self.rollouts.run,
            "borrowed_generations": self.rollouts.borrowed,
            **{name: getattr(counts, name) for name in EVENTS},
            "longest_prompt": counts.longest_prompt or None,
            "longest_completion": counts.longest_completion or None,
            "seconds": self.loop_seconds,
            "cycles": self.timer.cycles,
        }

    def _evaluate_and_save(self, trainer: Any) -> None:
        """Evaluate one batch and save a checkpoint, as a real run does now and then."""
        if self.request.get("evaluation") is not None:
            self.counts.evaluations = 0
            if self.plan.get("evaluate"):
                # Training prompts at the longest lengths need as much memory as evaluation prompts.
                rows = _evaluation_rows(trainer)
                data = self._rows(
                    rows=rows,
                    min_rows=1,
                    seed=trainer.args.seed,
                )
                trainer.evaluate(eval_dataset=data)
                self.counts.evaluations += 1
        if self.plan.get("save_checkpoint"):
            try:
                trainer._save_checkpoint(trainer.model, trial=None)
            finally:
                shutil.rmtree(self.loaded.scratch / "output", ignore_errors=True)
            self.counts.checkpoint_saves += 1

    # 4. Afterwards.

    def with_borrowed_peaks(self, memory: Result) -> Result:
        """Raise the peaks to those of the reused rollout."""
        source = self.rollouts.source
        if source is None or not self.rollouts.borrowed:
            return memory
        peaks = dict(memory["phase_peak_bytes"])
        for phase, peak in source.peak_bytes.items():
            recorded = peaks.get(phase, 0)
            peaks[phase] = max(peak, recorded)
        return {
            **memory,
            "phase_peak_bytes": peaks,
            "peak_bytes": max(memory["peak_bytes"], *peaks.values()),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Cache the generated completions for later candidates."""
        if not self.has_cycles:
            return
        phase_peaks = memory.get("phase_peak_bytes") or {}
        rollout = self.rollouts.cacheable(phase_peaks)
        if rollout is not None:
            self.loaded.rollout_cache.put(self.rollout_key, rollout)


def _evaluation_rows(trainer: Any) -> int:
    """Return the prompts of one evaluation batch over all ranks."""
    arguments = trainer.args
    generations: Any = getattr(arguments, "num_generations_eval", None)
    generations = generations or getattr(arguments, "num_generations", 1)
    completions = arguments.per_device_eval_batch_size * trainer.accelerator.num_processes
    prompts: int = math.ceil(completions / generations)
    return prompts
