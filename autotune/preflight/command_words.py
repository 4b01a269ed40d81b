"""Words of a training command: the configuration file among them, and another one in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VARIABLE = "AUTOTUNE_CONFIG"  # environment variable for the command with the file to train with


def names(word: str, config: str) -> bool:
    """Return True if an argument is this file, alone or after `--flag=`."""
    return _same_file(word, config) or (
        word.startswith("-") and "=" in word and _same_file(word.partition("=")[2], config)
    )


def with_file(
    command_words: Sequence[str],
    config: str,
    use: Path,
) -> list[str]:
    """Return the command with CONFIG replaced by the file to train with."""
    if _same_file(str(use), config):
        return list(command_words)
    replaced = []
    for word in command_words:
        if names(word, config):
            flag, equals, _ = word.partition("=")
            word = str(use)
            if flag.startswith("-"):
                word = f"{flag}{equals}{use}"
        replaced.append(word)
    return replaced


def _same_file(word: str, config: str) -> bool:
    try:
        return word == config or (bool(word) and Path(word).samefile(config))
    except (OSError, ValueError):
        return False
