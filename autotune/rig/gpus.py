"""The GPUs of a rig: what others hold of them, how they are made as small as the limit, and that they are as before a load.

Where NVML does not answer, the ranks' own figures must do, and everything that is said about them says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from autotune.devices import VISIBLE, Device, devices_of
from autotune.errors import RigError
from autotune.inside.ballast import SLACK_BYTES
from autotune.nvml import CardLost, NotTold, Nvml, NvmlUnavailable
from autotune.rig.ballast import Ballast, Held
from autotune.rig.baseline import BACK_SECONDS, wait_until_back
from autotune.rig.device_meter import DeviceMeter, read
from autotune.rig.neighbours import WORTH_NAMING_BYTES, in_words, named
from autotune.rig.occupancy import Reading
from autotune.rig.small_card import needs_ballast, share_scale, usable_bytes
from autotune.units import format_bytes

UNTOLD = 2**62
"""More than any card has: a ballast that is to leave so much holds nothing, and tells the card's size."""

MakeBallast = Callable[[Path, str], Ballast]


@dataclass(kw_only=True)
class Slot:
    """One GPU of the rig."""

    number: int
    """As the ranks count."""

    visible: str
    """What CUDA_VISIBLE_DEVICES says for it alone."""

    device: Device | None
    """None where NVML does not answer."""

    total_bytes: int | None = None
    """The card's; None until somebody told."""

    before: Reading | None = None
    """When the last load was about to begin: nothing of a probe is on it."""

    ballast: Ballast | None = None
    held: Held | None = None
    context_bytes: int = 0
    """Of the ballast's process beside what it holds, as the device showed it when that started."""

    taken_alone: bool = False
    """Whether it serves one process at a time, so that a ballast would shut the probe out."""

    @property
    def words(self) -> str:
        return f"GPU {self.number if self.device is None else self.device.index}"

    @property
    def reserved_bytes(self) -> int | None:
        """What the driver keeps for itself; None where it does not say."""
        return self.device.reserved_bytes if self.device else None

    @property
    def others_bytes(self) -> int | None:
        """Held by others before the load; the ballast is not among them."""
        if self.before is None:
            return None
        others = self.before.used_bytes - (self.ballast_bytes or 0)
        return others if others >= WORTH_NAMING_BYTES else 0

    @property
    def ballast_bytes(self) -> int | None:
        """With its context, where NVML tells that."""
        return None if self.held is None else self.held.held_bytes + self.context_bytes

    def others_in_words(self, nvml: Nvml | None) -> tuple[str, ...]:
        processes = (self.before.processes or {}) if self.before else {}
        ours = self.ballast.pid if self.ballast else None
        return in_words({pid: used for pid, used in processes.items() if pid != ours}, nvml) if self.others_bytes else ()


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
        patience_seconds: float = BACK_SECONDS,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._python, self._make_ballast, self._patience = python, make_ballast, patience_seconds
        self.nvml: Nvml | None = None
        self.why_not: str | None = None
        """Why NVML is not asked."""
        chosen = os.environ.get(VISIBLE) if variable is None else variable
        self.slots = self._by_nvml(count, library, chosen) or _unasked(count, chosen)

    def _by_nvml(self, count: int, library: object, chosen: str | None) -> list[Slot]:
        try:
            nvml = Nvml.open(library)
        except NvmlUnavailable as reason:
            self.why_not = str(reason)
            return []
        try:
            found = [device for device in devices_of(nvml, chosen)[:count] if device.uuid is not None]
            slots = [
                Slot(number=number, visible=str(one.uuid), device=one, total_bytes=one.memory_bytes)
                for number, one in enumerate(found)
            ]
            for slot in slots:
                slot.taken_alone = nvml.takes_one_process(slot.visible)
        except (NotTold, CardLost) as reason:
            nvml.close()
            self.why_not = str(reason)
            return []
        if len(slots) < count:
            nvml.close()
            raise RigError(f"{count} GPUs are needed, and {VISIBLE}={chosen} leaves {len(slots)} of this machine's.")
        self.nvml = nvml
        return slots

    @property
    def uuids(self) -> tuple[str, ...]:
        """Those that NVML can be asked about."""
        return tuple(slot.visible for slot in self.slots if slot.device is not None)

    @property
    def bound_by(self) -> str:
        kinds = {"ballast" if slot.ballast else "torch" if self._is_capped(slot) else "device" for slot in self.slots}
        return "+".join(sorted(kinds))

    @property
    def effective_limit_bytes(self) -> int:
        """The limit, or what others leave of the fullest GPU where that is less."""
        return min([self.limit_bytes, *(bound for slot in self.slots if (bound := self._left_by_others(slot)) is not None)])

    def settle(self) -> None:
        """Before a load: every GPU as empty as before the first, and as small as the limit. RigError where one is not."""
        try:
            for slot in self.slots:
                self._wait(slot)
                self._hold(slot)
                if self.nvml is not None:
                    slot.before = read(self.nvml, slot.visible)
        except (NotTold, CardLost) as error:
            raise RigError(f"A GPU can't be read any more: {error}") from error

    def look(self) -> None:
        """See what others hold, and wait for nothing."""
        for slot in self.slots:
            if self.nvml is not None:
                slot.before = read(self.nvml, slot.visible)

    def meter(self, ours: Callable[[], Collection[int]]) -> DeviceMeter | None:
        """A running one; None where NVML does not answer."""
        before = {slot.visible: slot.before for slot in self.slots if slot.before is not None}
        return None if self.nvml is None else DeviceMeter(self.nvml, self.uuids, before, ours)

    def check(self) -> None:
        """After a probe: RigError where a ballast ended meanwhile, so that nothing was held to the limit."""
        for slot in self.slots:
            if slot.ballast is not None and not slot.ballast.alive:
                raise RigError(f"The ballast on {slot.words} ended while a probe ran: what was measured is void.")

    def for_ranks(self) -> list[dict[str, object]]:
        """What each rank needs to know about its GPU."""
        return [
            {
                "others_bytes": _used_before(slot),
                "cap_bytes": self.limit_bytes if self._is_capped(slot) else None,
                "engine_share_scale": self._scale(slot),
            }
            for slot in self.slots
        ]

    def close(self) -> None:
        """End the ballasts and the connection. May be called twice."""
        for slot in self.slots:
            self._drop_ballast(slot)
        nvml, self.nvml = self.nvml, None
        if nvml is not None:
            nvml.close()

    def _wait(self, slot: Slot) -> None:
        nvml = self.nvml
        if nvml is None:
            return
        if slot.ballast is not None and not slot.ballast.alive:
            self._drop_ballast(slot)
        base = slot.before.used_bytes if slot.before is not None else nvml.memory(slot.visible).used_bytes
        above = wait_until_back(lambda: nvml.memory(slot.visible).used_bytes, base, patience_seconds=self._patience)
        if above and slot.ballast is None:
            raise RigError(self._still_held(slot, nvml, base, above))

    def _still_held(self, slot: Slot, nvml: Nvml, base: int, above: int) -> str:
        now, earlier = read(nvml, slot.visible), slot.before.processes if slot.before else None
        more = {pid: used for pid, used in (now.processes or {}).items() if used != (earlier or {}).get(pid)}
        return (
            f"{slot.words} is not as empty as it was: {format_bytes(above)} more than {format_bytes(base)} are held by "
            f"{named(in_words(more, nvml))}. Nothing is ended that autotune did not start."
        )

    def _hold(self, slot: Slot) -> None:
        """Take what the smaller card would not have; where others gave back or took some meanwhile, take more or less."""
        if slot.taken_alone or (slot.total_bytes is not None and not needs_ballast(self.limit_bytes, slot.total_bytes)):
            return
        if slot.ballast is None:
            self._start_ballast(slot)
        assert slot.ballast is not None
        if slot.total_bytes is None:
            slot.total_bytes = slot.ballast.leave(UNTOLD).total_bytes
            if not needs_ballast(self.limit_bytes, slot.total_bytes):
                self._drop_ballast(slot)
                return
        wanted = usable_bytes(self.limit_bytes, slot.reserved_bytes)
        slot.held = slot.ballast.leave(wanted)
        if slot.before is not None and slot.held.free_bytes < wanted - SLACK_BYTES - WORTH_NAMING_BYTES:
            left, who = format_bytes(slot.held.free_bytes), named(slot.others_in_words(self.nvml))
            raise RigError(f"{slot.words} has {left} left, where the limit wants {format_bytes(wanted)}: others took it, {who}.")

    def _start_ballast(self, slot: Slot) -> None:
        without = self._used(slot)
        slot.ballast = self._make_ballast(self._python, slot.visible)
        slot.ballast.leave(UNTOLD)
        slot.context_bytes = max(0, self._used(slot) - without)

    def _used(self, slot: Slot) -> int:
        return 0 if self.nvml is None else self.nvml.memory(slot.visible).used_bytes

    def _drop_ballast(self, slot: Slot) -> None:
        ballast, slot.ballast, slot.held, slot.before = slot.ballast, None, None, None if slot.ballast else slot.before
        if ballast is not None:
            with contextlib.suppress(OSError):
                ballast.close()

    def _is_capped(self, slot: Slot) -> bool:
        """Whether only torch's own cap holds the probe below the card's size."""
        return slot.ballast is None and slot.total_bytes is not None and self.limit_bytes < slot.total_bytes

    def _left_by_others(self, slot: Slot) -> int | None:
        if slot.held is not None:
            reserved = slot.reserved_bytes or 0
            short = slot.held.free_bytes < usable_bytes(self.limit_bytes, reserved) - SLACK_BYTES
            return slot.held.free_bytes + reserved if short else None
        if slot.total_bytes is None or not slot.others_bytes:
            return None
        return slot.total_bytes - slot.others_bytes

    def _scale(self, slot: Slot) -> float:
        usable = usable_bytes(self.limit_bytes, slot.reserved_bytes)
        if slot.held is not None:
            return share_scale(usable, slot.held.total_bytes)
        return 1.0 if slot.total_bytes is None else share_scale(usable, usable_bytes(slot.total_bytes, slot.reserved_bytes))


def _unasked(count: int, chosen: str | None) -> list[Slot]:
    """By number, as CUDA counts, or as CUDA_VISIBLE_DEVICES names them."""
    names = [part.strip() for part in chosen.split(",")] if chosen else [str(number) for number in range(count)]
    return [Slot(number=number, visible=name, device=None) for number, name in enumerate(names[:count])]


def _used_before(slot: Slot) -> int | None:
    """All that is not the probe's, the ballast included; None where nobody knows."""
    if slot.before is not None:
        return slot.before.used_bytes
    return None if slot.held is None else slot.held.total_bytes - slot.held.free_bytes
