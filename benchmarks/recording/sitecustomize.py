"""Python runs this in every process of a rehearsal that `recorded_steps.py` records.

It turns torch's memory history on, and writes it down after each optimizer's step: a process of
Ray ends without its exit functions.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("AUTOTUNE_RECORDING")
MAX_EVENTS = 4_000_000
KEPT = ("action", "addr", "size", "stream", "user_metadata")


def begin() -> None:
    """Hook torch's import and the reports of phases."""
    start: Any = importlib.import_module("emulator_start")
    hooks: Any = importlib.import_module("emulator_hooks")
    report_phase = hooks._report_phase

    def report(name: str) -> None:
        report_phase(name)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        torch.cuda.memory._set_memory_metadata(name)
        if name in ("forward", "end"):  # a step may have ended
            write(torch)

    hooks._report_phase = report
    sys.meta_path.insert(0, start._TorchImportHook({"torch": [record]}))


def record(torch: ModuleType) -> None:
    """Begin with the first allocation of this process."""

    def turn_on() -> None:
        torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_EVENTS)
        torch.cuda.memory._set_memory_metadata("load")

    torch.cuda._lazy_call(turn_on)


def write(torch: Any) -> None:
    """Write the events of this process's device, and torch's own peaks."""
    device = torch.cuda.current_device()
    events = torch.cuda.memory._snapshot()["device_traces"][device]
    document = {
        "device": device,
        "rank": os.environ.get("RANK"),
        "title": _title(),
        "torch": torch.__version__,
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "events": [[event.get(name) for name in KEPT] for event in events],
    }
    path = os.path.join(str(FOLDER), f"{os.getpid()}.record")  # noqa: PTH118
    with open(f"{path}.part", "w") as file:  # noqa: PTH123
        json.dump(document, file)
    os.replace(f"{path}.part", path)  # noqa: PTH105


def _title() -> str:
    with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
        return file.read(100).split(b"\0")[0].decode(errors="replace")


if FOLDER and hasattr(ctypes.CDLL(None), "emu_phase"):
    begin()
