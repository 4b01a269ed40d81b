"""GRPO, and what the other training methods share with it: a run of the real loop, from
construction to end, and the trainer's differences in a trace.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..model_memory import layers_of
from . import hooks, rollouts, seams, step_timer, trainer_settings, training_data, vllm_engines

if TYPE_CHECKING:
    from .grpo_probe import Loaded
    from .traced_trainer import TracedLengths

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
    return None if number is None or not math.isfinite(float(number)) else float(number)


class TrainerRun:
    """One trainer of GRPO; subclasses for other methods override what differs."""

    module, names = seams.GRPO, ("GRPOConfig", "GRPOTrainer")
    oldest, newest = seams.OLDEST, seams.NEWEST  # releases that have it
    in_scripts = True  # scripts of the user's own may construct it
    # a generation serves several steps, and other candidates. False: each optimizer step is alike
    has_cycles = True
    ends_completions = True  # false: the trainer generates all completions to one length
    rewarded = True  # false: it gets no reward functions
    generates = True
    # In a trace.
    traced = True  # false: never
    takes_images = True
    scores = False  # its model has one output, a score
    attention: str | None = None  # of its model; None: as requested

    def __init__(
        self,
        loaded: Loaded,
        request: Mapping[str, Any],
        recorder: Any,
        lengths: trainer_settings.ForcedLengths,
        *,
        stop_below: float | None,
        found: dict[str, Any],
        worst: bool,
    ) -> None:
        self.loaded, self.request, self.recorder, self.lengths = loaded, request, recorder, lengths
        self.plan: Mapping[str, Any] = request["plan"]
        self.stop_below, self.found, self.worst = stop_below, found, worst
        self.reward_clock, self.seen = training_data.RewardClock(), hooks.LoopCounts()
        self.loop_seconds, self.steps = 0.0, 0

    @classmethod
    def classes(cls) -> tuple[Any, Any]:
        """Import the classes of the configuration and of the trainer."""
        module = importlib.import_module(cls.module)
        return getattr(module, cls.names[0]), getattr(module, cls.names[1])

    def go(self) -> dict[str, Any]:
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

    @classmethod
    @contextmanager
    def replaced(cls, replacements: Mapping[str, Any]) -> Iterator[None]:
        """Replace names of the trainer's module, where this release has them."""
        from ..tracing.patching import swapped

        names = vars(importlib.import_module(cls.module))
        with ExitStack() as stack:
            for name in replacements.keys() & names.keys():
                stack.enter_context(swapped(names, name, replacements[name]))
            yield

    # Overridden by other methods: the trainer in a trace.

    @staticmethod
    def traced_kernel(spec: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Make the attention of a method that brings its own known, around construction and
        loop.
        """
        return nullcontext()

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        return plain

    @classmethod
    def traced_arguments(
        cls, spec: Mapping[str, Any], reference: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the arguments beside those of every method; `reference` builds a model under
        full tuning.
        """

        def reward(completions: Any, **_: Any) -> list[float]:
            return [float(index % 2) for index, _ in enumerate(completions)]

        weights = spec["settings"].get("reward_weights")
        count = len(weights) if isinstance(weights, list) and weights else 1
        return {"reward_funcs": [reward] * count} if cls.rewarded else {}

    @staticmethod
    def traced_columns(config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        """Return the columns of the rows, as the trainer prepares them; those of a trainer that
        generates are prompts.
        """
        return {"prompt": ["a"] * rows}

    @staticmethod
    def single_turn(trainer: Any, completions: list[list[int]]) -> Any:
        """Return these completions as the trainer's generation does, with the log-probabilities
        of an engine.
        """
        return completions, [[0.0] * len(ids) for ids in completions] if trainer.use_vllm else None

    # Overridden by other methods, or by a user's script: the run.

    def _classes(self) -> tuple[Any, Any]:
        return self.classes()

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of the configuration and those of the model."""
        settings, model_settings = trainer_settings.split(
            self.request["settings"], config_class, trl.ModelConfig
        )
        if not self.rewarded:
            return settings, model_settings
        if not self.request.get("reward_funcs") and not (self.request.get("dataset") or {}).get(
            "reward_model_name_or_path"
        ):
            settings["reward_weights"] = None  # they belong to the user's own rewards
        return {**settings, **self._evaluation_settings()}, model_settings

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        arguments = trainer_settings.arguments_of(
            config_class,
            settings,
            lengths=self.lengths,
            device=self.loaded.device,
            max_steps=max_steps,
            seed=int(self.request.get("seed", 42)),
            folder=self.loaded.scratch / "output",
        )
        if self.loaded.server is not None:
            arguments |= self.loaded.server.arguments()
        config = config_class(**arguments)
        if self.recorder.world_size == 1 and getattr(config, "n_gpu", 1) > 1:
            # CUDA, initialised before they were hidden, shows a server's GPUs: no batch is spread
            # over them
            config._n_gpu = 1
        return config

    def _data(self, config: Any, plan: step_timer.MeasurementPlan) -> Any:
        """Return the rows that the plan consumes."""
        if not self.has_cycles:
            batch, group = (
                config.per_device_train_batch_size
                * config.gradient_accumulation_steps
                * self.recorder.world_size,
                1,
            )
        else:
            batch = group = config.generation_batch_size // config.num_generations
        return self._rows(rows=batch * plan.rounds_of_prompts, group=group, seed=config.seed)

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        """Return prompts of the user's dataset, or synthetic ones."""
        from datasets import Dataset

        source, tokens = (
            training_data.user_dataset(self.request.get("dataset")),
            self.lengths.prompt or DEFAULT_PROMPT_TOKENS,
        )
        if source is not None:
            return self._of_dataset(source, rows=rows, group=group, limit=self.lengths.prompt)
        if self.request.get("images"):
            return training_data.image_rows(
                self.processing, self.request["images"], "prompt", tokens, rows, generates=True
            )
        return Dataset.from_list(
            training_data.synthetic_prompts(rows, self.loaded.tokenizer, tokens, seed)
        )

    def _of_dataset(self, source: Any, *, rows: int, group: int, limit: int | None) -> Any:
        """Return the first rows, which get the forced length, or the longest ones if they have
        images.
        """
        if self.request.get("images"):
            return training_data.longest_rows(
                source, self.processing, limit=limit, rows=rows, group=group
            )
        return training_data.exactly(source, rows=rows, group=group)

    @functools.cached_property
    def processing(self) -> Any:
        """Tokenizer of the trainer; if rows have images, the model's processor: that of its
        folder, or a synthetic one.
        """
        loaded, images = self.loaded, self.request.get("images")
        if images is None:
            return loaded.tokenizer
        from transformers import AutoConfig, AutoProcessor

        if (loaded.folder / "preprocessor_config.json").is_file():
            return AutoProcessor.from_pretrained(str(loaded.folder))
        return training_data.processor_of(
            loaded.tokenizer, AutoConfig.from_pretrained(str(loaded.folder)), images
        )

    def _arguments(
        self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any
    ) -> dict[str, Any]:
        """Return the trainer's arguments, without its callbacks."""
        rewards = (self.request.get("reward_funcs"), self.request.get("dataset"), self.reward_clock)
        return {
            **({"reward_funcs": training_data.rewards(*rewards)} if self.rewarded else {}),
            "model": model,
            "args": config,
            "train_dataset": data,
            "processing_class": self.processing,
            "peft_config": trl.get_peft_config(model_settings),
        }

    def _injected(self, config: Any) -> dict[str, Any]:
        """Return arguments that are the probe's own, whatever a script gives."""
        return {}

    def _loader(self) -> Callable[..., Any] | None:
        """Return what replaces TRL's loader of reference models: a folder without weights can't
        be read.
        """
        return (
            None
            if self.loaded.request["model"]["weights"] == "real"
            else lambda *_, **__: self.loaded.another()
        )

    def _hooks(self) -> dict[str, hooks.Hook]:
        """Return the hooks of the trainer's methods; `seams` lists them all."""
        recorder = self.recorder

        def tokenize(_: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            ids, *rest = original(*args, **kwargs)
            if self.request.get(
                "images"
            ):  # an image's tokens can't be cut, and rows have their length
                return (ids, *rest)
            return ([hooks.fit(list(one), self.lengths) for one in ids], *rest)

        def generate_turn(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            if not trainer.model.training:  # an evaluation
                return original(*args, **kwargs)
            return self.rollouts.turn(lambda: original(*args, **kwargs))

        def generate_and_score(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            if trainer.model.training:
                self.seen.add_batch(batch)
            return batch

        return {
            "_tokenize_prompts": tokenize,
            "_generate": hooks.in_phase(recorder, "rollout"),
            "_generate_single_turn": generate_turn,
            "_calculate_rewards": hooks.in_phase(recorder, "reward"),
            "_get_per_token_logps_and_entropies": hooks.scoring(recorder),
            "compute_loss": hooks.in_phase(recorder, "forward"),
            "_generate_and_score_completions": generate_and_score,
        }

    def _construct(self, trainer_class: Any, arguments: dict[str, Any]) -> Any:
        return trainer_class(**arguments)

    # The run itself.

    def _measurement_plan(
        self, config_class: Any, settings: Mapping[str, Any]
    ) -> step_timer.MeasurementPlan:
        """Compute the units from the framework's own completed settings."""
        return step_timer.measurement_plan(
            self.plan, self._config(config_class, settings, 1) if self.has_cycles else None
        )

    def _prepare_engine(self, settings: Mapping[str, Any]) -> None:
        """Use the engine of the load, or install the factory that builds one in this run."""
        if settings.get("vllm_mode") == "server" and not self.loaded.request.get("server"):
            raise ValueError(
                "vllm_mode='server' needs a server of its own, and this load asked for none."
            )
        if self.loaded.request.get("server"):
            if self.loaded.server is not None:
                self.loaded.server.share_client(vllm_engines.with_vllm())
        elif self.loaded.engines is None:
            vllm_engines.install(self.loaded, self.recorder)
        else:
            self.loaded.engines.recorder = self.recorder

    def _rollouts(self, config: Any, settings: Mapping[str, Any]) -> rollouts.Rollouts:
        """Return the rollouts of this run, with a cached one if the plan allows it."""
        if not self.has_cycles:
            return rollouts.Rollouts(self.recorder)
        self.rollout_key = rollouts.key_of(
            settings,
            rows=config.generation_batch_size,
            prompt=self.lengths.prompt,
            completion=self.lengths.completion,
            typical=not self.worst,
            seed=config.seed,
        )
        source = (
            self.loaded.rollout_cache.get(self.rollout_key)
            if self.plan.get("reuse_rollouts")
            else None
        )
        # CUDA's allocator keeps blocks of a rollout through the training after it: one runs for its
        # effect there.
        return rollouts.Rollouts(
            self.recorder, source, real_first=0 if self.loaded.device == "cpu" else 1
        )

    def _build(
        self, trl: Any, settings: Mapping[str, Any], model_settings: Mapping[str, Any], plan: Any
    ) -> Any:
        import transformers

        # 1. Configuration, model and data.
        loaded, recorder = self.loaded, self.recorder
        config_class, trainer_class = self._classes()
        config = self._config(config_class, settings, plan.optimizer_steps)
        model_arguments = trl.ModelConfig(
            **trainer_settings.model_arguments(model_settings, loaded.request, trl.ModelConfig)
        )
        self.model = model = loaded.model_for(model_arguments.attn_implementation, recorder)
        hooks.watch_progress(model, layers_of(model), recorder, self.lengths)
        arguments = self._arguments(trl, config, model, self._data(config, plan), model_arguments)
        # 2. Timing.
        self.rollouts = self._rollouts(config, settings)
        self.timer = step_timer.step_timer(transformers.TrainerCallback, self, plan)
        # 3. The trainer.
        observed_class = hooks.observed(trainer_class, self._hooks())
        loader = self._loader()
        with self.replaced({} if loader is None else {seams.REFERENCE_LOADER: loader}):
            self.trainer = self._construct(observed_class, {**arguments, "callbacks": [self.timer]})
        self.trainer.remove_callback(transformers.PrinterCallback)
        hooks.observe(self.trainer, recorder, self.seen)
        return self.trainer

    def _train(self, trainer: Any) -> dict[str, Any]:
        import transformers

        world = int(os.environ.get("WORLD_SIZE") or 1) if self.recorder.world_size > 1 else 1
        if trainer.accelerator.num_processes != world:
            raise RuntimeError(
                f"the trainer runs on {trainer.accelerator.num_processes} processes, and was"
                f" started on {world}."
            )
        # The first candidate on an engine built it between seeding and sampling; a second seed
        # makes all candidates equal.
        transformers.set_seed(trainer.args.seed + trainer.accelerator.process_index)
        drawn = self.lengths.drawn
        draws = rollouts.LengthDraws(drawn, int(self.request.get("seed", 42))) if drawn else None
        began = time.perf_counter()
        try:
            with (
                hooks.counting_sleep(trainer, self.seen),
                rollouts.ending_at(draws, trainer, self.model),
            ):
                trainer.train()
                if self.worst:
                    self._evaluate_and_save(trainer)
        finally:
            self.loop_seconds, self.steps = time.perf_counter() - began, self.timer.steps
            self.found |= {
                "world_size": trainer.accelerator.num_processes,
                "optimizer_steps": self.steps,
            }
            self.found["effective"] = trainer_settings.effective_settings(
                trainer, self.seen, self.loaded.engines
            )
            self.found["exercised"] = self._exercised()
        self.found["gradient_norm"] = finite(self.seen.gradient_norm)
        self.loaded.doubtful = self.found["gradient_norm"] is None
        mean = round(fmean(drawn)) if drawn else self.lengths.completion
        return {"completion_tokens": mean, "drawn": bool(drawn), **self.timer.speed}

    def with_borrowed_peaks(self, memory: dict[str, Any]) -> dict[str, Any]:
        """Raise the peaks to those of the reused rollout."""
        if self.rollouts.source is None or not self.rollouts.borrowed:
            return memory
        peaks = dict(memory["phase_peak_bytes"])
        for phase, peak in self.rollouts.source.peak_bytes.items():
            peaks[phase] = max(peak, peaks.get(phase, 0))
        return {
            **memory,
            "phase_peak_bytes": peaks,
            "peak_bytes": max(memory["peak_bytes"], *peaks.values()),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Cache the generated completions for later candidates."""
        rollout = (
            self.rollouts.cacheable(memory.get("phase_peak_bytes") or {})
            if self.has_cycles
            else None
        )
        if rollout is not None:
            self.loaded.rollout_cache.put(self.rollout_key, rollout)

    def _exercised(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "optimizer_steps": self.steps,
            "generations": self.rollouts.run,
            "borrowed_generations": self.rollouts.borrowed,
            **{name: getattr(seen, name) for name in EVENTS},
            "longest_prompt": seen.longest_prompt or None,
            "longest_completion": seen.longest_completion or None,
            "seconds": self.loop_seconds,
            "cycles": self.timer.cycles,
        }

    def _evaluation_settings(self) -> dict[str, Any]:
        """Batch sizes and precision of the user's evaluation; its schedule is the probe's."""
        return dict((self.request.get("evaluation") or {}).get("settings") or {})

    def _evaluate_and_save(self, trainer: Any) -> None:
        """Evaluate one batch and save a checkpoint, as a real run does now and then."""
        if self.request.get("evaluation") is not None:
            self.seen.evaluations = 0
            if self.plan.get("evaluate"):
                # Training prompts at the longest lengths need as much memory as evaluation prompts.
                arguments = trainer.args
                generations = getattr(arguments, "num_generations_eval", None) or getattr(
                    arguments, "num_generations", 1
                )
                rows = -(
                    -arguments.per_device_eval_batch_size
                    * trainer.accelerator.num_processes
                    // generations
                )
                trainer.evaluate(eval_dataset=self._rows(rows=rows, group=1, seed=arguments.seed))
                self.seen.evaluations += 1
        if self.plan.get("save_checkpoint"):
            try:
                trainer._save_checkpoint(trainer.model, trial=None)
            finally:
                shutil.rmtree(self.loaded.scratch / "output", ignore_errors=True)
            self.seen.checkpoint_saves += 1
