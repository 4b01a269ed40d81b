"""Protection of the user's secrets and trackers in everything that is shown, written or started.

Redacted: values of environment variables and settings with secret names (below),
passwords and tokens in URLs, and tokens of a known form (`hf_...`, PEM blocks) from any source.

Nothing that predicts, probes or rehearses reports to a tracker. `AUTOTUNE_TRACKERS=1` leaves the
user's environment as it is. Settings (`report_to`, `push_to_hub`) are overridden where the
framework's arguments are made; a written file keeps the user's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

_ANYWHERE = (
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "apikey",
    "privatekey",
    "secret",
    "secrets",
    "credential",
    "credentials",
)
"""Endings of words that make a name secret, unless its last word is that of a place."""

_LAST = frozenset(
    {
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "cookies",
        "creds",
        "jwt",
        "pass",
        "pat",
        "phrase",
        "pwd",
        "token",
    }
)
"""Words that make a name secret at its end."""

_KEYS = frozenset(
    {
        "access",
        "account",
        "api",
        "auth",
        "client",
        "deploy",
        "encryption",
        "license",
        "master",
        "private",
        "secret",
        "service",
        "signing",
        "ssh",
        "storage",
    }
)
"""Words before a `key` that is secret in any name, or before `tokens`. Others are keys of
mappings and columns.
"""

_PLACES = frozenset(
    {
        "backend",
        "count",
        "dir",
        "endpoint",
        "file",
        "folder",
        "id",
        "length",
        "limit",
        "manager",
        "method",
        "mode",
        "name",
        "path",
        "provider",
        "size",
        "sock",
        "type",
        "uri",
        "url",
    }
)

_ORDINARY = {
    "token": frozenset(
        {
            "audio",
            "boi",
            "bos",
            "cls",
            "decoder",
            "draft",
            "end",
            "eoi",
            "eos",
            "extra",
            "forced",
            "ignore",
            "image",
            "mask",
            "max",
            "min",
            "new",
            "num",
            "pad",
            "per",
            "prompt",
            "sep",
            "special",
            "start",
            "stop",
            "suppress",
            "unk",
            "video",
            "vision",
        }
    ),
    "pass": frozenset({"backward", "first", "forward", "last", "second", "single"}),
}
"""Word -> words before it with which it is no secret: settings of tokenizers and trainers."""

_WORKING_DIRECTORIES = frozenset({"PWD", "OLDPWD"})
_OF_URLS = frozenset({"code", "key", "sig", "signature"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def is_secret(name: str) -> bool:
    """Return True if the name of a variable or setting marks a secret. A name is split into
    words at separators and capitals. Most words decide by their position: `GH_PAT` is a secret,
    `pat_version` is none.
    """
    parts = [part.lower() for part in _WORD.findall(name)]
    if not parts or name in _WORKING_DIRECTORIES or parts[-1] in _PLACES:
        return False
    if any(part.endswith(_ANYWHERE) for part in parts):
        return True
    *_, before, last = ["", *parts]
    if last in ("key", "keys"):
        # Variables are in capitals. In settings, most keys are names of columns.
        return before in _KEYS or name.isupper()
    if last == "tokens":
        return before in _KEYS
    if name.isupper() and last.endswith("token"):
        return before not in _ORDINARY["token"]
    return last in _LAST and before not in _ORDINARY.get(last, ())


REDACTED = "***"

MIN_SECRET_LENGTH = 8  # shorter values would match inside ordinary words
MAX_SECRET_LENGTH = 4096  # overlap of text chunks that keeps a secret in one piece

# 1. URLs.

_PASSWORD = re.compile(r"(://[^:/@\s]*):[^\s\"'<>,]*@")
"""Matches up to the last @ of a word: a password may contain an unescaped @ or slash."""

# User names of the length of a token, as in https://TOKEN@host
_TOKEN_AS_USER = re.compile(r"(://)[^:/@\s\"'<>]{16,}(?=@)")
_URL_PASSWORD = re.compile(r"://[^:/@\s]*:([^@/\s]*)@")
_QUERY = re.compile(r"([?&]([\w.~-]+)=)([^&\s\"'<>]+)")

# 2. Forms. Each begins with a text that is looked for first: the expressions are slow.

_FORMS = {
    "hf_": r"\bhf_[A-Za-z0-9]{20,}",  # Hugging Face
    "api_org_": r"\bapi_org_[A-Za-z0-9]{20,}",
    "github_pat_": r"\bgithub_pat_\w{20,}",
    **{f"gh{kind}_": rf"\bgh{kind}_[A-Za-z0-9]{{20,}}" for kind in "oprsu"},  # GitHub
    "gl": r"\bgl(?:agent|cbt|dt|ft|imt|oas|pat|ptt|rt|soat)-[\w.-]{16,}",  # GitLab
    "sk-": r"\bsk-[\w-]{20,}",  # OpenAI and compatible services
    "k_": r"\b[rs]k_(?:live|test)_\w{16,}",  # Stripe
    "AKIA": r"\bAKIA[A-Z0-9]{16}\b",  # AWS
    "ASIA": r"\bASIA[A-Z0-9]{16}\b",
    "AIza": r"\bAIza[\w-]{30,}",  # Google
    "ya29.": r"\bya29\.[\w-]{20,}",
    "xox": r"\bxox[abeoprs]-[\w-]{10,}",  # Slack
    "nvapi-": r"\bnvapi-[\w-]{20,}",  # NVIDIA
    "pypi-": r"\bpypi-[\w-]{40,}",
    "npm_": r"\bnpm_[A-Za-z0-9]{30,}",
    "eyJ": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",  # JSON web tokens
    "earer ": r"(?<=[Bb]earer )[\w.~+/=-]{8,}",
    "PRIVATE KEY": (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"
    ),
}

_PLAIN = re.compile(r"true|false|yes|no|none|null|enabled|disabled|\d+", re.IGNORECASE)


def without_password(url: str) -> str:
    """Redact the secrets of a storage URL; other text is returned unchanged."""
    url = _PASSWORD.sub(rf"\1:{REDACTED}@", url)
    url = _TOKEN_AS_USER.sub(rf"\1{REDACTED}", url)
    return _QUERY.sub(_redact_parameter, url)


def _redact_parameter(match: re.Match[str]) -> str:
    start, name, _ = match.groups()
    _, _, last_part = name.lower().rpartition("-")
    if is_secret(name) or last_part in _OF_URLS:
        return f"{start}{REDACTED}"
    return match[0]


class Secrets:
    """Redacts the secrets of one environment in texts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = set()
        for name, value in environment.items():
            secrets = _passwords_in(value)
            if is_secret(name) and not _is_plain(value):
                secrets.append(value)
            for secret in map(str.strip, secrets):
                if len(secret) >= MIN_SECRET_LENGTH:
                    values |= {secret, quote(secret, safe="")}
        # Longest first: a secret can be a prefix of another.
        self._values = sorted(values, key=len, reverse=True)
        self._forms = {start: re.compile(form) for start, form in _FORMS.items()}

    def hide(self, text: str) -> str:
        """Return the text with all secrets replaced."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        for start, form in self._forms.items():
            if start in text:
                text = form.sub(REDACTED, text)
        if "://" in text or "?" in text:
            return without_password(text)
        return text

    def hide_all(self, value: Any) -> Any:
        """Redact nested lists and mappings; settings and arguments with a secret name are replaced
        whole.
        """
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {name: self._setting(name, inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            shown = [self.hide_all(inner) for inner in value]
            if all(isinstance(inner, str) for inner in shown):
                return _without_secret_values(shown)
            return shown
        return value

    def _setting(self, name: Any, value: Any) -> Any:
        is_text = isinstance(name, str) and isinstance(value, str)
        if is_text and value and is_secret(name):
            return REDACTED
        return self.hide_all(value)


def without_secret_arguments(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line to be shown, without secrets."""
    shown: list[str] = Secrets({}).hide_all(list(argv))
    return shown


def without_secret_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings to be stored, without secrets."""
    shown: dict[str, object] = Secrets({}).hide_all(settings)
    return shown


def _without_secret_values(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of options, and of variables, with a
    secret name replaced: `--api-key=VALUE`, `--api-key VALUE` and `API_KEY=VALUE`.
    """
    shown = []
    is_secret_value = False
    for word in argv:
        name, separator, value = word.partition("=")
        if is_secret_value and not word.startswith("-"):
            shown.append(REDACTED)
        elif separator and value and is_secret(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(word)
        is_secret_value = word.startswith("-") and not separator and is_secret(word)
    return shown


def _passwords_in(value: str) -> list[str]:
    """Return the password of a value's first URL with one, in a list."""
    match = _URL_PASSWORD.search(value)
    if match is None:
        return []
    return [match[1]]


def _is_plain(value: str) -> bool:
    """Return True for switches and paths. A secret may begin with a slash, so that a path must
    exist, or its folder.
    """
    if _PLAIN.fullmatch(value):
        return True
    if not value.startswith(("/", "~", "./", "../")):
        return False
    try:
        path = Path(value).expanduser()
        return path.exists() or (len(path.parts) > 2 and path.parent.is_dir())
    except (OSError, ValueError, RuntimeError):
        return False


KEEP = "AUTOTUNE_TRACKERS"  # variable that keeps trackers on in probes
_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "COMET_START_ONLINE": "0",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_MLFLOW_LOG_ARTIFACTS": "0",
    "SWANLAB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DVCLIVE_LOG_MODEL": "false",
}

_LOCAL = {
    "MLFLOW_TRACKING_URI": "mlruns",
    "TRACKIO_DIR": "trackio",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "WANDB_DIR": "wandb",
}
"""Variable -> folder in the scratch folder, for libraries that a program calls by itself."""

_DROPPED = frozenset({"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "MLFLOW_RUN_ID"})
"""Addresses of runs. Keys stay: a program may read them for other purposes, and a disabled
tracker does not.
"""


def without_side_effects(
    environment: Mapping[str, str], folder: Path | None = None
) -> dict[str, str]:
    """Return the environment with all trackers off; `folder` receives what they write locally."""
    if environment.get(KEEP) == "1":
        return dict(environment)
    variables = {name: value for name, value in environment.items() if name not in _DROPPED}
    variables |= _OFF
    # Scripts look for a key; a disabled tracker does not use it.
    variables.setdefault("WANDB_API_KEY", "0" * 40)
    scratch = folder or Path(tempfile.gettempdir()) / "autotune-trackers"
    for name, part in _LOCAL.items():
        variables[name] = str(scratch / part)
    return variables
