"""Adapter for the user's script: a trainer per candidate from the script's own arguments.

The script runs once per load, up to the start of training (`script_capture`); everything it loaded
stays for the candidates. Lengths, phases and limits are those of `grpo_probe`; only the origin of
model and data differs.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from ..tracing.patching import attribute
from . import grpo_probe, trainer_settings, training_data
from .grpo_probe import Loaded
from .grpo_probe import release as release
from .grpo_probe import supported as supported
from .grpo_probe import warm as warm
from .script_capture import CapturedTrainer, catch, defaults_of
from .trainer_run import TrainerRun

# Two forms of one setting; a configuration accepts one of them.
GENERATION_SHAPE = ("generation_batch_size", "steps_per_generation")
# Arguments with which a generation has several turns and cannot be reused.
CUSTOM_GENERATION = frozenset({"tools", "environment_factory", "rollout_func"})


@dataclasses.dataclass(kw_only=True)
class ScriptLoaded(Loaded):
    """Model, tokenizer and trainer arguments of the script."""

    captured: CapturedTrainer | None = None

    def __post_init__(self) -> None:
        if not grpo_probe.is_sharded(self.request):
            self.run_script()

    @property
    def run_class(self) -> type[TrainerRun]:
        return type(f"Script{super().run_class.__name__}", (ScriptRun, super().run_class), {})

    def run_script(self) -> CapturedTrainer:
        script = self.request["script"]
        self.captured = catch(script["path"], script["arguments"], script["method"])
        self.tokenizer = self.captured.given.get("processing_class") or self.tokenizer
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
        captured = self.run_script() if self.captured is None or self.candidates else self.captured
        self.model = model = captured.given["model"]
        # A quantised or partitioned model stays on the device that the script chose.
        placed = getattr(model, "hf_device_map", None) or getattr(
            model, "quantization_method", None
        )
        if self.device == "cuda" and placed is None:
            import torch

            self.model = model.to(f"cuda:{torch.cuda.current_device()}")

    def model_for(self, attention: str | None, recorder: Any) -> Any:
        if not grpo_probe.is_sharded(self.request):
            return super().model_for(attention, recorder)
        with recorder.inside("load"):
            captured = self.run_script()
        return (
            captured.given["model"] if self.gives_model else super().model_for(attention, recorder)
        )


def load(request: Mapping[str, Any], recorder: Any) -> Loaded:
    """Run the script up to its trainer, then load the named model and a requested engine."""
    if request["script"]["gives_model"]:
        # A reference model is a copy of the script's, and the trainer fills the engine anyway.
        request = {**request, "model": {**request["model"], "weights": "random"}}
    return grpo_probe.load(request, recorder, ScriptLoaded)


def measure(loaded: ScriptLoaded, request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    plan = request["plan"]
    if loaded.captured is not None and CUSTOM_GENERATION & {
        name for name, value in loaded.captured.given.items() if value
    }:
        plan = {**plan, "reuse_rollouts": False}
    # The script's own rows; at typical lengths they are not padded.
    return grpo_probe.measure(
        loaded,
        {**request, "plan": plan, "dataset": request.get("dataset") or {"own": True}},
        recorder,
    )


class ScriptRun(TrainerRun):
    """Trainer of the script's class from its own arguments; a mixin over any method's run."""

    loaded: ScriptLoaded

    @property
    def captured(self) -> CapturedTrainer:
        return self.loaded.captured or self.loaded.run_script()

    def _classes(self) -> tuple[Any, Any]:
        config = self.captured.given.get("args")
        config_class = type(config) if config is not None else self.classes()[0]
        return config_class, self.captured.trainer_class

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the script's settings, overridden by the candidate's."""
        settings, model_settings = trainer_settings.split(
            self.request["settings"], config_class, trl.ModelConfig
        )
        configured, config, own = self.captured.configured, self.captured.given.get("args"), {}
        if configured is not None:
            own = configured.settings()
        elif config is not None:
            defaults = defaults_of(config)
            own = {
                name: value
                for name, default in defaults.items()
                if (value := getattr(config, name)) != default
            }
        if set(GENERATION_SHAPE) & set(settings):
            own = {name: value for name, value in own.items() if name not in GENERATION_SHAPE}
        return {**own, **settings, **self._evaluation_settings()}, model_settings

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        return self._of_dataset(
            self.captured.given["train_dataset"], rows=rows, group=group, limit=None
        )

    def _arguments(
        self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any
    ) -> dict[str, Any]:
        given = self.captured.given
        ours = {"model": model, "args": config, "train_dataset": data, "eval_dataset": None}
        ours["processing_class"] = self.loaded.tokenizer
        if "quantization_config" in given:
            ours["quantization_config"] = None  # the model is loaded already
        if given.get("peft_config") is not None:
            ours["peft_config"] = adapter = copy.deepcopy(given["peft_config"])
            searched = self.loaded.request.get("adapter") or {}
            for name, own in (
                ("lora_r", "r"),
                ("lora_alpha", "lora_alpha"),
            ):  # another rank, if that is searched
                if searched.get(name) is not None and getattr(adapter, own, None) not in (
                    None,
                    searched[name],
                ):
                    setattr(adapter, own, searched[name])
        if "reward_funcs" in given:
            ours["reward_funcs"] = self._rewards(given["reward_funcs"])
        if isinstance(given.get("reward_processing_classes"), list):
            ours["reward_processing_classes"] = list(
                given["reward_processing_classes"]
            )  # the trainer modifies it
        return {**ours, **self._injected(config)}

    def _rewards(self, given: Any) -> list[Any]:
        """Return the script's rewards: functions timed, reward models unchanged. Skipped ones
        are free and synthetic.
        """
        import torch

        made: list[Any] = []
        for reward in list(given) if isinstance(given, list | tuple) else [given]:
            if self.loaded.request["script"]["rewards"] == "skip":

                def skipped(completion_ids: Any, **kwargs: Any) -> list[float]:
                    return training_data.synthetic_reward(completion_ids, **kwargs)

                skipped.__name__ = f"skipped_{len(made)}"  # the trainer's logs need different names
                made.append(skipped)
            else:
                made.append(
                    reward
                    if isinstance(reward, str | torch.nn.Module)
                    else self.reward_clock.time(reward)
                )
        return made

    def _construct(self, trainer_class: Any, arguments: dict[str, Any]) -> Any:
        """Call the class like the script; TRL's constructor receives the candidate's arguments."""
        base = self.classes()[1]
        args, kwargs = self.captured.outer
        real = base.__init__
        names = [name for name in inspect.signature(real).parameters if name != "self"]

        def with_ours(trainer: Any, *inner: Any, **named: Any) -> None:
            real(trainer, **{**dict(zip(names, inner, strict=False)), **named, **arguments})

        with attribute(base, "__init__", with_ours):
            return trainer_class(*args, **kwargs)
