"""Ballasts for machines without a GPU: the real program, with main memory in place of device
memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autotune.probe.ballast import Ballast
from tests.probe.nvml_playback import Playback

MIB = 2**20


def host_ballast(card_mib: int) -> Ballast:
    return Ballast(
        Path(sys.executable),
        "0",
        program=(str(Path(__file__).parent / "host_card.py"), str(card_mib * MIB)),
    )


class SmallCards:
    """Factory of ballasts on stand-in cards of this size. A card larger than a test machine can
    fill is scaled: the ballast is requested to leave that much less.
    """

    def __init__(self, card_mib: int) -> None:
        self._card_mib = card_mib
        self.made: list[Ballast] = []

    def __call__(self, python: Path, device: str) -> Ballast:
        self.made.append(host_ballast(self._card_mib))
        return self.made[-1]


def on_card(
    library: Playback,
    device: int,
    pid: int,
    mib: int,
) -> None:
    """The driver's list shows a process with so much."""
    library.put(device, 4 + mib, [{"pid": pid, "mib": mib}])
