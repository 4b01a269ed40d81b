"""What must never be shown or written down, and what stands in its place.

Hidden are the values of environment variables whose names say that they are secret, passwords in addresses, values of settings
with such names, and tokens that are known by their form wherever they come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

SHORTEST = 8
"""A shorter value is no secret worth the name, and would be found inside ordinary words."""

LONGEST = 4096
"""How much of a text must be at hand together so that nothing secret is cut in two."""

_PASSWORD = re.compile(r"(://[^:/@\s]*):[^\s\"'<>,]*@")
"""Up to the last @ of a word: a password may hold one, or a slash, that nobody escaped."""

_IN_QUERY = re.compile(r"([?&]password=)[^&\s\"'<>]*", re.IGNORECASE)
_WORDS = "TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PWD|APIKEY|CREDENTIAL|CREDENTIALS|PGPASSWORD"
_SECRET_NAME = re.compile(
    rf"(?:^|_)(?:{_WORDS}|(?:API|ACCESS|PRIVATE|SECRET|AUTH|ACCOUNT)_?(?:KEY|TOKEN))(?:$|_(?!PATH|FILE|DIR))", re.IGNORECASE
)
_OF_TOKENIZERS = re.compile(r"(?:eos|pad|bos|unk|sep|cls|mask|image|video|audio|special|stop)_tokens?$", re.IGNORECASE)
_PLAIN = re.compile(r"(?:[/.~].*|true|false|yes|no|none|disabled|\d+)", re.IGNORECASE)
_KNOWN_FORMS = {
    "hf_": r"\bhf_[A-Za-z0-9]{20,}",  # Hugging Face
    "ghp_": r"\bghp_[A-Za-z0-9]{20,}",  # GitHub
    "github_pat_": r"\bgithub_pat_\w{20,}",
    "sk-": r"\bsk-[\w-]{20,}",  # OpenAI and those who took its form over
    "AKIA": r"\bAKIA[A-Z0-9]{16}\b",  # AWS
    "xox": r"\bxox[abpr]-[\w-]{10,}",  # Slack
}


def without_password(url: str) -> str:
    """A storage's address as it may be shown and written down. What is no address comes back as it is."""
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1:{HIDDEN}@", url))


def is_secret(name: str) -> bool:
    """Whether a variable or a setting of this name holds what nobody else should read."""
    return _SECRET_NAME.search(name) is not None and _OF_TOKENIZERS.search(name) is None


class Secrets:
    """Takes out of texts what is secret in one environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        named = {value for name, value in environment.items() if is_secret(name) and not _PLAIN.fullmatch(value)}
        urls = {found[1] for value in environment.values() if (found := re.search(r"://[^:/@\s]*:([^@/\s]*)@", value))}
        # The longest first, so that no part of one is left where another is its beginning.
        self._values = sorted((value for value in named | urls if len(value) >= SHORTEST), key=len, reverse=True)
        self._forms = {start: re.compile(form) for start, form in _KNOWN_FORMS.items()}

    def hide(self, text: str) -> str:
        """The text with every secret in it replaced."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        for start, form in self._forms.items():
            if start in text:
                text = form.sub(HIDDEN, text)
        return without_password(text) if "://" in text else text

    def hide_all(self, value: Any) -> Any:
        """The same for everything inside lists and mappings, settings of a secret name whole."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {name: self._setting(name, inner) for name, inner in value.items()}
        return [self.hide_all(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _setting(self, name: Any, value: Any) -> Any:
        secret = isinstance(name, str) and isinstance(value, str) and value and is_secret(name)
        return HIDDEN if secret else self.hide_all(value)
