"""Probe of TRL's PPO on counted real tensors, with the release that is first on the path.

python -m tests.counted_memory.counted_ppo ALLOCATOR.so REQUESTS.json     peaks by phase as JSON, on stdout's last line
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.counted_memory import counting
from tests.worker.drive import adapter, inside


class CountingMeter:
    """Meter of the phase recorder that reads the counting allocator."""

    def __init__(self, allocator: counting.Counting, base: int) -> None:
        self._allocator, self._base = allocator, base

    def now(self) -> int:
        return self._allocator.live() - self._base

    def take_peak(self) -> int:
        peak = self._allocator.peak() - self._base
        self._allocator.reset_peak()
        return peak

    def take_torch(self) -> None:
        return None

    def totals(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        return None


def main() -> None:
    library, requests = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    trl = adapter()
    trl.warm(requests["load"])
    allocator = counting.install(library)
    gc.collect()
    meter = CountingMeter(allocator, allocator.live())
    loaded = trl.load(
        requests["load"], inside("phase_recorder").PhaseRecorder(emit=_ignore, meter=meter)
    )
    stage = inside("phase_recorder").PhaseRecorder(emit=_ignore, meter=meter)
    result = trl.measure(loaded, requests["measure"], stage)
    print(
        "\n"
        + json.dumps(
            {"phases": stage.memory()["phase_peak_bytes"], "models": result["model_bytes"]}
        ),
        flush=True,
    )


def _ignore(event: dict[str, Any]) -> None:
    """Ignore the recorder's events."""


if __name__ == "__main__":
    main()
