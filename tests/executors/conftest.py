"""Ray cluster shared by all tests of a file: its start takes some ten seconds. Other files start
clusters of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from tests.executors.clusters import cluster

    with cluster() as ray_cluster:
        yield ray_cluster
