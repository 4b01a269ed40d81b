"""The user's own script: its trainer, built again for every candidate from what the script gave it.

The script runs once per load, up to where its trainer would train (trl_script_catch); whatever it loaded stays for the
candidates. Lengths, phases and limits are those of any probe: only where things come from differs from trl_grpo.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .. import memory
from . import trl_evaluation, trl_grpo, trl_launch, trl_material, trl_methods, trl_settings
from .trl_grpo import release as release
from .trl_grpo import supported as supported
from .trl_grpo import warm as warm
from .trl_loaded import Loaded
from .trl_run import Run
from .trl_script_catch import Caught, catch, classes_of, default_of

SHAPE = ("generation_batch_size", "steps_per_generation")
"""Two words for one thing, of which a configuration takes one."""

BY_HAND = frozenset({"tools", "environment_factory", "rollout_func"})
"""With these a generation is no single turn that a later candidate could take over."""


@dataclasses.dataclass(kw_only=True)
class ScriptLoaded(Loaded):
    """What the script gave its trainer, in the place of what is loaded by name."""

    caught: Caught | None = None

    def __post_init__(self) -> None:
        method = trl_methods.method_of(self.request)
        self.run_class = type(f"Script{method.run.__name__}", (OfScript, method.run), {})
        if not trl_launch.spreads(self.request):
            self._run_script()

    def _run_script(self) -> None:
        script = self.request["script"]
        self.caught = catch(script["path"], script["arguments"], script["method"])
        self.tokenizer = self.caught.given.get("processing_class") or self.tokenizer

    @property
    def gave_model(self) -> bool:
        """Whether the script loads its model itself, instead of naming it."""
        return self.request["script"]["gives_model"]  # type: ignore[no-any-return]

    def build_model(self) -> None:
        """The script's own, or the one that it names. One whose weights were spoilt comes from another run of the script."""
        if not self.gave_model:
            super().build_model()
            return
        if self.caught is None or self.candidates:
            self._run_script()
        assert self.caught is not None
        self.model = _on_the_device(self.caught.given["model"], self.device)

    def model_for(self, attention: str | None, stage: Any) -> Any:
        if not trl_launch.spreads(self.request):
            return super().model_for(attention, stage)
        with stage.inside("load"):
            self._run_script()
        if not self.gave_model:
            return super().model_for(attention, stage)
        assert self.caught is not None
        return self.caught.given["model"]


def _on_the_device(model: Any, device: str) -> Any:
    """Where candidates share it. A quantised model, or one that is spread out, stays where the script put it."""
    placed = getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None)
    if device == "cuda" and placed is None:
        import torch

        model = model.to(f"cuda:{torch.cuda.current_device()}")
    return model


def load(request: Mapping[str, Any], stage: Any) -> Loaded:
    """The script up to its trainer; then the model that it names, and the engine where one is asked for."""
    if request["script"]["gives_model"]:
        # A reference model is a copy of the one that the script made, and an engine is filled by the trainer anyway.
        request = {**request, "model": {**request["model"], "weights": "random"}}
    loaded = trl_grpo.load(request, stage, ScriptLoaded)
    if loaded.device == "cuda":
        import torch

        memory.give_back(torch)
    return loaded


def measure(loaded: ScriptLoaded, request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    plan = request["plan"]
    if loaded.caught is not None and BY_HAND & {name for name, value in loaded.caught.given.items() if value}:
        plan = {**plan, "reuse_rollouts": False}
    # The script's own rows, brought to their longest only where they are to be.
    return trl_grpo.measure(loaded, {**request, "plan": plan, "dataset": request.get("dataset") or {"own": True}}, stage)


def without_calling(count: int) -> list[Callable[..., Any]]:
    """As many rewards as the script has, of which none is called: numbers that differ within a group and cost nothing."""

    def made(number: int) -> Callable[..., Any]:
        def skipped(completion_ids: Any, **kwargs: Any) -> list[float]:
            return trl_material.made_up_reward(completion_ids, **kwargs)

        skipped.__name__ = f"skipped_{number}"
        return skipped

    return [made(number) for number in range(count)]


class OfScript(Run):
    """One trainer of the script's own class, from the script's own arguments: laid over the run of any method."""

    loaded: ScriptLoaded

    @property
    def caught(self) -> Caught:
        if self.loaded.caught is None:
            self.loaded._run_script()
        assert self.loaded.caught is not None
        return self.loaded.caught

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        caught = self.caught
        config = caught.given.get("args")
        return type(config) if config is not None else classes_of(caught.method)[1], caught.trainer_class

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The candidate's over the script's."""
        asked, model_settings = trl_settings.split(self.request["settings"], config_class, trl.ModelConfig)
        own = self._own_settings()
        if set(SHAPE) & set(asked):
            own = {name: value for name, value in own.items() if name not in SHAPE}
        return {**own, **asked, **trl_evaluation.settings_of(self.request)}, model_settings

    def _own_settings(self) -> dict[str, Any]:
        configured, config = self.caught.configured, self.caught.given.get("args")
        if configured is not None:
            return configured.settings()
        if config is None:
            return {}
        names = [field.name for field in dataclasses.fields(config) if field.init]
        return {name: value for name in names if (value := getattr(config, name)) != default_of(config, name)}

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        return trl_material.exactly(self.caught.given["train_dataset"], rows=rows, group=group)

    def _ours(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        given = self.caught.given
        ours = {"model": model, "args": config, "train_dataset": data, "eval_dataset": None}
        ours["processing_class"] = self.loaded.tokenizer
        if "quantization_config" in given:
            ours["quantization_config"] = None  # the model is there already
        if given.get("peft_config") is not None:
            ours["peft_config"] = _with_rank(given["peft_config"], self.loaded.request.get("adapter") or {})
        if "reward_funcs" in given:
            ours["reward_funcs"] = self._rewards(given["reward_funcs"])
        if isinstance(given.get("reward_processing_classes"), list):
            ours["reward_processing_classes"] = list(given["reward_processing_classes"])  # the trainer fills it in
        return ours

    def _rewards(self, given: Any) -> list[Any]:
        """The script's own, timed; reward models as they are."""
        rewards = list(given) if isinstance(given, list | tuple) else [given]
        if self.loaded.request["script"]["rewards"] == "skip":
            return without_calling(len(rewards))
        import torch

        return [reward if isinstance(reward, str | torch.nn.Module) else self.clock.time(reward) for reward in rewards]

    def _construct(self, trainer_class: Any, given: dict[str, Any]) -> Any:
        """As the script calls its class; what reaches TRL's own constructor is the candidate's."""
        base = classes_of(self.caught.method)[0]
        args, kwargs = self.caught.outer
        real = base.__init__

        def with_ours(trainer: Any, *inner: Any, **named: Any) -> None:
            names = [name for name in _parameters(real) if name != "self"]
            whole = {**dict(zip(names, inner, strict=False)), **named, **given}
            real(trainer, **whole)

        base.__init__ = with_ours
        try:
            return trainer_class(*args, **kwargs)
        finally:
            base.__init__ = real


def _parameters(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


def _with_rank(peft_config: Any, asked: Mapping[str, Any]) -> Any:
    """The script's adapter, a copy; of another rank where that is searched."""
    made = copy.deepcopy(peft_config)
    for name, attribute in (("lora_r", "r"), ("lora_alpha", "lora_alpha")):
        if asked.get(name) is not None and getattr(made, attribute, None) not in (None, asked[name]):
            setattr(made, attribute, asked[name])
    return made
