"""Words of a command line without which a script trains nothing, from its source:

if "--train" in sys.argv:
parser.add_argument("--direct", action="store_true")
"""

from __future__ import annotations

import re
from pathlib import Path

ASKED_WORD = re.compile(r"""["'](-{0,2}\w[\w-]*)["']\s+in\s+sys\.argv""")
SWITCH = re.compile(
    r"""add_argument\(\s*["'](--[\w-]+)["'](?:(?!add_argument)[^)])*action\s*=\s*["']store_true["']""",
    re.DOTALL,
)
OF_TRAINING = re.compile(r"train|direct|run|tune|full|sft|grpo|dpo", re.IGNORECASE)
OF_OTHERS = re.compile(
    r"no[-_]|test|eval|skip|dry|smoke|debug|resume|infer|demo|push|wandb|trial|name|untrained",
    re.IGNORECASE,
)
MOST_WORDS = 2


def training_words(script: Path) -> tuple[str, ...]:
    """Return the words that may start the training of a script."""
    try:
        text = script.read_text("utf-8", "replace")
    except OSError:
        return ()
    words: list[str] = []
    for pattern in (ASKED_WORD, SWITCH):
        for match in pattern.finditer(text):
            word = match[1]
            is_of_training = OF_TRAINING.search(word) and not OF_OTHERS.search(word)
            if is_of_training and word not in words:
                words.append(word)
    return tuple(words[:MOST_WORDS])
