"""NVIDIA GPUs of this machine, and the library that reports them (NVML). No other module calls it.

Replies become plain values; errors become one of three exceptions. `Nvml.open()` accepts
nvidia-ml-py's module or a replacement with the same functions: tests play back recordings.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.errors import HardwareNotHere
from autotune.core.units import MIB, format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA's numbers equal to the driver's; set in probes, hence in the written launch too."""
MIN_REPORTED_BYTES = 64 * MIB  # drivers, displays and monitors hold less than this on an idle GPU
MAX_CORES = 4096  # CPU cores that are looked at for those near a GPU


class NvmlUnavailable(Exception):
    """NVML cannot be used. `absent`: no NVIDIA driver; otherwise the driver refuses."""

    def __init__(self, why: str, *, absent: bool) -> None:
        super().__init__(why)
        self.absent = absent


class NvmlNotSupported(Exception):
    """Value without a reply: not supported, not permitted, or its process has ended."""


class GpuLost(Exception):
    """GPU that does not answer any more, or needs a reset."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """GPU of this machine, or one MIG slice of it, as the driver reports it."""

    name: str
    memory_bytes: int
    index: int | None = None  # nvidia-smi index, by PCI address; a slice has its GPU's
    uuid: str | None = None  # `GPU-...`, or `MIG-...` for a slice
    reserved_bytes: int | None = (
        None  # of the memory: reserved by the driver and ECC; None: unknown
    )
    compute_capability: str | None = None
    driver_version: str | None = None
    slice_of: str | None = None  # UUID of the whole GPU; None: not a slice


class Nvml:
    """Connection to the driver. Each method may raise NvmlNotSupported or GpuLost."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}
        self.unreadable: dict[
            int, str
        ] = {}  # reasons why GPUs are absent from `cards`, by nvidia-smi index

    @classmethod
    def open(cls, library: Any = None) -> Nvml:
        """Connect; raise NvmlUnavailable with the reason if that fails."""
        if library is None:
            try:
                library = importlib.import_module("pynvml")
            except ImportError:
                raise NvmlUnavailable(
                    "the Python package nvidia-ml-py is not installed", absent=True
                ) from None
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
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def cards(self) -> tuple[Device, ...]:
        """Return the GPUs in the order of nvidia-smi. MIG slices replace their GPU.

        A GPU that is lost, not permitted or without memory of its own becomes `unreadable`; an
        error only if no other one is left.
        """
        found: list[Device] = []
        failure: NvmlNotSupported | GpuLost | None = None
        self.unreadable = {}
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                found += self._cards_at(index)
            except (NvmlNotSupported, GpuLost) as reason:
                self.unreadable[index], failure = str(reason), reason
        if failure is not None and not found:
            raise failure
        return tuple(found)

    def used_bytes(self, uuid: str) -> int:
        """Return what processes and their contexts hold; excludes reserved bytes from driver 510
        on.
        """
        return int(self._memory_info(self._handle(uuid)).used)

    def processes(self, uuid: str) -> dict[int, int | None]:
        """Return the bytes of each compute and graphics process of a GPU, by its number.

        Numbers are of the driver's PID namespace: possibly meaningless inside a container. Bytes
        are None where the driver does not report them (some containers, MIG, some permissions).
        """
        handle = self._handle(uuid)
        found: dict[int, int | None] = {}
        for kind in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            try:
                listed = self._call(kind, handle)
            except NvmlNotSupported:
                if "Compute" in kind:
                    raise
                continue  # data-centre GPUs have no graphics processes
            for process in listed:
                found[int(process.pid)] = (
                    None if process.usedGpuMemory is None else int(process.usedGpuMemory)
                )
        return found

    def takes_one_process(self, uuid: str) -> bool:
        """Return True if the compute mode allows a single process."""
        mode = self._or_none(lambda: self._call("nvmlDeviceGetComputeMode", self._handle(uuid)))
        return mode is not None and mode == self._library.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

    def distance(self, one: str, other: str) -> int | None:
        """Return the distance of two GPUs: 0 over NVLink, else NVML's topology level from 10 (one
        PCIe switch) to 50 (another CPU socket); None if unknown."""
        library, pair = self._library, (self._handle(one), self._handle(other))
        linked = self._or_none(
            lambda: self._call("nvmlDeviceGetP2PStatus", *pair, library.NVML_P2P_CAPS_INDEX_NVLINK)
        )
        if linked == library.NVML_P2P_STATUS_OK:
            return 0
        level = self._or_none(lambda: self._call("nvmlDeviceGetTopologyCommonAncestor", *pair))
        return None if level is None else max(int(level), 1)

    def cores_near(self, uuid: str) -> frozenset[int] | None:
        """Return the CPU cores of the GPU's NUMA node; None if unknown."""
        words = self._or_none(
            lambda: self._call("nvmlDeviceGetCpuAffinity", self._handle(uuid), MAX_CORES // 64)
        )
        if words is None:
            return None
        near = {
            64 * place + bit
            for place, word in enumerate(words)
            for bit in range(64)
            if int(word) >> bit & 1
        }
        return frozenset(near) or None

    def process_name(self, pid: int) -> str:
        return _text(self._call("nvmlSystemGetProcessName", pid))

    def _cards_at(self, index: int) -> Iterator[Device]:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        mode = self._or_none(lambda: self._call("nvmlDeviceGetMigMode", handle))
        if not (mode and mode[0]):
            yield self._card(index, handle, None)
            return
        whole = _text(self._call("nvmlDeviceGetUUID", handle))
        for number in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle)):
            with contextlib.suppress(NvmlNotSupported):  # numbers without a slice
                yield self._card(
                    index, self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number), whole
                )

    def _card(self, index: int, handle: Any, slice_of: str | None) -> Device:
        uuid = _text(self._call("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        info = self._memory_info(handle)
        major_minor = self._or_none(
            lambda: self._call("nvmlDeviceGetCudaComputeCapability", handle)
        )
        return Device(
            index=index,
            uuid=uuid,
            name=_text(self._call("nvmlDeviceGetName", handle)),
            memory_bytes=int(info.total),
            reserved_bytes=int(info.reserved) if hasattr(info, "reserved") else None,
            compute_capability=(
                None if major_minor is None else ".".join(str(part) for part in major_minor)
            ),
            slice_of=slice_of,
        )

    def _memory_info(self, handle: Any) -> Any:
        try:
            return self._call("nvmlDeviceGetMemoryInfo", handle, self._library.nvmlMemory_v2)
        # drivers before 510 report one figure that counts reserved bytes as used
        except NvmlNotSupported:
            return self._call("nvmlDeviceGetMemoryInfo", handle)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._call("nvmlDeviceGetHandleByUUID", uuid)
        return self._handles[uuid]

    def _call(self, function: str, *arguments: Any) -> Any:
        library = self._library
        try:
            return getattr(library, function)(*arguments)
        except (library.NVMLError_GpuIsLost, library.NVMLError_ResetRequired) as error:
            raise GpuLost(str(error)) from error
        except library.NVMLError as error:
            raise NvmlNotSupported(f"{function}: {error}") from error

    @staticmethod
    def _or_none(call: Callable[[], Any]) -> Any:
        with contextlib.suppress(NvmlNotSupported):
            return call()
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def name_of(pid: int, nvml: Nvml | None = None) -> str:
    """Return `python (pid 4711, ada)`, with the parts that are known."""
    import psutil

    with contextlib.suppress(psutil.Error, KeyError):
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, {process.username()})"
    name = ""
    with contextlib.suppress(NvmlNotSupported, GpuLost):
        name = nvml.process_name(pid) if nvml is not None else ""
    return (
        f"{name.split()[0].rsplit('/', 1)[-1] if name.split() else 'a process outside this container'}"
        f" (pid {pid})"
    )


def in_words(held: Mapping[int, int | None], nvml: Nvml | None = None) -> tuple[str, ...]:
    """Describe each process with its bytes, the largest first."""
    ranked = sorted(held.items(), key=lambda one: -(one[1] or 0))
    return tuple(
        f"{name_of(pid, nvml)}: {'unknown' if used is None else format_bytes(used)}"
        for pid, used in ranked
    )


def named(words: tuple[str, ...]) -> str:
    """Join the descriptions; NVML lists none in some containers."""
    return ", ".join(words) or "processes that NVML does not list here"


def devices_here(library: Any = None, variable: str | None = None) -> tuple[Device, ...]:
    """Return the visible GPUs from NVML, or from nvidia-smi without NVML.

    Raises HardwareNotHere when a driver is present and does not answer. `variable` overrides
    CUDA_VISIBLE_DEVICES.
    """
    chosen = os.environ.get(VISIBLE) if variable is None else variable
    try:
        with contextlib.closing(Nvml.open(library)) as nvml:
            return devices_of(nvml, chosen)
    except (NvmlUnavailable, NvmlNotSupported, GpuLost) as reason:
        if isinstance(reason, NvmlUnavailable) and reason.absent:
            return visible(_by_nvidia_smi(), chosen)
        raise HardwareNotHere(
            f"This machine has an NVIDIA driver, and it can't be asked for its GPUs ({reason}).",
            way_out=(
                "See that `nvidia-smi` works (a driver that was updated needs a restart), or type"
                " --gpus cpu."
            ),
        ) from reason


def devices_of(nvml: Nvml, variable: str | None) -> tuple[Device, ...]:
    """Return the GPUs that CUDA shows under this CUDA_VISIBLE_DEVICES, over an open connection."""
    version = nvml.driver_version()
    return visible(
        [replace(card, driver_version=version) for card in nvml.cards()], variable, nvml.unreadable
    )


def visible(
    devices: Sequence[Device], variable: str | None, unreadable: Collection[int] = ()
) -> tuple[Device, ...]:
    """Filter by CUDA_VISIBLE_DEVICES, in its order. Like CUDA, stop at the first unknown entry; the
    numbers of `unreadable` GPUs are known."""
    if variable is None:
        return tuple(devices)
    seen: list[Device] = []
    for part in variable.split(","):
        if part.strip().isdigit() and int(part) in unreadable:
            continue
        named = _named(part.strip(), devices)
        if not named:
            break
        seen += named
    return tuple(seen)


def _named(part: str, devices: Sequence[Device]) -> list[Device]:
    """Match an index or a UUID prefix. The index of a GPU with MIG matches all of its slices."""
    if part.isdigit():
        return [device for device in devices if device.index == int(part)]
    alike = [
        device
        for device in devices
        if device.uuid is not None and part and device.uuid.startswith(part)
    ]
    return alike if len(alike) == 1 else []


def _by_nvidia_smi() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [
        [cell.strip() for cell in line.split(",", 3)]
        for line in answer.splitlines()
        if line.count(",") >= 3
    ]
    return [
        Device(name=name, memory_bytes=int(mib) * MIB, index=int(index), uuid=uuid)
        for index, uuid, mib, name in rows
        if mib.isdigit() and index.isdigit()
    ]
