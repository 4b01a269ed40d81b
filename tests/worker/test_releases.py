"""Release numbers of installed packages."""

from __future__ import annotations

import importlib.metadata

from autotune.worker import releases
from autotune.worker.releases import release_numbers


def test_versions_compare_by_their_numbers() -> None:
    assert release_numbers("1.9") < release_numbers("1.16.0.dev0") == release_numbers("1.16")
    assert release_numbers("1.16") < release_numbers("1.17rc1") == release_numbers("1.17.0")
    assert release_numbers("2.13.0+cpu") == (2, 13)
    assert release_numbers("0.0") == () < release_numbers("0.1")


def test_an_unknown_version_is_the_latest() -> None:
    assert (
        release_numbers("")
        == release_numbers("unknown")
        == releases.release("no-such-package")
        > (10**6,)
    )
    assert releases.version("no-such-package") is None


def test_versions_are_those_of_the_metadata() -> None:
    installed = importlib.metadata.version("pytest")
    assert releases.versions(["pytest", "no-such-package"]) == {"pytest": installed}
    assert releases.release("pytest") == release_numbers(installed) > (1,)
