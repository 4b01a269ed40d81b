"""Values of a request's flags. Each flag is declared once, in `request_flags` or `command_flags`,
with its type, default, group and help text.

The declarations yield the keyword arguments of the Python API, the options of the command line
(`autotune.cli.options`) and `Flags`, the values of one request.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, get_type_hints

from autotune.core.errors import UnknownName
from autotune.core.secrets import without_password
from autotune.request.command_flags import PredictOptions, RunOptions, SolveOptions
from autotune.request.request_flags import GROUPS, CommonOptions, Flag, RequestOptions

REPEATED = ("hold", "set", "search", "unknown", "learning")
"""Flags that may be given several times."""
_HINTS: dict[str, Any] = {}
for _options in (RunOptions, PredictOptions, SolveOptions):
    _HINTS.update(get_type_hints(_options, include_extras=True))
del _HINTS["arguments"]


def _help_order(name: str) -> tuple[int, bool]:
    """Sort by group; within a group, flags of CommonOptions go after those of RequestOptions."""
    common = name in CommonOptions.__annotations__ or name not in RequestOptions.__annotations__
    return GROUPS.index(_HINTS[name].__metadata__[0].group), common


FLAGS: dict[str, tuple[Any, Flag]] = {
    name: (_HINTS[name].__origin__, _HINTS[name].__metadata__[0])
    for name in sorted(_HINTS, key=_help_order)
}
"""Name -> (type, declaration), in the order of --help."""

_TYPED_FIRST = ("model", "gpus", "method", "framework", "python")

DEFAULTS: dict[str, Any] = {}
for _name, (_, _flag) in FLAGS.items():
    DEFAULTS[_name] = () if _name in REPEATED else _flag.default
DEFAULTS["arguments"] = ()

if TYPE_CHECKING:
    # The fields are made from the declarations above, which mypy can't evaluate.
    class Flags:
        """Values of all flags of a request, as typed; None: not given."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def replace(self, **changes: Any) -> Flags: ...

else:
    Flags = dataclasses.make_dataclass(
        "Flags",
        [(name, Any, dataclasses.field(default=default)) for name, default in DEFAULTS.items()],
        namespace={"replace": dataclasses.replace, "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def flags_of(options: Mapping[str, Any], names: Collection[str] = tuple(DEFAULTS)) -> Flags:
    """Convert keyword arguments; one outside `names` is an error with the nearest names."""
    for name in options:
        if name not in names:
            raise UnknownName("keyword", name, names)
    return Flags(**{name: _as_typed(name, value) for name, value in options.items()})


def typed(flags: Flags) -> list[str]:
    """Return the command-line words of all non-default flags. Storage passwords are redacted."""
    line: list[str] = []
    for name in sorted(FLAGS, key=lambda name: name not in _TYPED_FIRST):
        value = getattr(flags, name)
        if value == DEFAULTS[name]:
            continue
        if isinstance(value, bool):
            line.append(option_name(name))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            line += [option_name(name), without_password(str(item))]
    if not flags.arguments:
        return line
    return [*line, "--", *flags.arguments]


def option_name(name: str) -> str:
    """Return `--max-probes` for `max_probes`."""
    return f"--{name.replace('_', '-')}"


def _as_typed(name: str, value: Any) -> Any:
    """Return the value of a keyword argument in the form of the command line."""
    if isinstance(value, Mapping):
        return tuple(f"{knob}={_listed(choices)}" for knob, choices in value.items())
    if isinstance(value, PathLike):
        return str(value)
    return tuple(value) if isinstance(value, list) or name in REPEATED else value


def _listed(choices: Any) -> str:
    """Return `4,8` for a list of values, or one value, of a knob."""
    if not isinstance(choices, list | tuple | range):
        choices = (choices,)
    texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    return ",".join(texts)
