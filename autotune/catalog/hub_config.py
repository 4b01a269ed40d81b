"""A model's config.json from the hub, unless the network is absent or --offline was given."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20  # a config has a few kB
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_offline() -> bool:
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in OFFLINE_VARIABLES)


def stay_offline() -> None:
    """Fetch nothing from now on, in this process and in those that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def fetched_config(hub_id: str) -> bytes | None:
    """Return the text of the model's config.json; None offline, without an answer, or if it is too large."""
    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
    if is_offline() or not endpoint.startswith(("http://", "https://")):
        return None
    url = f"{endpoint}/{urllib.parse.quote(hub_id)}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(urllib.request.Request(url), timeout=TIMEOUT_S) as answer:
            text: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError):  # no network, no such model, a gated one
        return None
    return text if len(text) <= MAX_BYTES else None
