"""GPUs of one executor: other processes on them, their ballast, the wait before a load.

Without NVML the ranks report their own figures, and results derived from them carry a caveat.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from autotune.core.engine_share import share_scale, usable_bytes
from autotune.core.errors import ProbeError
from autotune.core.units import counted, format_bytes
from autotune.machine.nvml import (
    MIN_REPORTED_BYTES,
    VISIBLE,
    Device,
    GpuLost,
    Nvml,
    NvmlNotSupported,
    NvmlUnavailable,
    devices_of,
    in_words,
    listed,
    visible,
)
from autotune.probe.ballast import (
    RELEASE_SECONDS,
    UNLIMITED_BYTES,
    Ballast,
    BallastHold,
    MakeBallast,
    needs_ballast,
    wait_until_released,
)
from autotune.probe.device_meter import DeviceMeter, Reading, read
from autotune.worker.ballast_process import SLACK_BYTES


@dataclass(kw_only=True)
class GpuSlot:
    number: int  # Local rank that uses it
    visible: str  # CUDA_VISIBLE_DEVICES for this GPU alone
    cuda_name: str  # The same in the environment of training processes
    device: Device | None  # None without NVML
    total_bytes: int | None = None  # Size of the GPU; None until NVML or a ballast reports it
    before: Reading | None = None  # Reading just before the last load, with no process of a probe
    ballast: Ballast | None = None
    hold: BallastHold | None = None
    # CUDA context of the ballast's process, as growth of the device memory (NVML) at its start
    context_bytes: int = 0
    exclusive: bool = False  # Compute mode "exclusive process": a ballast would lock the probe out

    @property
    def label(self) -> str:
        return f"GPU {self.number if self.device is None else self.device.index}"

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the driver reserves; None where it does not report them."""
        return self.device.reserved_bytes if self.device else None

    @property
    def others_bytes(self) -> int | None:
        """Memory of other processes before the load, without the ballast."""
        if self.before is None:
            return None
        other_bytes = self.before.used_bytes - (self.ballast_bytes or 0)
        return other_bytes if other_bytes >= MIN_REPORTED_BYTES else 0

    @property
    def ballast_bytes(self) -> int | None:
        """Memory of the ballast, with its context where NVML reports it."""
        if self.hold is None:
            return None
        return self.hold.held_bytes + self.context_bytes

    def others_in_words(self, nvml: Nvml | None) -> tuple[str, ...]:
        if self.before is None or not self.others_bytes:
            return ()
        processes = dict(self.before.processes or {})
        if self.ballast is not None:
            processes.pop(self.ballast.pid, None)
        return in_words(processes, nvml)


class Gpus:
    """The GPUs that the ranks of one executor use, from its start to its end."""

    def __init__(
        self,
        count: int,
        limit_bytes: int,
        python: Path,
        *,
        library: object = None,
        variable: str | None = None,
        make_ballast: MakeBallast = Ballast,
        patience_seconds: float = RELEASE_SECONDS,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._python = python
        self._make_ballast = make_ballast
        self._patience = patience_seconds
        self.nvml: Nvml | None = None
        self.why_not: str | None = None  # Reason why NVML is not in use
        chosen = os.environ.get(VISIBLE) if variable is None else variable
        self.slots = self._by_nvml(count, library, chosen)
        if not self.slots:
            self.slots = _by_cuda_number(count, chosen)

    def _by_nvml(
        self,
        count: int,
        library: object,
        chosen: str | None,
    ) -> list[GpuSlot]:
        try:
            nvml = Nvml.open(library)
        except NvmlUnavailable as reason:
            self.why_not = str(reason)
            return []
        try:
            slots = _nvml_slots(nvml, count, chosen)
        except (NvmlNotSupported, GpuLost) as reason:
            nvml.close()
            self.why_not = str(reason)
            return []
        if len(slots) < count:
            nvml.close()
            raise ProbeError(
                f"A probe needs {counted(count, 'GPU')}, and {VISIBLE}={chosen} leaves"
                f" {len(slots)} of this machine's."
            )
        self.nvml = nvml
        return slots

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that NVML covers."""
        return tuple(slot.visible for slot in self.slots if slot.device is not None)

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES of the training processes: these GPUs and no others. By number,
        because many releases of vLLM read nothing else. By UUID on a machine with MIG or with a
        GPU that does not answer, where CUDA may count differently than NVML.
        """
        return ",".join(slot.cuda_name for slot in self.slots)

    @property
    def bound_by(self) -> str:
        return "+".join(sorted({self._bound(slot) for slot in self.slots}))

    def _bound(self, slot: GpuSlot) -> str:
        if slot.ballast:
            return "ballast"
        return "torch" if self._is_capped(slot) else "device"

    @property
    def effective_limit_bytes(self) -> int:
        """The limit, or less where others leave less of the fullest GPU."""
        bounds = [self.limit_bytes]
        for slot in self.slots:
            reserved = slot.reserved_bytes or 0
            if slot.hold is not None:
                if slot.hold.free_bytes < usable_bytes(self.limit_bytes, reserved) - SLACK_BYTES:
                    bounds.append(slot.hold.free_bytes + reserved)
            elif slot.total_bytes is not None and slot.others_bytes:
                bounds.append(slot.total_bytes - slot.others_bytes)
        return min(bounds)

    def settle(self) -> None:
        """Before a load: wait for released memory, adjust ballasts. ProbeError: a GPU stays
        occupied.
        """
        try:
            for slot in self.slots:
                self._wait(slot)
                self._hold(slot)
                if self.nvml is not None:
                    slot.before = read(self.nvml, slot.visible)
        except (NvmlNotSupported, GpuLost) as error:
            raise ProbeError(f"A GPU can't be read any more: {error}") from error

    def look(self) -> None:
        """Read the memory of other processes, without waiting."""
        for slot in self.slots:
            if self.nvml is not None:
                slot.before = read(self.nvml, slot.visible)

    def meter(self, probe_pids: Callable[[], Collection[int]]) -> DeviceMeter | None:
        """Start a meter; None without NVML."""
        before = {slot.visible: slot.before for slot in self.slots if slot.before is not None}
        return None if self.nvml is None else DeviceMeter(self.nvml, self.uuids, before, probe_pids)

    def check(self) -> None:
        """After a command: ProbeError if a ballast exited and so did not enforce the limit."""
        for slot in self.slots:
            if slot.ballast is not None and not slot.ballast.alive:
                raise ProbeError(
                    f"The ballast on {slot.label} ended while a probe ran: the measurement is void."
                )

    def for_ranks(self) -> list[dict[str, object]]:
        """Return the facts that each rank needs about its GPU."""
        return [
            {
                "others_bytes": _used_before(slot),
                "cap_bytes": self.limit_bytes if self._is_capped(slot) else None,
                "engine_share_scale": self._scale(slot),
            }
            for slot in self.slots
        ]

    def close(self) -> None:
        """End the ballasts and the NVML connection. Idempotent."""
        for slot in self.slots:
            self._drop_ballast(slot)
        nvml, self.nvml = self.nvml, None
        if nvml is not None:
            nvml.close()

    def _wait(self, slot: GpuSlot) -> None:
        nvml = self.nvml
        if nvml is None:
            return
        if slot.ballast is not None and not slot.ballast.alive:
            self._drop_ballast(slot)
        base = slot.before.used_bytes if slot.before is not None else self._used(slot)
        above = wait_until_released(lambda: self._used(slot), base, patience_seconds=self._patience)
        if above and slot.ballast is None:
            earlier = (slot.before.processes or {}) if slot.before else {}
            now = read(nvml, slot.visible)
            slot.before = now  # others keep it: the next load starts from there, with a lower limit
            grown = {}
            for pid, used in (now.processes or {}).items():
                if used != earlier.get(pid):
                    grown[pid] = used
            processes = listed(in_words(grown, nvml))
            raise ProbeError(
                f"{slot.label} is not as empty as it was: {format_bytes(above)} more than"
                f" {format_bytes(base)} are held by {processes}. Autotune ends only processes that"
                " it started."
            )

    def _hold(self, slot: GpuSlot) -> None:
        """Occupy the memory beyond the limit; adjust to changes of other processes."""
        if slot.exclusive:
            return
        if slot.total_bytes is not None and not needs_ballast(self.limit_bytes, slot.total_bytes):
            return
        if slot.ballast is None:
            before = self._used(slot)
            slot.ballast = self._make_ballast(self._python, slot.visible)
            slot.ballast.leave(UNLIMITED_BYTES)
            slot.context_bytes = max(0, self._used(slot) - before)
        if slot.total_bytes is None:
            slot.total_bytes = slot.ballast.leave(UNLIMITED_BYTES).total_bytes
            if not needs_ballast(self.limit_bytes, slot.total_bytes):
                self._drop_ballast(slot)
                return
        usable = usable_bytes(self.limit_bytes, slot.reserved_bytes)
        slot.hold = slot.ballast.leave(usable)
        least_bytes = usable - SLACK_BYTES - MIN_REPORTED_BYTES
        if slot.before is not None and slot.hold.free_bytes < least_bytes:
            free = format_bytes(slot.hold.free_bytes)
            processes = listed(slot.others_in_words(self.nvml))
            raise ProbeError(
                f"{slot.label} has {free} left, and the limit needs {format_bytes(usable)}: others"
                f" took it, {processes}."
            )

    def _used(self, slot: GpuSlot) -> int:
        return 0 if self.nvml is None else self.nvml.used_bytes(slot.visible)

    def _drop_ballast(self, slot: GpuSlot) -> None:
        ballast = slot.ballast
        slot.ballast = None
        slot.hold = None
        if ballast is not None:
            slot.before = None
            with contextlib.suppress(OSError):
                ballast.close()

    def _is_capped(self, slot: GpuSlot) -> bool:
        """Return True if only torch's allocator cap keeps the probe below the GPU's size."""
        return (
            slot.ballast is None
            and slot.total_bytes is not None
            and self.limit_bytes < slot.total_bytes
        )

    def _scale(self, slot: GpuSlot) -> float:
        usable = usable_bytes(self.limit_bytes, slot.reserved_bytes)
        if slot.hold is not None:
            return share_scale(usable, slot.hold.total_bytes)
        return (
            1.0
            if slot.total_bytes is None
            else share_scale(usable, usable_bytes(slot.total_bytes, slot.reserved_bytes))
        )


def _used_before(slot: GpuSlot) -> int | None:
    """Memory that is not the probe's, the ballast included; None where unknown."""
    if slot.before is not None:
        return slot.before.used_bytes
    if slot.hold is None:
        return None
    return slot.hold.total_bytes - slot.hold.free_bytes


def _by_cuda_number(count: int, chosen: str | None) -> list[GpuSlot]:
    """Return slots by CUDA's numbers, or as CUDA_VISIBLE_DEVICES names them."""
    names = list(map(str, range(count)))
    if chosen:
        names = list(map(str.strip, chosen.split(",")))
    slots = []
    for number, name in enumerate(names[:count]):
        slots.append(
            GpuSlot(
                number=number,
                visible=name,
                cuda_name=name,
                device=None,
            )
        )
    return slots


def _nvml_slots(
    nvml: Nvml,
    count: int,
    chosen: str | None,
) -> list[GpuSlot]:
    devices = devices_of(nvml, None)
    by_number = not nvml.unreadable and not any(device.slice_of for device in devices)
    slots = []
    for number, device in enumerate(visible(devices, chosen, nvml.unreadable)[:count]):
        uuid = str(device.uuid)
        slots.append(
            GpuSlot(
                number=number,
                visible=uuid,
                cuda_name=str(device.index) if by_number else uuid,
                device=device,
                total_bytes=device.memory_bytes,
                exclusive=nvml.takes_one_process(uuid),
            )
        )
    return slots
