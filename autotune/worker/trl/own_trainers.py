"""Trainers of a script's own that derive from transformers' trainer and from none of TRL's: copies
of a former release, or trainers for models with images.

Nothing of such a trainer is run. Its configuration determines its method, and the arguments of
its call are those of TRL's trainer. Its step may allocate otherwise than TRL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..protocol import Arguments


def method_of(config: Any, classes: Mapping[str, tuple[Any, Any]]) -> str | None:
    """Return the method whose configuration this is, or a copy of it; None: that of no method."""
    names = {owner.__name__ for owner in type(config).__mro__}
    for method, (config_class, _) in classes.items():
        if config_class.__name__ in names:
            return method
    return None


def bound_arguments(
    trainer_class: Any,
    args: tuple[Any, ...],
    kwargs: Arguments,
) -> Arguments:
    """Return the arguments of the call by the names of its parameters."""
    signature = inspect.signature(trainer_class.__init__)
    bound = signature.bind_partial(None, *args, **kwargs)
    arguments: Arguments = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = value
    return arguments


def absent_trainer(name: str) -> Any:
    """Return a trainer in place of one whose module is not here."""
    from transformers import Trainer

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        """Accept everything."""

    return type(name, (Trainer,), {"__init__": __init__})
