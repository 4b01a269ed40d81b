"""Order of the tests that need a GPU: what most depends on first, since time on one is short."""

from __future__ import annotations

import pytest

ORDER = ("test_probes.py", "test_limits.py", "test_committed.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        is_here = item.path.parent.name == "gpu" and item.path.name in ORDER
        return ORDER.index(item.path.name) if is_here else -1

    items.sort(key=place)
