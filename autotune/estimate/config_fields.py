"""Fields of a config.json, read with the error that names what is missing."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.errors import BadInput

Config = Mapping[str, object]


def number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise BadInput(f"The model's config states no {name}.", way_out="Give the whole config.json of the model.")
    return value


def numbers(config: Config, *names: str) -> tuple[int, ...]:
    return tuple(number(config, name) for name in names)


def switch(config: Config, trait: bool | str) -> int:
    """Return a trait as a factor, 1 or 0. A string names the config's own switch."""
    return int(trait if isinstance(trait, bool) else bool(config.get(trait, trait == "qkv_bias")))


def layer_kind(config: Config, index: int) -> str | None:
    """Return the layer's entry in `layer_types`; None if the config has no such list."""
    kinds = config.get("layer_types")
    return str(kinds[index]) if isinstance(kinds, (list, tuple)) else None
