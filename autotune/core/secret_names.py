"""Names of variables, settings and query parameters that hold a secret.

A name is split into words at separators and capitals. Most words decide by their position: `GH_PAT`
is a secret, `pat_version` is none.
"""

from __future__ import annotations

import re

_ANYWHERE = (
    "password", "passwd", "passphrase", "passcode", "apikey", "privatekey", "secret", "secrets", "credential", "credentials",
)  # fmt: skip
"""Endings of words that make a name secret, unless its last word is that of a place."""

_LAST = frozenset(
    {"auth", "authorization", "bearer", "cookie", "cookies", "creds", "jwt", "pass", "pat", "phrase", "pwd", "token"}
)
"""Words that make a name secret at its end."""

_KEYS = frozenset({
    "access", "account", "api", "auth", "client", "deploy", "encryption", "license", "master", "private", "secret", "service",
    "signing", "ssh", "storage",
})  # fmt: skip
"""Words before a `key` that is secret in any name, or before `tokens`. Others are keys of mappings and columns."""

_PLACES = frozenset({
    "backend", "count", "dir", "endpoint", "file", "folder", "id", "length", "limit", "manager", "method", "mode", "name", "path",
    "provider", "size", "sock", "type", "uri", "url",
})  # fmt: skip

_ORDINARY = {
    "token": frozenset({
        "audio", "boi", "bos", "cls", "decoder", "draft", "end", "eoi", "eos", "extra", "forced", "ignore", "image",
        "mask", "max",
        "min", "new", "num", "pad", "per", "prompt", "sep", "special", "start", "stop", "suppress", "unk", "video", "vision",
    }),
    "pass": frozenset({"backward", "first", "forward", "last", "second", "single"}),
}  # fmt: skip
"""Word -> words before it with which it is no secret: settings of tokenizers and trainers."""

_WORKING_DIRECTORIES = frozenset({"PWD", "OLDPWD"})
_OF_URLS = frozenset({"code", "key", "sig", "signature"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def is_secret(name: str) -> bool:
    """Return True if the name of a variable or setting marks a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or name in _WORKING_DIRECTORIES or words[-1] in _PLACES:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if any(word.endswith(_ANYWHERE) for word in words):
        return True
    if last in ("key", "keys"):
        # Variables are in capitals. In settings, most keys are names of columns.
        return before in _KEYS or name.isupper()
    if last == "tokens":
        return before in _KEYS
    if name.isupper() and last.endswith("token"):
        return before not in _ORDINARY["token"]
    return last in _LAST and before not in _ORDINARY.get(last, ())


def is_secret_in_url(name: str) -> bool:
    """Return True if the name of a query parameter marks a secret."""
    return is_secret(name) or name.lower().rpartition("-")[2] in _OF_URLS
