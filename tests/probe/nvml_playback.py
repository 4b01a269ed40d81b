"""A library with nvidia-ml-py's own functions, structures and errors that plays recordings back,
moment by moment.

Process numbers in recordings are above any that Linux gives, so that no process of the test machine
answers to them.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pynvml

RECORDINGS = Path(__file__).parent / "nvml_recordings"
MIB = 2**20


class Playback:
    """Put where `Nvml.open` would import pynvml. `at` moves to another moment of the recording."""

    def __init__(self, name: str) -> None:
        self._recording: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
        self._moment: list[dict[str, Any]] = self._recording["moments"][0]
        self.asked: list[str] = []

    def at(self, number: int) -> None:
        self._moment = self._recording["moments"][number]

    def put(
        self,
        device: int,
        used_mib: int,
        compute: list[dict[str, Any]],
    ) -> None:
        """A moment of the test's own."""
        moment = [dict(state) for state in self._moment]
        moment[device] = {"used_mib": used_mib, "compute": compute}
        self._moment = moment

    def __getattr__(self, name: str) -> Any:
        """Constants, structures and errors are the real ones."""
        if name.startswith(("NVML", "c_nvml", "nvmlMemory")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        _raise(self._recording.get("init"))

    def nvmlShutdown(self) -> None:
        self.asked.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._recording["driver"])

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        reply = self._recording.get("names", {}).get(str(pid), "NVMLError_NotFound")
        _raise(reply)
        return str(reply)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._recording["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return (index, None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for index, device in enumerate(self._recording["devices"]):
            if device["uuid"] == uuid:
                return (index, None)
            for number, part in enumerate(device.get("slices", [])):
                if part is not None and part["uuid"] == uuid:
                    return (index, number)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(self._device(handle)["uuid"])

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(self._device(handle)["name"])

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        major, minor = self._device(handle)["capability"]
        return (major, minor)

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return int(self._device(handle).get("compute_mode", 0))

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        mode = int(self._device(handle)["mig"])
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(self._device(handle)["slices"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, number: int) -> Any:
        if self._device(handle)["slices"][number] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return (handle[0], number)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        device, state = self._device(handle), self._state(handle)
        _raise(state["used_mib"])
        if version is not None and device.get("only_v1"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        total, used, reserved = (
            device["total_mib"] * MIB,
            state["used_mib"] * MIB,
            device["reserved_mib"] * MIB,
        )
        if version is None:
            return pynvml.c_nvmlMemory_t(
                total=total,
                free=total - used - reserved,
                used=used + reserved,
            )
        return pynvml.c_nvmlMemory_v2_t(
            version=version,
            total=total,
            reserved=reserved,
            free=total - used - reserved,
            used=used,
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        listed = self._state(handle)["compute"]
        _raise(listed)
        return [_process(entry) for entry in listed]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _device(self, handle: Any) -> dict[str, Any]:
        index, number = handle
        device: dict[str, Any] = self._recording["devices"][index]
        return device if number is None else device["slices"][number]

    def _state(self, handle: Any) -> dict[str, Any]:
        index, number = handle
        state: dict[str, Any] = self._moment[index]
        return state if number is None else state["slices"][number]


def _process(entry: dict[str, Any]) -> Any:
    """Return the structure as nvidia-ml-py converts it: "not available" becomes None."""
    absent = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    used = absent if entry["mib"] is None else entry["mib"] * MIB
    friendly = pynvml.nvmlStructToFriendlyObject(
        pynvml.c_nvmlProcessInfo_v3_t(pid=entry["pid"], usedGpuMemory=ctypes.c_ulonglong(used))
    )
    if friendly.usedGpuMemory == absent:
        friendly.usedGpuMemory = None
    return friendly


def _raise(reply: Any) -> None:
    if isinstance(reply, str) and reply.startswith("NVMLError_"):
        raise getattr(pynvml, reply)()
