"""Defaults of a former release, with which a script runs as at its author's.

A configuration that the script builds, and a class of its own below TRL's, gets them. The process
inspects one script and ends: nothing is restored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..protocol import Settings
from .methods import RUNS_BY_METHOD

INHERITED_DEFAULTS = "transformers"


def take(defaults_by_method: Mapping[str, Settings]) -> None:
    """Give the configuration of each method these defaults, and transformers' own class those of
    `transformers`.
    """
    from transformers import TrainingArguments

    for method, defaults in defaults_by_method.items():
        if method == INHERITED_DEFAULTS:
            _take(TrainingArguments, defaults)
            continue
        with suppress(AttributeError, ImportError):  # a release without the method
            config_class, _ = RUNS_BY_METHOD[method].classes()
            _take(config_class, defaults)


def _take(config_class: Any, defaults: Settings) -> None:
    constructor = config_class.__init__
    names = list(inspect.signature(constructor).parameters)
    values = list(constructor.__defaults__)
    first = len(names) - len(values)
    fields = dict(config_class.__dataclass_fields__)
    for name, value in defaults.items():
        if name not in fields or name not in names[first:]:
            continue
        values[names.index(name) - first] = value
        fields[name] = copy.copy(fields[name])  # the base class shares it with others
        fields[name].default = value
        setattr(config_class, name, value)
    constructor.__defaults__ = tuple(values)
    config_class.__dataclass_fields__ = fields
