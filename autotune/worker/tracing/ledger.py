"""Ledger of a trace: allocations with their parts, events, marks of the step's phases and layers,
and the work of each phase.

Allocations are numbered from 0. Event `n + 1` is the allocation of number n, event `-(n + 1)` its
end; a mark names the first event of a phase or layer. Example: weights of 100 bytes stay, then a
forward pass takes 40 bytes and frees them.

    sizes   [100, 40]
    events  [1, 2, -2]
    marks   [{"event": 0, "phase": "load", ...}, {"event": 1, "phase": "forward", ...}]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..protocol import Result

TRACED_PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspaces",
    "inputs",
    "kv_cache",
    "communication",
)
_PART_NUMBERS = {part: number for number, part in enumerate(TRACED_PARTS)}


class Ledger:
    """Append-only record; only the part of an allocation may be corrected later."""

    def __init__(self) -> None:
        # 1. Memory.
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.events: list[int] = []
        self.marks: list[Result] = []
        self.live = 0
        self.peak = 0
        self.streams: dict[int, int] = {}
        self.current_stream: Callable[[], int] | None = None
        """Number of the stream that a block is requested on; None: all are torch's default, 0."""
        self.products: dict[bool, int] = {}
        """Latest allocation at the first matrix product, by whether it is a backward pass."""
        # 2. Work.
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.moved: dict[str, float] = defaultdict(float)
        self.kernels: dict[str, int] = defaultdict(int)
        self.in_layers: dict[tuple[str, str], float] = defaultdict(float)
        # 3. Position of the step.
        self.phase = "load"
        self.step = 0
        self.layer: int | None = None
        self.closed = False
        self.enter("load")

    def enter(self, phase: str, *, layer: int | None = None) -> None:
        """Mark the phase and layer that begin with the next event."""
        self.phase = phase
        self.layer = layer
        mark = {"event": len(self.events), "phase": phase, "step": self.step, "layer": layer}
        if self.marks and self.marks[-1]["event"] == len(self.events):
            self.marks[-1] = mark
        else:
            self.marks.append(mark)

    def allocate(self, size: int, part: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.parts.append(_PART_NUMBERS[part])
        self.events.append(number + 1)
        if self.current_stream is not None:
            stream = self.current_stream()
            if stream:
                self.streams[number] = stream
        self.live += size
        self.peak = max(self.peak, self.live)
        return number

    def free(self, number: int) -> None:
        if self.closed:
            return
        self.events.append(-(number + 1))
        self.live -= self.sizes[number]

    def note_product(self) -> None:
        """Note the latest allocation at the first matrix product of each thread: autograd has
        its own.
        """
        if self.phase in ("score", "forward", "backward") and self.sizes:
            is_backward = self.phase == "backward"
            self.products.setdefault(is_backward, len(self.sizes) - 1)

    def set_part(self, number: int, part: str) -> None:
        """Correct the part of an allocation."""
        self.parts[number] = _PART_NUMBERS[part]

    def close(self) -> None:
        """End the trace: later frees are not part of the step."""
        self.closed = True

    def as_json(self) -> Result:
        numbered = sorted(self.products.items())
        return {
            "sizes": self.sizes,
            "parts": self.parts,
            "part_names": list(TRACED_PARTS),
            "events": self.events,
            "marks": self.marks,
            "streams": self.streams,
            "products": [number for _, number in numbered],
        }

    # Work.

    def count(
        self,
        moved_bytes: int,
        flops: float,
        dtype: str,
    ) -> None:
        """Count an operation; `dtype` is empty without matrix products."""
        phase = self.phase
        self.moved[phase] += moved_bytes
        self.kernels[phase] += 1
        if dtype:
            self.flops[phase, dtype] += flops
        if self.layer is not None:
            self.in_layers[phase, "moved_bytes"] += moved_bytes
            self.in_layers[phase, "kernels"] += 1
            if dtype:
                self.in_layers[phase, dtype] += flops
            else:
                self.in_layers[phase, "elementwise_bytes"] += moved_bytes

    def _counters(self) -> tuple[dict[Any, Any], ...]:
        return self.flops, self.moved, self.kernels, self.in_layers

    def reset_work(self) -> None:
        """Reset the counters: the last optimizer step is reported."""
        for counter in self._counters():
            counter.clear()

    @contextmanager
    def repeated_work(self, repeats: float) -> Iterator[None]:
        """Count the work `repeats` times; memory is recorded once."""
        previous_counters = [dict(counter) for counter in self._counters()]
        yield
        for counter, previous in zip(self._counters(), previous_counters, strict=True):
            for key, total in counter.items():
                before = previous.get(key, 0)
                added = (total - before) * repeats
                counter[key] = before + type(total)(added)

    def work(self) -> list[Result]:
        """Return the work of each phase of the last step."""
        return [
            {
                "phase": phase,
                "flops": _in_phase(self.flops, phase),
                "moved_bytes": self.moved[phase],
                "kernels": kernels,
                "elementwise_bytes": self.in_layers.get((phase, "elementwise_bytes"), 0.0),
                "in_layers": _in_phase(self.in_layers, phase),
            }
            for phase, kernels in self.kernels.items()
        ]


def _in_phase(counter: dict[tuple[str, str], float], phase: str) -> dict[str, float]:
    return {name: count for (of_phase, name), count in counter.items() if of_phase == phase}
