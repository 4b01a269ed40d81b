"""Release that a copy of a framework is nearest to, and its files that are no release's.

`verl.json` has the fingerprints of the files that decide memory, for every release and for the
commits between releases (`.ci/list_fingerprints.py`). A file of the copy that is a commit's own
counts half for the releases on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from autotune.core.files import read_text
from autotune.core.units import MIB
from autotune.frameworks.fingerprints.normalised_text import fingerprint

UNCHANGED = "="
NOT_IN_RELEASE = "-"
UNREADABLE = "?"
FEWEST_FILES = 3  # fewer are no copy, but a package with a file of the same name


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of all releases, the oldest release first."""

    package: str
    releases: tuple[str, ...]
    # File -> hashes since the release before, for each release; its own is the last one
    files: dict[str, tuple[str, ...]]

    def votes(self, file: str, text_hash: str) -> dict[str, float]:
        """Return the releases that have this text of a file, else those before and after."""
        exact: dict[str, float] = {}
        near: dict[str, float] = {}
        of_release = NOT_IN_RELEASE
        for index, cell in enumerate(self.files[file]):
            hashes = [of_release] if cell == UNCHANGED else cell.split()
            of_release = hashes[-1]
            if of_release == text_hash:
                exact[self.releases[index]] = 1.0
            elif text_hash in hashes:
                for release in self.releases[max(0, index - 1) : index + 1]:
                    near[release] = 0.5
        return exact or near


@dataclass(frozen=True, kw_only=True)
class ComparedCopy:
    """Files of a copy that decide memory, compared with those of all releases."""

    nearest: str | None  # release; None: no file is any release's
    compared: tuple[str, ...]  # files that are in the copy and in a release
    changed: tuple[str, ...]  # those of them whose text no release or commit has


def compared_copy(framework: str, package: Path) -> ComparedCopy | None:
    """Compare the package of a copy; None: too few of its files have a release's name."""
    table = fingerprints(framework)
    votes: Counter[str] = Counter()
    compared = []
    changed = []
    for file, text_hash in _hashes(table, package):
        compared.append(file)
        votes_of_file = table.votes(file, text_hash)
        votes.update(votes_of_file)
        if not votes_of_file:
            changed.append(file)
    if len(compared) < FEWEST_FILES:
        return None
    return ComparedCopy(
        nearest=_first_choice(table, votes),
        compared=tuple(compared),
        changed=tuple(changed),
    )


@cache
def fingerprints(framework: str) -> Fingerprints:
    file = Path(__file__).with_name(f"{framework}.json")
    return msgspec.json.decode(file.read_bytes(), type=Fingerprints)


def _hashes(table: Fingerprints, package: Path) -> Iterator[tuple[str, str]]:
    for file in table.files:
        path = package / file
        if not path.is_file():
            continue
        text = read_text(path, largest_bytes=MIB, way_out="Move it elsewhere.")
        yield file, fingerprint(file, text) or UNREADABLE


def _first_choice(table: Fingerprints, votes: Mapping[str, float]) -> str | None:
    """Return the release with the most files; of equal ones the newest."""
    if not votes:
        return None
    return max(table.releases, key=lambda name: (votes.get(name, 0), table.releases.index(name)))
