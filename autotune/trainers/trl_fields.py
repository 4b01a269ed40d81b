"""What `trl grpo --config` knows: a static list over the supported TRL versions, so that no TRL is needed to read it.

`trl_fields.json` is written by `inside/trl_fields.py`; a test compares it with the installed TRL. The other methods' lists are
beside it, `trl_fields_sft.json` and so on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Owner = Literal["script", "config", "model", "mixture"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of the YAML."""

    owner: Owner
    """`config`: GRPOConfig; `model`: ModelConfig; `script`: GRPOScriptArguments; `mixture`: DatasetMixtureConfig."""

    kinds: tuple[str, ...]
    """What it takes: bool, int, float, str, list, dict, null, other."""

    default: object
    choices: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    """The listed TRL versions that have it; empty where all have."""


@cache
def fields(method: str = "grpo") -> Mapping[str, Field]:
    """Every key that TRL itself takes for this method."""
    return MappingProxyType(
        {
            name: Field(
                owner=facts["of"],
                kinds=tuple(facts["kinds"]),
                default=facts["default"],
                choices=tuple(facts.get("choices", ())),
                versions=tuple(facts.get("in", ())),
            )
            for name, facts in _listing(method)["fields"].items()
        }
    )


@cache
def accelerate_options() -> frozenset[str]:
    """Keys that TRL hands on to `accelerate launch`."""
    return frozenset(_listing("grpo")["accelerate"]) | {"accelerate_config"}


@cache
def listed_versions() -> tuple[str, ...]:
    return tuple(_listing("grpo")["versions"])


@cache
def _listing(method: str) -> dict[str, Any]:
    name = "trl_fields.json" if method == "grpo" else f"trl_fields_{method}.json"
    listing: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return listing
