"""Ledger of a trace: allocations with their parts, events, marks of the step's phases and layers,
and the work of each phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PARTS = (
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
_NUMBER = {part: number for number, part in enumerate(PARTS)}


class Ledger:
    """Append-only record; only the part of an allocation may be corrected later."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        self.current_stream: Callable[[], int] | None = None
        """Number of the stream that a block is requested on; None: all are torch's default, 0."""
        self.products: dict[bool, int] = {}
        self.marks: list[dict[str, Any]] = []
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.moved: dict[str, float] = defaultdict(float)
        self.kernels: dict[str, int] = defaultdict(int)
        self.in_layers: dict[tuple[str, str], float] = defaultdict(float)
        self.live = 0
        self.peak = 0
        self.phase = "load"
        self.step = 0
        self.layer: int | None = None
        self.closed = False
        self.enter("load")

    def enter(self, phase: str, *, layer: int | None = None) -> None:
        """Mark the phase and layer that begin with the next event."""
        self.phase, self.layer = phase, layer
        mark = {"event": len(self.events), "phase": phase, "step": self.step, "layer": layer}
        if self.marks and self.marks[-1]["event"] == len(self.events):
            self.marks[-1] = mark
        else:
            self.marks.append(mark)

    def allocate(self, size: int, part: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.parts.append(_NUMBER[part])
        self.events.append(number + 1)
        if self.current_stream is not None and (stream := self.current_stream()):
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
            self.products.setdefault(self.phase == "backward", len(self.sizes) - 1)

    def set_part(self, number: int, part: str) -> None:
        """Correct the part of an allocation."""
        self.parts[number] = _NUMBER[part]

    def close(self) -> None:
        """End the trace: later frees are not part of the step."""
        self.closed = True

    def as_json(self) -> dict[str, Any]:
        return {
            "sizes": self.sizes,
            "parts": self.parts,
            "part_names": list(PARTS),
            "events": self.events,
            "marks": self.marks,
            "streams": self.streams,
            "products": [self.products[one] for one in sorted(self.products)],
        }

    # Work.

    def count(self, moved_bytes: int, flops: float, dtype: str) -> None:
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

    def reset_work(self) -> None:
        """Reset the counters: the last optimizer step is reported."""
        for counted in (self.flops, self.moved, self.kernels, self.in_layers):
            counted.clear()

    @contextmanager
    def repeated_work(self, repeats: float) -> Iterator[None]:
        """Count the work `repeats` times; memory is recorded once."""
        counts: list[dict[Any, Any]] = [self.flops, self.moved, self.kernels, self.in_layers]
        before = [dict(count) for count in counts]
        yield
        for count, earlier in zip(counts, before, strict=True):
            for key, now in count.items():
                count[key] = earlier.get(key, 0) + type(now)((now - earlier.get(key, 0)) * repeats)

    def work(self) -> list[dict[str, Any]]:
        """Return the work of each phase of the last step."""
        return [
            {
                "phase": phase,
                "flops": {
                    dtype: count for (where, dtype), count in self.flops.items() if where == phase
                },
                "moved_bytes": self.moved[phase],
                "kernels": kernels,
                "in_layers": {
                    what: count for (where, what), count in self.in_layers.items() if where == phase
                },
            }
            for phase, kernels in self.kernels.items()
        ]
