from __future__ import annotations

import pytest

from autotune.worker.phase_recorder import PhaseRecorder
from autotune.worker.trl.vllm_engines import Engines


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize(
    ("device", "share"),
    [
        ({}, 0.3),
        ({"engine_share_scale": 1.0}, 0.3),
        ({"engine_share_scale": 0.5}, 0.15),
    ],
)
def test_the_engine_takes_its_share_of_the_smaller_card(
    device: dict[str, float],
    share: float,
    sleeps: bool,
) -> None:
    engines = Engines(
        PhaseRecorder(emit=lambda event: None, device=device), cpu=False, random_weights=True
    )
    built: list[dict[str, object]] = []
    engines._real = lambda **arguments: built.append(arguments)
    arguments = {"model": "m", "gpu_memory_utilization": 0.3, "enable_sleep_mode": sleeps}
    engines.get(arguments)
    assert built[0]["gpu_memory_utilization"] == pytest.approx(share)
    assert built[0]["enable_sleep_mode"] is sleeps
    # What is reported is what the files will say, on the card that is asked about.
    assert engines.arguments["gpu_memory_utilization"] == arguments["gpu_memory_utilization"] == 0.3
