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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.errors import HardwareNotHere
from autotune.core.units import MIB, format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"

# Makes CUDA's numbers equal to the driver's; set in probes, hence in the written launch too.
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

MIN_REPORTED_BYTES = 64 * MIB  # drivers, displays and monitors hold less than this on an idle GPU
MAX_CORES = 4096  # CPU cores that are looked at for those near a GPU
MASK_BITS = 64  # cores in each of NVML's masks


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
    reserved_bytes: int | None = None  # by the driver and ECC, of the memory; None: unknown
    compute_capability: str | None = None
    driver_version: str | None = None
    slice_of: str | None = None  # UUID of the whole GPU; None: not a slice


class Nvml:
    """Connection to the driver. Each method may raise NvmlNotSupported or GpuLost."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}

        self.unreadable: dict[int, str] = {}
        """Reasons why GPUs are absent from `cards`, by nvidia-smi index."""

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
        devices: list[Device] = []
        failure: NvmlNotSupported | GpuLost | None = None
        self.unreadable = {}
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                devices += self._cards_at(index)
            except (NvmlNotSupported, GpuLost) as reason:
                self.unreadable[index] = str(reason)
                failure = reason
        if failure is not None and not devices:
            raise failure
        return tuple(devices)

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
        bytes_by_process: dict[int, int | None] = {}
        for kind in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            try:
                processes = self._call(kind, handle)
            except NvmlNotSupported:
                if "Compute" in kind:
                    raise
                continue  # data-centre GPUs have no graphics processes
            for process in processes:
                used = process.usedGpuMemory
                bytes_by_process[int(process.pid)] = None if used is None else int(used)
        return bytes_by_process

    def busy_percent(self, uuid: str) -> int:
        """Return the share of the last sampling period in which the GPU computed."""
        handle = self._handle(uuid)
        rates = self._call("nvmlDeviceGetUtilizationRates", handle)
        return int(rates.gpu)

    def takes_one_process(self, uuid: str) -> bool:
        """Return True if the compute mode allows a single process."""
        handle = self._handle(uuid)
        mode = self._call_or_none("nvmlDeviceGetComputeMode", handle)
        return mode is not None and mode == self._library.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS

    def distance(self, uuid: str, peer_uuid: str) -> int | None:
        """Return the distance of two GPUs: 0 over NVLink, else NVML's topology level from 10 (one
        PCIe switch) to 50 (another CPU socket); None if unknown.
        """
        library = self._library
        pair = self._handle(uuid), self._handle(peer_uuid)
        link = self._call_or_none(
            "nvmlDeviceGetP2PStatus", *pair, library.NVML_P2P_CAPS_INDEX_NVLINK
        )
        if link == library.NVML_P2P_STATUS_OK:
            return 0
        level = self._call_or_none("nvmlDeviceGetTopologyCommonAncestor", *pair)
        return None if level is None else max(int(level), 1)

    def cores_near(self, uuid: str) -> frozenset[int] | None:
        """Return the CPU cores of the GPU's NUMA node; None if unknown."""
        masks = self._call_or_none(
            "nvmlDeviceGetCpuAffinity", self._handle(uuid), MAX_CORES // MASK_BITS
        )
        if masks is None:
            return None
        cores = set()
        for place, mask in enumerate(masks):
            for bit in range(MASK_BITS):
                if int(mask) >> bit & 1:
                    cores.add(MASK_BITS * place + bit)
        return frozenset(cores) or None

    def process_name(self, pid: int) -> str:
        return _text(self._call("nvmlSystemGetProcessName", pid))

    def _cards_at(self, index: int) -> Iterator[Device]:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        mode = self._call_or_none("nvmlDeviceGetMigMode", handle)
        if not (mode and mode[0]):
            yield self._card(index, handle, None)
            return
        gpu_uuid = _text(self._call("nvmlDeviceGetUUID", handle))
        for number in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle)):
            with contextlib.suppress(NvmlNotSupported):  # numbers without a slice
                slice_handle = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
                yield self._card(index, slice_handle, gpu_uuid)

    def _card(
        self,
        index: int,
        handle: Any,
        slice_of: str | None,
    ) -> Device:
        uuid = _text(self._call("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        info = self._memory_info(handle)
        major_minor = self._call_or_none("nvmlDeviceGetCudaComputeCapability", handle)
        capability = None
        if major_minor is not None:
            capability = ".".join(str(part) for part in major_minor)
        return Device(
            index=index,
            uuid=uuid,
            name=_text(self._call("nvmlDeviceGetName", handle)),
            memory_bytes=int(info.total),
            reserved_bytes=int(info.reserved) if hasattr(info, "reserved") else None,
            compute_capability=capability,
            slice_of=slice_of,
        )

    def _memory_info(self, handle: Any) -> Any:
        try:
            return self._call("nvmlDeviceGetMemoryInfo", handle, self._library.nvmlMemory_v2)
        except NvmlNotSupported:
            # Drivers before 510 report one figure that counts reserved bytes as used.
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

    def _call_or_none(self, function: str, *arguments: Any) -> Any:
        with contextlib.suppress(NvmlNotSupported):
            return self._call(function, *arguments)
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def name_of(pid: int, nvml: Nvml | None = None) -> str:
    """Return `python (pid 4711, ada)`, with the parts that are known."""
    import psutil

    with contextlib.suppress(psutil.Error, KeyError):
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, {process.username()})"
    command: list[str] = []
    if nvml is not None:
        with contextlib.suppress(NvmlNotSupported, GpuLost):
            command = nvml.process_name(pid).split()
    name = command[0].rsplit("/", 1)[-1] if command else "a process outside this container"
    return f"{name} (pid {pid})"


def in_words(bytes_by_pid: Mapping[int, int | None], nvml: Nvml | None = None) -> tuple[str, ...]:
    """Describe each process with its bytes, the largest first."""
    descriptions = []
    for pid in sorted(bytes_by_pid, key=lambda pid: bytes_by_pid[pid] or 0, reverse=True):
        used = bytes_by_pid[pid]
        size = "unknown" if used is None else format_bytes(used)
        descriptions.append(f"{name_of(pid, nvml)}: {size}")
    return tuple(descriptions)


def listed(descriptions: tuple[str, ...]) -> str:
    """Join the descriptions; NVML lists none in some containers."""
    return ", ".join(descriptions) or "processes that NVML does not list here"


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
    cards = [replace(card, driver_version=version) for card in nvml.cards()]
    return visible(cards, variable, nvml.unreadable)


def visible(
    devices: Sequence[Device],
    variable: str | None,
    unreadable: Collection[int] = (),
) -> tuple[Device, ...]:
    """Filter by CUDA_VISIBLE_DEVICES, in its order. Like CUDA, stop at the first unknown entry; the
    numbers of `unreadable` GPUs are known."""
    if variable is None:
        return tuple(devices)
    shown: list[Device] = []
    for entry in variable.split(","):
        if entry.strip().isdigit() and int(entry) in unreadable:
            continue
        matching = _matching(entry.strip(), devices)
        if not matching:
            break
        shown += matching
    return tuple(shown)


def _matching(entry: str, devices: Sequence[Device]) -> list[Device]:
    """Match an index or a UUID prefix. The index of a GPU with MIG matches all of its slices."""
    if entry.isdigit():
        return [device for device in devices if device.index == int(entry)]
    if not entry:
        return []
    alike = [device for device in devices if (device.uuid or "").startswith(entry)]
    if len(alike) != 1:
        return []
    return alike


def _by_nvidia_smi() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return []
    devices = []
    for line in reply.stdout.splitlines():
        if line.count(",") < 3:
            continue
        index, uuid, mib, name = map(str.strip, line.split(",", 3))
        if mib.isdigit() and index.isdigit():
            devices.append(
                Device(
                    name=name,
                    memory_bytes=int(mib) * MIB,
                    index=int(index),
                    uuid=uuid,
                )
            )
    return devices
