"""Parts of scikit-learn that divide rows, for a script on a machine that lacks it.

Every other name of it is a placeholder, whose loops have no rows: a training in a loop over folds
would never be reached.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

USUAL_FOLDS = 5
FOLD_CLASSES = (
    "KFold",
    "StratifiedKFold",
    "GroupKFold",
    "StratifiedGroupKFold",
    "RepeatedKFold",
    "RepeatedStratifiedKFold",
    "ShuffleSplit",
    "StratifiedShuffleSplit",
    "GroupShuffleSplit",
    "TimeSeriesSplit",
)
INDICES = [0, 1, 2, 3, 4, 5, 6, 7]
"""Rows of each part: what they are decides nothing of a step."""


class Folds:
    """Divider of rows by index."""

    def __init__(self, n_splits: int = USUAL_FOLDS, *_: Any, **__: Any) -> None:
        self.n_splits = n_splits

    def split(self, *_: Any, **__: Any) -> Iterator[tuple[list[int], list[int]]]:
        for _fold in range(self.n_splits):
            yield list(INDICES), list(INDICES)

    def get_n_splits(self, *_: Any, **__: Any) -> int:
        return self.n_splits


def train_test_split(*rows: Any, **_: Any) -> list[Any]:
    """Return both parts of each argument: the rows themselves."""
    parts = []
    for part in rows:
        parts += [part, part]
    return parts


def fill(module: types.ModuleType) -> None:
    """Give a placeholder the classes and the function that divide rows."""
    if module.__name__ == "sklearn.model_selection":
        vars(module).update(dict.fromkeys(FOLD_CLASSES, Folds))
        vars(module)["train_test_split"] = train_test_split
