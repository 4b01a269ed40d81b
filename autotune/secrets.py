"""What must never be shown or written down."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^:/@]*):[^@/]*@")


def without_password(url: str) -> str:
    """A storage's address as it may be shown and written down. What is no address comes back as it is."""
    return _PASSWORD.sub(r"\1:***@", url)
