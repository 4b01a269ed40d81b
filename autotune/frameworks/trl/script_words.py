"""Words of a command line without which a script trains nothing, from its source:

if "--train" in sys.argv:
parser.add_argument("--direct", action="store_true")
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ASKED_WORD = re.compile(r"""["'](-{0,2}\w[\w-]*)["']\s+in\s+sys\.argv""")
_SWITCH = re.compile(
    r"""add_argument\(\s*["'](--[\w-]+)["'](?:(?!add_argument)[^)])*"""
    r"""action\s*=\s*["']store_true["']""",
    re.DOTALL,
)
_OF_TRAINING = re.compile(r"train|direct|run|tune|full|sft|grpo|dpo", re.IGNORECASE)
_OF_OTHERS = re.compile(
    r"no[-_]|test|eval|skip|dry|smoke|debug|resume|infer|demo|push|wandb|trial|name|untrained",
    re.IGNORECASE,
)
MOST_WORDS = 2


def own_starts(script: str, answer: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the arguments by which a script starts itself as another program."""
    for command in answer.get("absent", {}).get("started program", ()):
        parts = shlex.split(command)
        for place, word in enumerate(parts):
            if Path(word).name == Path(script).name and parts[place + 1 :]:
                yield parts[place + 1 :]


def training_words(script: str) -> list[list[str]]:
    """Return the words that may start the training of a script, each as its arguments."""
    try:
        text = Path(script).read_text("utf-8", "replace")
    except OSError:
        return []
    options: list[str] = []
    for pattern in (ASKED_WORD, _SWITCH):
        for match in pattern.finditer(text):
            word = match[1]
            is_of_training = _OF_TRAINING.search(word) and not _OF_OTHERS.search(word)
            if is_of_training and word not in options:
                options.append(word)
    return [[word] for word in options[:MOST_WORDS]]
