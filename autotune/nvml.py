"""NVIDIA's management library: the only file that calls it.

What it says becomes plain values, and what it refuses one of three errors.
`Nvml.open()` takes nvidia-ml-py's module, or whatever has the same functions: the tests put in one that plays back recordings.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


class NvmlUnavailable(Exception):
    """Nothing can be asked at all. `absent`: there is no NVIDIA driver to ask; otherwise there is one, and it refuses."""

    def __init__(self, why: str, *, absent: bool) -> None:
        super().__init__(why)
        self.absent = absent


class NotTold(Exception):
    """This one thing is not told here: not supported, not permitted, or gone meanwhile."""


class CardLost(Exception):
    """The GPU does not answer any more, or needs a reset."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU as the driver describes it, or one slice of a GPU that is cut by MIG."""

    index: int
    """As nvidia-smi counts, by PCI address; a slice has its GPU's."""

    uuid: str
    """`GPU-...`, or `MIG-...` for a slice."""

    name: str
    total_bytes: int
    reserved_bytes: int | None
    """Of the total, what the driver and its error correction keep for themselves; None where it does not say."""

    compute_capability: str | None
    slice_of: str | None = None
    """The UUID of the whole GPU; None for a whole one."""


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A GPU's memory at one moment."""

    total_bytes: int
    used_bytes: int
    """By processes and their contexts; without what is reserved where the driver tells the two apart."""


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process that has a context on a GPU."""

    pid: int
    """As the driver's side counts: inside a container it may be a number that means nothing there."""

    used_bytes: int | None
    """None where the driver does not tell: in some containers, on MIG, under some permissions."""


class Nvml:
    """A connection to the driver. Every method may raise NotTold or CardLost."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}

    @classmethod
    def open(cls, library: Any = None) -> Nvml:
        """NvmlUnavailable, with the reason, where nothing can be asked."""
        if library is None:
            try:
                library = importlib.import_module("pynvml")
            except ImportError:
                raise NvmlUnavailable("the Python package nvidia-ml-py is not installed", absent=True) from None
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            no_driver = (library.NVMLError_LibraryNotFound, library.NVMLError_DriverNotLoaded)
            raise NvmlUnavailable(f"NVML: {error}", absent=isinstance(error, no_driver)) from error
        return cls(library)

    def close(self) -> None:
        self._handles.clear()
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def driver_version(self) -> str:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def cards(self) -> tuple[Card, ...]:
        """Every GPU, in the order of nvidia-smi; in place of one that is cut, its slices."""
        return tuple(card for index in range(self._ask("nvmlDeviceGetCount")) for card in self._cards_at(index))

    def memory(self, uuid: str) -> CardMemory:
        info = self._memory_info(self._handle(uuid))
        return CardMemory(total_bytes=int(info.total), used_bytes=int(info.used))

    def processes(self, uuid: str) -> tuple[CardProcess, ...]:
        """Who computes or draws on it. One that ended meanwhile is not in it."""
        handle, found = self._handle(uuid), {}
        for kind in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            try:
                listed = self._ask(kind, handle)
            except NotTold:
                if "Compute" in kind:
                    raise
                continue  # data-centre GPUs draw nothing
            for process in listed:
                used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
                found[int(process.pid)] = CardProcess(pid=int(process.pid), used_bytes=used)
        return tuple(found.values())

    def takes_one_process(self, uuid: str) -> bool:
        """Whether it is set to serve a single process at a time."""
        mode = self._or_none(lambda: self._ask("nvmlDeviceGetComputeMode", self._handle(uuid)))
        return mode is not None and mode == self._library.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

    def distance(self, one: str, other: str) -> int | None:
        """How far apart two GPUs are: 0 over NVLink, then by the common ancestor on the bus, from 10 (one switch) to 50 (another
        processor socket); None where it is not told."""
        library, pair = self._library, (self._handle(one), self._handle(other))
        linked = self._or_none(lambda: self._ask("nvmlDeviceGetP2PStatus", *pair, library.NVML_P2P_CAPS_INDEX_NVLINK))
        if linked == library.NVML_P2P_STATUS_OK:
            return 0
        level = self._or_none(lambda: self._ask("nvmlDeviceGetTopologyCommonAncestor", *pair))
        return None if level is None else max(int(level), 1)

    def cores_near(self, uuid: str, most: int = 4096) -> frozenset[int] | None:
        """The CPU cores on its side of the machine; None where it is not told."""
        words = self._or_none(lambda: self._ask("nvmlDeviceGetCpuAffinity", self._handle(uuid), most // 64))
        if words is None:
            return None
        near = {64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1}
        return frozenset(near) or None

    def process_name(self, pid: int) -> str:
        return _text(self._ask("nvmlSystemGetProcessName", pid))

    def _cards_at(self, index: int) -> Iterator[Card]:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        if not self._is_cut(handle):
            yield self._card(index, handle, None)
            return
        whole = _text(self._ask("nvmlDeviceGetUUID", handle))
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle)):
            with contextlib.suppress(NotTold):  # numbers without a slice
                yield self._card(index, self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number), whole)

    def _card(self, index: int, handle: Any, slice_of: str | None) -> Card:
        uuid = _text(self._ask("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        info = self._memory_info(handle)
        major_minor = self._or_none(lambda: self._ask("nvmlDeviceGetCudaComputeCapability", handle))
        return Card(
            index=index, uuid=uuid, name=_text(self._ask("nvmlDeviceGetName", handle)), total_bytes=int(info.total),
            reserved_bytes=int(info.reserved) if hasattr(info, "reserved") else None,
            compute_capability=None if major_minor is None else ".".join(str(part) for part in major_minor), slice_of=slice_of,
        )  # fmt: skip

    def _is_cut(self, handle: Any) -> bool:
        mode = self._or_none(lambda: self._ask("nvmlDeviceGetMigMode", handle))
        return bool(mode and mode[0])

    def _memory_info(self, handle: Any) -> Any:
        try:
            return self._ask("nvmlDeviceGetMemoryInfo", handle, self._library.nvmlMemory_v2)
        except NotTold:  # drivers before 510 know one kind of figure only, in which what is reserved counts as used
            return self._ask("nvmlDeviceGetMemoryInfo", handle)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._ask("nvmlDeviceGetHandleByUUID", uuid)
        return self._handles[uuid]

    def _ask(self, function: str, *arguments: Any) -> Any:
        library = self._library
        try:
            return getattr(library, function)(*arguments)
        except (library.NVMLError_GpuIsLost, library.NVMLError_ResetRequired) as error:
            raise CardLost(str(error)) from error
        except library.NVMLError as error:
            raise NotTold(f"{function}: {error}") from error

    @staticmethod
    def _or_none(ask: Callable[[], Any]) -> Any:
        with contextlib.suppress(NotTold):
            return ask()
        return None


def _text(said: str | bytes) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said
