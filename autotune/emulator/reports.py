"""Reports of a run's processes: their peaks by card and phase, and reasons for doubt."""

from __future__ import annotations

import contextlib
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.emulator.entry_points import Stub

CARDS, PHASES, NAME = 16, 32, 32
MAGIC, VERSION = 0x454D5532, 2
LIMITATIONS = (
    "Emulated, not measured: memory is accounted for as torch and the driver do it, with a context,"
    " kernels and NCCL of typical size; time, values of large tensors and what a kernel may need"
    " are not. See docs/emulated-gpus.md."
)
MAX_LISTED = 8  # operators or calls that a sentence names
_HEAD = struct.Struct("<IIiiii5q")
_PEAKS = struct.Struct(f"<{CARDS}q")


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """Process that used CUDA."""

    pid: int
    peak_bytes: Mapping[
        int, int
    ]  # peak by card, as the driver counts: torch's segments, contexts and everything else
    torch_allocated_bytes: Mapping[int, int]
    torch_reserved_bytes: Mapping[
        int, int
    ]  # torch's own peaks; empty where its phases were not watched
    phase_peak_bytes: Mapping[
        str, Mapping[int, int]
    ]  # peak by phase in the order of their first occurrence, then by card
    refused: int  # allocations for which a card had no room
    launches: int
    skipped_copies: int
    skipped_bytes: int
    calls: Mapping[int, int]  # number of calls by position of the generated entry point
    rank: int | None = None  # global rank that its launcher gave it; None without one
    # Most that all processes held together on a card, at times when this one took memory
    card_peak_bytes: Mapping[int, int] = field(default_factory=dict)
    role: str | None = (
        None  # Ray actor or part of vLLM, by the process's title; None for another process
    )


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Processes of a run."""

    processes: tuple[ProcessReport, ...]
    unjudged: Mapping[str, int]  # calls of entry points without a judgement
    skipped: tuple[
        str, ...
    ] = ()  # operators on integers or booleans that were too large to be computed
    failed: tuple[str, ...] = ()  # operators that the CPU could not compute in their place

    @property
    def card_peak_bytes(self) -> dict[int, int]:
        """Return each card's peak: all processes on it together."""
        cards = sorted({card for process in self.processes for card in process.card_peak_bytes})
        return {
            card: max(process.card_peak_bytes.get(card, 0) for process in self.processes)
            for card in cards
        }

    def sentences(self) -> tuple[str, ...]:
        """Return what narrows the meaning of this run; nothing where all is well."""
        found = []
        if self.unjudged:
            names = ", ".join(f"{name} ({count} times)" for name, count in self.unjudged.items())
            found.append(
                f"CUDA functions were called whose emulated answer nobody has checked: {names}."
            )
        if self.skipped:
            found.append(
                "Integers or booleans were not computed, so another path of the code may have run:"
                f" {_listed(self.skipped)}."
            )
        if self.failed:
            found.append(
                "Operators have no true values, since the CPU could not compute them:"
                f" {_listed(self.failed)}."
            )
        return tuple(found)


def read(folder: Path, stubs: Sequence[Stub]) -> RunReport:
    """Return what is in this folder; a file that is not whole is passed over."""
    processes = tuple(
        report
        for path in sorted(folder.glob("*.report"))
        if (report := read_process(path)) is not None
    )
    calls: Counter[int] = Counter()
    for process in processes:
        calls.update(process.calls)
    unjudged = {
        stubs[place].name: count
        for place, count in calls.most_common()
        if stubs[place].judged is None
    }
    lines = sorted(
        {
            line
            for path in folder.glob("*.values")
            for line in path.read_text(errors="replace").splitlines()
        }
    )
    skipped, failed = (
        tuple(line.removeprefix(kind) for line in lines if line.startswith(kind))
        for kind in ("skipped\t", "failed\t")
    )
    return RunReport(processes=processes, unjudged=unjudged, skipped=skipped, failed=failed)


def read_process(path: Path) -> ProcessReport | None:
    """Return one process's report."""
    data = path.read_bytes()
    try:
        magic, version, pid, _, stubs, phases, launches, _, skipped, skipped_bytes, refused = (
            _HEAD.unpack_from(data)
        )
        if (magic, version) != (MAGIC, VERSION):
            return None
        at = _HEAD.size
        peak, allocated, reserved, together = (
            _by_card(data, at + index * _PEAKS.size) for index in range(4)
        )
        at += 4 * _PEAKS.size
        by_phase = dict(
            _phase(data, at + index * (NAME + _PEAKS.size)) for index in range(min(phases, PHASES))
        )
        at += PHASES * (NAME + _PEAKS.size)
        counts = struct.unpack_from(f"<{stubs}I", data, at)
    except struct.error:
        return None
    rank: int | None = None
    title = path.with_name(f"{pid}.title")
    with contextlib.suppress(OSError, ValueError):
        rank = int(path.with_name(f"{pid}.rank").read_text())
    role = re.search(r"::(\w+)", title.read_text(errors="replace")) if title.is_file() else None
    return ProcessReport(
        pid=pid,
        rank=rank,
        role=role[1] if role else None,
        peak_bytes=peak,
        torch_allocated_bytes=allocated,
        torch_reserved_bytes=reserved,
        phase_peak_bytes={name: peaks for name, peaks in by_phase.items() if peaks},
        refused=refused,
        launches=launches,
        skipped_copies=skipped,
        skipped_bytes=skipped_bytes,
        calls={place: count for place, count in enumerate(counts) if count},
        card_peak_bytes=together,
    )


def _by_card(data: bytes, at: int) -> dict[int, int]:
    return {card: peak for card, peak in enumerate(_PEAKS.unpack_from(data, at)) if peak}


def _phase(data: bytes, at: int) -> tuple[str, dict[int, int]]:
    name = data[at : at + NAME].split(b"\0")[0].decode(errors="replace")
    return name, _by_card(data, at + NAME)


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - MAX_LISTED} more" if len(words) > MAX_LISTED else ""
    return "; ".join(words[:MAX_LISTED]) + more
