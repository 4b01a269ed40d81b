"""Templates of the pages, and the text that goes into them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def open_templates() -> Environment:
    """Return the templates. All text is escaped: a model may be named `<script>`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def joined_files(*names: str) -> str:
    """Return the text of styles or scripts in this folder, in order."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def safe_in_script(json_text: str) -> str:
    """Return JSON without the characters that could end its script element."""
    return json_text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
