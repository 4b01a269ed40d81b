"""Ballasts for machines without a GPU: the real program, holding main memory that stands for a card's."""

from __future__ import annotations

import sys
from pathlib import Path

from autotune.rig.ballast import Ballast
from tests.rig.nvml_playback import Playback

MIB = 2**20


def host_ballast(card_mib: int) -> Ballast:
    return Ballast(Path(sys.executable), "0", arguments=("--host", str(card_mib * MIB)))


class SmallCards:
    """Makes ballasts on stand-in cards of this size, and keeps them at hand. A card too large to fill on a test machine is
    scaled: the ballast is told that much less to leave."""

    def __init__(self, card_mib: int) -> None:
        self._card_mib = card_mib
        self.made: list[Ballast] = []

    def __call__(self, python: Path, device: str) -> Ballast:
        self.made.append(host_ballast(self._card_mib))
        return self.made[-1]


def on_card(library: Playback, device: int, pid: int, mib: int) -> None:
    """The driver's list shows a process with so much."""
    library.put(device, 4 + mib, [{"pid": pid, "mib": mib}])
