"""Strings in the grammar of Hydra's command line, which a shell's quotes do not protect."""

from __future__ import annotations

import re

_PLAIN = re.compile(
    r"(?!(?:null|true|false|nan|inf)$)[a-z_/.~][\w/.:@+%~-]*", re.ASCII | re.IGNORECASE
)


def without_references(text: str) -> str:
    """Return the text for OmegaConf, which replaces `${...}` by another setting's value."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quoted(text: str) -> str:
    """Return the text as a string for Hydra; plain paths stay as they are.

    In quotes, a backslash is an escape before a quote only."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", without_references(text))
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
