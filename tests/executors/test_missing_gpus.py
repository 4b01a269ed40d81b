"""The way out of a missing GPU names hardware that this machine has."""

from __future__ import annotations

import pytest

from autotune.core.errors import HardwareNotHere
from autotune.core.job import Hardware
from autotune.probe.executors.local_places import local_places
from tests.probe.nvml_playback import Playback

GIB = 2**30


class Machine(Playback):
    """Machine with the first GPUs of a recorded one."""

    def __init__(self, count: int) -> None:
        super().__init__("two_a100")
        self._recording["devices"] = self._recording["devices"][:count]


@pytest.mark.parametrize(("count", "device"), [(2, "local"), (0, "cpu")])
def test_the_way_out_names_what_is_here(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    device: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    missing = Hardware(
        kind="cuda",
        name="B200",
        count=1,
        memory_bytes=180 * GIB,
        here=True,
    )
    with pytest.raises(HardwareNotHere) as error:
        local_places(missing, 40 * GIB, None, Machine(count))
    assert f"Type --gpus {device}, or --mode predict." in str(error.value)
