"""`--script`: the user's own training script read as a configuration is, with the trainer that measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import environment, models, trainers
from autotune.asking.flags import Flags
from autotune.candidate import KnobValue
from autotune.errors import BadInput
from autotune.own_script import Look, OwnScript
from autotune.trainers.base import Trainer
from autotune.trainers.trl_config import UserConfig
from autotune.trainers.trl_own import OwnTrainer
from autotune.trainers.trl_own_script import look_at
from autotune.trainers.trl_requests import SIDE_EFFECTS
from autotune.trainers.trl_settings import CORE, DEFAULT_PROMPT_LENGTH, ENGINE
from autotune.workload import Model

SAID_BY_THE_SCRIPT = ("model", "config", "dataset", "tuning")
"""Flags about what the script says itself."""

HELD = (*CORE, *ENGINE, "steps_per_generation", "generation_batch_size", "max_length", "packing")
"""Settings that are taken from the script also where it leaves them at their default: it trains with them all the same."""


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A script, understood."""

    script: OwnScript
    trainer: Trainer
    config: UserConfig
    model: Model
    notes: tuple[str, ...]


def read_script(flags: Flags) -> Scripted | None:
    """What `--script` names; None where it is not given."""
    if flags.script is None:
        if flags.rewards != "real":
            raise BadInput("--rewards is about a script of your own.", way_out="Add --script FILE, or leave it out.")
        return None
    _refuse_what_the_script_says(flags)
    python = environment.interpreter(flags.python)
    method = None if flags.method == Flags().method else flags.method
    script = look_at(flags.script, flags.arguments, python=python, rewards=flags.rewards, method=method)
    inner = trainers.trainer(flags.framework, script.look.method)
    return Scripted(
        script=script,
        trainer=OwnTrainer(inner, script),
        config=_config(script, inner),
        model=_model(script.look),
        notes=tuple(_notes(script)),
    )


def flags_for(flags: Flags, scripted: Scripted | None) -> Flags:
    """The flags with what the script decides: its method, and that weights are real where it loads them itself."""
    if scripted is None:
        return flags
    look = scripted.script.look
    return replace(flags, method=look.method, weights="real" if look.model.given else flags.weights)


def _refuse_what_the_script_says(flags: Flags) -> None:
    if flags.framework != "trl":
        raise BadInput(
            f"--script is for scripts that build a trainer of TRL's, and not for {flags.framework}.",
            way_out="For any other program: --framework command -- COMMAND.",
        )
    for name in SAID_BY_THE_SCRIPT:
        if getattr(flags, name) is not None:
            raise BadInput(f"--{name} and --script can't both say what is trained.", way_out=f"Leave --{name} out.")


def _config(script: OwnScript, trainer: Trainer) -> UserConfig:
    """The script's settings as a configuration file's: the plain ones that matter to a step, and the rest."""
    look, known = script.look, trainer.fields()
    stated = {name: value for name in HELD if name in known and (value := look.raw.get(name)) is not None}
    told = {name: value for name, value in {**stated, **look.settings}.items() if name in known}
    plain = {name: value for name, value in told.items() if _is_plain(value) and not name.startswith(SIDE_EFFECTS)}
    rest = {name: value for name, value in told.items() if name not in plain}
    return UserConfig(path=Path(script.path), settings={**plain, **_of_the_model(look), **_lengths(look)}, rest=rest)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _of_the_model(look: Look) -> dict[str, KnobValue]:
    """ModelConfig's words for what the script gives as objects. A model that is only named loads as TRL's trainers load it."""
    model, adapter = look.model, look.adapter
    told: dict[str, KnobValue] = {"dtype": model.dtype or "float32", "use_peft": adapter is not None}
    if model.attn_implementation:
        told["attn_implementation"] = model.attn_implementation
    if model.load_in_4bit or model.load_in_8bit:
        told |= {"load_in_4bit": model.load_in_4bit, "load_in_8bit": model.load_in_8bit}
    return {**told, **{name: value for name, value in (adapter or {}).items() if _is_plain(value)}}


def _lengths(look: Look) -> Mapping[str, KnobValue]:
    """The longest prompt of the script's own data: TRL has no limit of its own."""
    if look.method not in ("grpo", "rloo"):
        return {}
    return {"max_prompt_length": max(look.prompts.values()) if look.prompts else DEFAULT_PROMPT_LENGTH}


def _model(look: Look) -> Model:
    """By its name, where that is known here; a model that the script makes has a shape of its own."""
    told = look.model
    if not told.given:
        return models.find_model(str(told.name))
    try:
        found = models.find_model(told.name) if told.name else None
    except BadInput:
        found = None
    name = told.name or "a model of its own"
    return Model(name=name, config=told.config or {}, folder=found.folder if found else None, origin="made by the script")


def _notes(script: OwnScript) -> list[str]:
    look = script.look
    notes = [f"{script.path} builds {look.trainer} at {look.trainer_place}; up to there it runs as it is, once per load"]
    if look.callbacks:
        notes.append(f"left out of probes, because they may write or stop it: {', '.join(look.callbacks)}")
    if look.ended_by is not None:
        notes.append(f"it uses trainer.{look.ended_by} before it trains: what it does from there on is not measured")
    if script.rewards == "skip" and look.rewards:
        names = ", ".join(look.rewards)
        notes.append(f"rewards are not called (--rewards skip): {names}; neither their time nor their memory is measured")
    if look.prompts is None and look.method in ("grpo", "rloo"):
        why = f" ({look.prompts_why})" if look.prompts_why else ""
        notes.append(
            f"how long its prompts are could not be told{why}: {DEFAULT_PROMPT_LENGTH} is taken; see --max-prompt-length"
        )
    if "rollout_func" in look.special:
        notes.append("its rollout_func decides how long completions get: the certificate says how long they were")
    return notes
