"""Reports of a run's processes: their peaks by card and phase, and reasons for doubt."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.emulator.entry_points import Stub

# Of the file that the library writes: see `Report` in csrc/emu.h.
CARDS = 16
PHASE_BYTES = 32
NAME_BYTES = 32
MAGIC = 0x454D5532
VERSION = 2
_HEAD = struct.Struct("<IIiiii5q")
_PEAKS = struct.Struct(f"<{CARDS}q")
_PHASE_SIZE = NAME_BYTES + _PEAKS.size

LIMITATIONS = (
    "Emulated, not measured: memory is accounted for as torch and the driver do it, with a context,"
    " kernels and NCCL of typical size; time, values of large tensors and what a kernel may need"
    " are not. See docs/emulated-gpus.md."
)
MAX_LISTED = 8  # operators or calls that a sentence names


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """Process that used CUDA."""

    pid: int
    peak_bytes: Mapping[int, int]
    """Peak by card, as the driver counts: torch's segments, contexts and everything else."""
    torch_allocated_bytes: Mapping[int, int]
    torch_reserved_bytes: Mapping[int, int]
    """torch's own peaks; empty where its phases were not watched."""
    phase_peak_bytes: Mapping[str, Mapping[int, int]]
    """Peak by phase in the order of their first occurrence, then by card."""
    refused: int  # allocations for which a card had no room
    launches: int
    skipped_copies: int
    skipped_bytes: int
    calls: Mapping[int, int]  # number of calls by position of the generated entry point
    rank: int | None = None  # global rank that its launcher gave it; None without one
    card_peak_bytes: Mapping[int, int] = field(default_factory=dict)
    """Most that all processes held together on a card, at times when this one took memory."""
    role: str | None = None
    """Ray actor or part of vLLM, by the process's title; None for another process."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Processes of a run."""

    processes: tuple[ProcessReport, ...]
    unjudged: Mapping[str, int]  # calls of entry points without a judgement
    skipped: tuple[str, ...] = ()
    """Operators on integers or booleans that were too large to be computed."""
    failed: tuple[str, ...] = ()  # operators that the CPU could not compute in their place

    @property
    def card_peak_bytes(self) -> dict[int, int]:
        """Return each card's peak: all processes on it together."""
        peaks: dict[int, int] = {}
        for process in self.processes:
            for card, peak in process.card_peak_bytes.items():
                peaks[card] = max(peak, peaks.get(card, 0))
        return dict(sorted(peaks.items()))

    def sentences(self) -> tuple[str, ...]:
        """Return what narrows the meaning of this run; nothing where all is well."""
        sentences = []
        if self.unjudged:
            names = ", ".join(f"{name} ({count} times)" for name, count in self.unjudged.items())
            sentences.append(
                f"CUDA functions were called whose emulated answer nobody has checked: {names}."
            )
        if self.skipped:
            sentences.append(
                "Integers or booleans were not computed, so another path of the code may have run:"
                f" {_listed(self.skipped)}."
            )
        if self.failed:
            sentences.append(
                "Operators have no true values, since the CPU could not compute them:"
                f" {_listed(self.failed)}."
            )
        return tuple(sentences)


def _listed(items: Sequence[str]) -> str:
    text = "; ".join(items[:MAX_LISTED])
    if len(items) > MAX_LISTED:
        text += f" and {len(items) - MAX_LISTED} more"
    return text


# 1. A run.


def read(folder: Path, stubs: Sequence[Stub]) -> RunReport:
    """Return what is in this folder; a file that is not whole is passed over."""
    processes = []
    calls: Counter[int] = Counter()
    for path in sorted(folder.glob("*.report")):
        process = read_process(path)
        if process is not None:
            processes.append(process)
            calls.update(process.calls)
    unjudged = {}
    for place, count in calls.most_common():
        if stubs[place].judged is None:
            unjudged[stubs[place].name] = count

    operators: set[str] = set()
    for path in folder.glob("*.values"):
        operators.update(path.read_text(errors="replace").splitlines())
    return RunReport(
        processes=tuple(processes),
        unjudged=unjudged,
        skipped=_of_kind("skipped\t", operators),
        failed=_of_kind("failed\t", operators),
    )


def _of_kind(kind: str, operators: Iterable[str]) -> tuple[str, ...]:
    chosen = sorted(line for line in operators if line.startswith(kind))
    return tuple(line.removeprefix(kind) for line in chosen)


# 2. A process.


def read_process(path: Path) -> ProcessReport | None:
    """Return one process's report; None for another file, or a part of one."""
    data = path.read_bytes()
    try:
        magic, version, pid, _, stubs, phases, launches, _, skipped, skipped_bytes, refused = (
            _HEAD.unpack_from(data)
        )
        if (magic, version) != (MAGIC, VERSION):
            return None
        # 1. Four tables by card: this process's peaks, torch's two, and those of all processes.
        at = _HEAD.size
        peak, allocated, reserved, card_peak = (
            _by_card(data, at + index * _PEAKS.size) for index in range(4)
        )
        # 2. The phases.
        at += 4 * _PEAKS.size
        phase_peaks = {}
        for index in range(min(phases, PHASE_BYTES)):
            name, peaks = _phase(data, at + index * _PHASE_SIZE)
            phase_peaks[name] = peaks
        # 3. Calls of each generated entry point.
        at += PHASE_BYTES * _PHASE_SIZE
        counts = struct.unpack_from(f"<{stubs}I", data, at)
    except struct.error:
        return None
    return ProcessReport(
        pid=pid,
        rank=_rank(path.with_name(f"{pid}.rank")),
        role=_role(path.with_name(f"{pid}.title")),
        peak_bytes=peak,
        torch_allocated_bytes=allocated,
        torch_reserved_bytes=reserved,
        phase_peak_bytes={name: peaks for name, peaks in phase_peaks.items() if peaks},
        refused=refused,
        launches=launches,
        skipped_copies=skipped,
        skipped_bytes=skipped_bytes,
        calls={place: count for place, count in enumerate(counts) if count},
        card_peak_bytes=card_peak,
    )


def _by_card(data: bytes, at: int) -> dict[int, int]:
    return {card: peak for card, peak in enumerate(_PEAKS.unpack_from(data, at)) if peak}


def _phase(data: bytes, at: int) -> tuple[str, dict[int, int]]:
    name = data[at : at + NAME_BYTES].split(b"\0")[0].decode(errors="replace")
    return name, _by_card(data, at + NAME_BYTES)


def _rank(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _role(path: Path) -> str | None:
    """Return the name behind the colons of a title like `ray::WorkerDict.update_actor`."""
    if not path.is_file():
        return None
    match = re.search(r"::(\w+)", path.read_text(errors="replace"))
    return match[1] if match is not None else None
