"""What a script passes to the trainer that is not built: its arguments and its configuration."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ..protocol import Arguments
from .script_models import ModelOnGpu
from .source_calls import CapturedCall


@dataclass(kw_only=True)
class CapturedConfig:
    """Configuration object with the values before the framework completed them."""

    config: Any
    raw: Arguments  # each field at the start of the construction: given value or default
    place: CapturedCall | None
    completed: Arguments = field(default_factory=dict)
    expanded: tuple[str, ...] = ()  # names that came from a `**mapping` of the call

    def settings(self) -> Arguments:
        """Return the values that differ from the class's defaults, given or assigned later."""
        settings = {}
        defaults = defaults_of(self.config)
        for name, default in defaults.items():
            value = self.now(name)
            if differs(value, default):
                settings[name] = value
        return settings

    def now(self, name: str) -> Any:
        if name in self.changed:
            return getattr(self.config, name)
        return self.raw.get(name)

    @property
    def changed(self) -> frozenset[str]:
        """Fields assigned after the construction."""
        names = set()
        for name, value in self.completed.items():
            if differs(getattr(self.config, name, None), value):
                names.add(name)
        return frozenset(names)


@dataclass(kw_only=True)
class CapturedTrainer:
    """Trainer that was not built, with everything needed to build it repeatedly."""

    method: str
    trainer_class: Any
    call_arguments: tuple[tuple[Any, ...], Arguments]  # of the script's call of its own class
    arguments: Arguments  # arguments that reached TRL's constructor, by parameter
    place: CapturedCall
    configured: CapturedConfig | None
    moved: Arguments = field(default_factory=dict)  # settings that the trainer took itself once
    # Names of settings that the script gave to a configuration of a class without them
    added: tuple[str, ...] = ()
    callbacks: list[Any] = field(default_factory=list)  # added after the construction
    ended_by: str | None = None  # attribute that the script used before training; None for `train`
    train_place: CapturedCall | None = None
    is_own: bool = False  # it derives from none of TRL's
    namespace: Any = None  # the script's module: its functions look up their globals there
    # Of a prediction: the trainer's model if the script asked for it, parts that the script
    # assigned to its trainer, and what ended the script before it trained
    built_model: Any = None
    replaced: list[str] = field(default_factory=list)
    stopped: str | None = None
    other_models: list[ModelOnGpu] = field(default_factory=list)


def defaults_of(config: Any) -> Arguments:
    """Return the defaults of a configuration's arguments; None for those without one."""
    defaults: Arguments = {}
    for parameter in fields(config):
        if not parameter.init:
            continue
        if parameter.default_factory is not MISSING:
            defaults[parameter.name] = parameter.default_factory()
        elif parameter.default is not MISSING:
            defaults[parameter.name] = parameter.default
        else:
            defaults[parameter.name] = None
    return defaults


def differs(value: Any, reference: Any) -> bool:
    try:
        return value is not reference and bool(value != reference)
    except Exception:  # arrays, for example, have no truth value
        return True
