"""Values that a script searches with Optuna: the largest of each, and no random draw.

What is searched for speed or quality may decide memory, as a batch does. The largest values are
those with which the search has to fit.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..tracing.patching import attribute
from .missing_arguments import Report

OPTUNA = b"optuna"


@contextmanager
def largest(script: Path, report: Report) -> Iterator[None]:
    """Answer the questions of a script's trial with the largest values, each of which is
    reported.
    """
    if OPTUNA not in script.read_bytes():
        yield
        return
    try:
        trial_class = importlib.import_module("optuna.trial").Trial
    except ImportError:  # a placeholder stands for it
        yield
        return

    def chosen(_: Any, name: str, choices: Sequence[Any]) -> Any:
        numbers = [choice for choice in choices if isinstance(choice, int | float)]
        value = max(numbers) if len(numbers) == len(choices) else choices[0]
        listed = ", ".join(map(str, choices))
        report("searched", f"{name}={value} of {listed}")
        return value

    def highest(_: Any, name: str, low: Any, high: Any, *__: Any, **___: Any) -> Any:
        report("searched", f"{name}={high} of {low} to {high}")
        return high

    with ExitStack() as stack:
        stack.enter_context(attribute(trial_class, "suggest_categorical", chosen))
        for name in ("suggest_int", "suggest_float"):
            stack.enter_context(attribute(trial_class, name, highest))
        yield
