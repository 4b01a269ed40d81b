"""`--script`: configuration and trainer from the user's own training script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune import frameworks
from autotune.catalog import model_lookup
from autotune.core.errors import BadInput
from autotune.core.job import Hardware, Model
from autotune.core.space import KnobValue
from autotune.core.user_script import ScriptInspection, UserScript
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl import async_grpo
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.script_inspection import look_at
from autotune.frameworks.trl.settings import CORE, DEFAULT_PROMPT_LENGTH, ENGINE
from autotune.frameworks.trl.trainers import script_trainer
from autotune.frameworks.trl.user_config import TRAINED, UserConfig
from autotune.machine import environment
from autotune.request.flags import Flags

SCRIPT_FLAGS = ("model", "config", "dataset", "tuning")  # flags whose values the script contains
PROMPTED = ("grpo", "rloo", async_grpo.METHOD)  # methods of scripts that generate completions to prompts
HELD = (
    *CORE, *async_grpo.CORE, *ENGINE, *TRAINED, "steps_per_generation", "generation_batch_size", "packing",
    "mask_truncated_completions",
)  # fmt: skip
"""Settings taken from the script even at their default: it trains with them all the same."""


@dataclass(frozen=True, kw_only=True)
class ParsedScript:
    """Inspected script with its trainer, configuration and model."""

    script: UserScript
    trainer: Trainer
    config: UserConfig
    model: Model
    notes: tuple[str, ...]


def read_script(flags: Flags, hardware: Hardware) -> ParsedScript | None:
    """Inspect the script of `--script`, as it is on the hardware; None without one."""
    if flags.script is None:
        if flags.rewards != "real":
            raise BadInput("--rewards is about a script of your own.", way_out="Add --script FILE, or leave it out.")
        return None
    if flags.framework != "trl":
        raise BadInput(
            f"--script is for scripts that build a trainer of TRL's, and not for {flags.framework}.",
            way_out="For any other program: --framework command -- COMMAND.",
        )
    for name in SCRIPT_FLAGS:
        if getattr(flags, name) is not None:
            raise BadInput(f"--{name} and --script can't both define what is trained.", way_out=f"Leave --{name} out.")
    python = environment.interpreter(flags.python)
    method = None if flags.method == Flags().method else flags.method
    script = look_at(flags.script, flags.arguments, python=python, hardware=hardware, rewards=flags.rewards, method=method)
    inner = frameworks.trainer(flags.framework, script.look.method)
    return ParsedScript(
        script=script,
        trainer=script_trainer(inner, script),
        config=_config(script, inner),
        model=_model(script.look),
        notes=tuple(_notes(script)),
    )


def flags_for(flags: Flags, scripted: ParsedScript | None) -> Flags:
    """Return the flags with the script's method and weights."""
    if scripted is None:
        return flags
    look = scripted.script.look
    return flags.replace(method=look.method, weights="real" if look.model.given else flags.weights)


def _config(script: UserScript, trainer: Trainer) -> UserConfig:
    """Return the script's settings as a configuration: plain values, and the rest."""
    look, known = script.look, trainer.fields()
    stated = {name: value for name in HELD if name in known and (value := look.raw.get(name)) is not None}
    given = {name: value for name, value in {**stated, **look.settings}.items() if name in known}
    plain = {name: value for name, value in given.items() if _is_plain(value) and not name.startswith(SIDE_EFFECTS)}
    rest = {name: value for name, value in given.items() if name not in plain}
    # ModelConfig settings of the script; TRL loads named models in float32.
    model, adapter = look.model, look.adapter
    settings: dict[str, KnobValue] = {**plain, "dtype": model.dtype or "float32", "use_peft": adapter is not None}
    if model.attn_implementation:
        settings["attn_implementation"] = model.attn_implementation
    if model.load_in_4bit or model.load_in_8bit:
        settings |= {"load_in_4bit": model.load_in_4bit, "load_in_8bit": model.load_in_8bit}
    settings |= {name: value for name, value in (adapter or {}).items() if _is_plain(value)}
    if look.method in PROMPTED:  # the longest prompt of the script's data: TRL has no limit of its own
        settings["max_prompt_length"] = max(look.prompts.values()) if look.prompts else DEFAULT_PROMPT_LENGTH
    return UserConfig(path=Path(script.path), settings=settings, rest=rest)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _model(look: ScriptInspection) -> Model:
    """Look up the model by name; a model built by the script has its own shape."""
    model = look.model
    if not model.given:
        return model_lookup.find_model(str(model.name))
    try:
        found = model_lookup.find_model(model.name) if model.name else None
    except BadInput:
        found = None
    name = model.name or "a model of its own"
    return Model(name=name, config=model.config or {}, folder=found.folder if found else None, origin="made by the script")


def _notes(script: UserScript) -> list[str]:
    look = script.look
    notes = [f"{script.path} builds {look.trainer} at {look.trainer_place}; up to there it runs unchanged, once per load"]
    if look.callbacks:
        notes.append(f"left out of probes, because they may write or stop it: {', '.join(look.callbacks)}")
    if look.ended_by is not None:
        notes.append(f"it uses trainer.{look.ended_by} before it trains: what it does from there on is not measured")
    if script.rewards == "skip" and look.rewards:
        names = ", ".join(look.rewards)
        notes.append(f"rewards are not called (--rewards skip): {names}; neither their time nor their memory is measured")
    if look.prompts is None and look.method in PROMPTED:
        why = f" ({look.prompts_why})" if look.prompts_why else ""
        notes.append(
            f"its prompt lengths could not be determined{why}: {DEFAULT_PROMPT_LENGTH} is assumed; see --max-prompt-length"
        )
    if "rollout_func" in look.special:
        notes.append("its rollout_func decides how long completions get: the certificate contains their lengths")
    return notes
