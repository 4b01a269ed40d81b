"""Adapter for the user's script: a trainer per candidate from the script's own arguments.

The script runs once per load, up to the start of training (`script_capture`); everything it loaded
stays for the candidates. Lengths, phases and limits are those of `grpo_probe`; only the origin of
model and data differs.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from ..protocol import Arguments, Request
from ..tracing.patching import attribute
from . import grpo_probe, methods, trainer_settings, training_data
from .captured_trainer import CapturedTrainer, defaults_of
from .former_arguments import FormerArguments
from .grpo_probe import release as release
from .grpo_probe import supported as supported
from .grpo_probe import warm as warm
from .loaded_model import LoadedModel
from .rank_environment import is_sharded
from .script_capture import catch, present_arguments
from .trainer_run import TrainerRun

# Two forms of one setting; a configuration accepts one of them.
GENERATION_SHAPE = ("generation_batch_size", "steps_per_generation")
# Arguments with which a generation has several turns and cannot be reused.
CUSTOM_GENERATION = frozenset({"tools", "environment_factory", "rollout_func"})
# Settings of an adapter that may be searched, and their names in PEFT's configuration.
SEARCHED_IN_ADAPTER = (("lora_r", "r"), ("lora_alpha", "lora_alpha"))


@dataclass(kw_only=True)
class LoadedScript(LoadedModel):
    """Model, tokenizer and trainer arguments of the script."""

    captured: CapturedTrainer | None = None

    def __post_init__(self) -> None:
        if not is_sharded(self.request):
            self.run_script()

    def run_script(self) -> CapturedTrainer:
        script = self.request["script"]
        former = FormerArguments(script.get("former") or {})
        self.captured = catch(script["path"], script["arguments"], script["method"], former)
        self.tokenizer = self.captured.arguments.get("processing_class") or self.tokenizer
        return self.captured

    @property
    def gives_model(self) -> bool:
        """True if the script loads its model itself instead of naming it."""
        return self.request["script"]["gives_model"]  # type: ignore[no-any-return]

    def build_model(self) -> None:
        """Take the script's model, or load the named one. Spoilt weights need a new run."""
        if not self.gives_model:
            super().build_model()
            return
        captured = self.captured
        if captured is None or self.candidates:
            captured = self.run_script()
        self.model = model = captured.arguments["model"]
        # A quantised or partitioned model stays on the device that the script chose.
        stays = getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None)
        if self.device == "cuda" and stays is None:
            import torch

            self.model = model.to(f"cuda:{torch.cuda.current_device()}")

    def model_for(self, attention: str | None, recorder: Any) -> Any:
        if is_sharded(self.request):
            with recorder.inside("load"):
                captured = self.run_script()
            if self.gives_model:
                return captured.arguments["model"]
        return super().model_for(attention, recorder)


def load(request: Request, recorder: Any) -> LoadedModel:
    """Run the script up to its trainer, then load the named model and a requested engine."""
    if request["script"]["gives_model"]:
        # A reference model is a copy of the script's, and the trainer fills the engine anyway.
        request = {**request, "model": {**request["model"], "weights": "random"}}
    return grpo_probe.load(request, recorder, LoadedScript)


def measure(
    loaded: LoadedScript,
    request: Request,
    recorder: Any,
) -> Arguments:
    plan = request["plan"]
    if loaded.captured is not None:
        arguments = loaded.captured.arguments
        if any(arguments.get(name) for name in CUSTOM_GENERATION):
            plan = {**plan, "reuse_rollouts": False}
    # The script's own rows; at typical lengths they are not padded.
    dataset = request.get("dataset") or {"own": True}
    request = {**request, "plan": plan, "dataset": dataset}
    return grpo_probe.measure(loaded, request, recorder, _run_class(loaded.request))


def _run_class(request: Request) -> type[TrainerRun]:
    """Return the run of the script's method with the script's own arguments."""
    method = methods.method_of(request)
    return type(f"Script{method.__name__}", (ScriptRun, method), {})


class ScriptRun(TrainerRun):
    """Trainer of the script's class from its own arguments; a mixin over any method's run."""

    loaded: LoadedScript

    @property
    def captured(self) -> CapturedTrainer:
        return self.loaded.captured or self.loaded.run_script()

    # 1. Settings.

    def _classes(self) -> tuple[Any, Any]:
        config = self.captured.arguments.get("args")
        config_class = self.classes()[0] if config is None else type(config)
        return config_class, self.captured.trainer_class

    def _settings(self, trl: Any, config_class: Any) -> tuple[Arguments, Arguments]:
        """Return the script's settings, overridden by the candidate's."""
        settings, model_settings = trainer_settings.split(
            self.request["settings"], config_class, trl.ModelConfig
        )
        script_settings = self._script_settings()
        if set(GENERATION_SHAPE) & set(settings):
            for name in GENERATION_SHAPE:
                script_settings.pop(name, None)
        evaluation_settings = self._evaluation_settings()
        return {**script_settings, **settings, **evaluation_settings}, model_settings

    def _script_settings(self) -> Arguments:
        """Return the values of the script's configuration that are not defaults."""
        if self.captured.configured is not None:
            return self.captured.configured.settings()
        config = self.captured.arguments.get("args")
        settings = {}
        if config is not None:
            for name, default in defaults_of(config).items():
                value = getattr(config, name)
                if value != default:
                    settings[name] = value
        return settings

    # 2. Construction.

    def _rows(
        self,
        *,
        rows: int,
        min_rows: int,
        seed: int,
    ) -> Any:
        source = self.captured.arguments["train_dataset"]
        return self._of_dataset(
            source,
            rows=rows,
            min_rows=min_rows,
            limit=None,
        )

    def _arguments(
        self,
        trl: Any,
        config: Any,
        model: Any,
        data: Any,
        model_settings: Any,
    ) -> Arguments:
        script_arguments = self.captured.arguments
        arguments = {
            "model": model,
            "args": config,
            "train_dataset": data,
            "eval_dataset": None,
            "processing_class": self.loaded.tokenizer,
        }
        if "quantization_config" in script_arguments:
            arguments["quantization_config"] = None  # the model is loaded already
        if script_arguments.get("peft_config") is not None:
            arguments["peft_config"] = self._adapter(script_arguments["peft_config"])
        if "reward_funcs" in script_arguments:
            arguments["reward_funcs"] = self._rewards(script_arguments["reward_funcs"])
        tokenizers = script_arguments.get("reward_processing_classes")
        if isinstance(tokenizers, list):
            arguments["reward_processing_classes"] = list(tokenizers)  # the trainer modifies it
        return {**arguments, **self._injected(config)}

    def _adapter(self, script_adapter: Any) -> Any:
        """Return the script's adapter, with another rank if that is searched."""
        adapter = copy.deepcopy(script_adapter)
        searched = self.loaded.request.get("adapter") or {}
        for name, peft_name in SEARCHED_IN_ADAPTER:
            value = searched.get(name)
            script_value = getattr(adapter, peft_name, None)
            if value is not None and script_value is not None:
                setattr(adapter, peft_name, value)
        return adapter

    def _rewards(self, script_rewards: Any) -> list[Any]:
        """Return the script's rewards: functions timed, reward models unchanged. Skipped ones
        are free and synthetic.
        """
        import torch

        if not isinstance(script_rewards, list | tuple):
            script_rewards = [script_rewards]
        skips = self.loaded.request["script"]["rewards"] == "skip"
        rewards: list[Any] = []
        for index, reward in enumerate(script_rewards):
            if skips:
                rewards.append(_skipped_reward(index))
            elif isinstance(reward, str | torch.nn.Module):
                rewards.append(reward)
            else:
                rewards.append(self.reward_clock.time(reward))
        return rewards

    def _construct(self, trainer_class: Any, arguments: Arguments) -> Any:
        """Call the class like the script; TRL's constructor receives the candidate's arguments."""
        base = self.classes()[1]
        construct = base.__init__
        parameters = list(inspect.signature(construct).parameters)
        parameters.remove("self")

        def with_our_arguments(trainer: Any, *args: Any, **kwargs: Any) -> None:
            by_position = dict(zip(parameters, args, strict=False))
            script_arguments = {**by_position, **kwargs}
            construct(trainer, **{**present_arguments(script_arguments), **arguments})

        args, kwargs = self.captured.call_arguments
        with attribute(base, "__init__", with_our_arguments):
            return trainer_class(*args, **kwargs)


def _skipped_reward(index: int) -> Any:
    """Return a synthetic reward. The trainer's logs need different names."""

    def skipped(completion_ids: Any, **kwargs: Any) -> list[float]:
        return training_data.synthetic_reward(completion_ids, **kwargs)

    skipped.__name__ = f"skipped_{index}"
    return skipped
