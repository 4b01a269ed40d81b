"""Keeps CUDA uninitialised until the ranks are forked: its driver does not work in a child of a
process that initialised it.

Some packages query the GPUs during import: bitsandbytes chooses its library by their compute
capability. The choice stays, so the answer has to be correct. During imports, a forked child
answers such queries with CUDA and exits. `initialised` reports afterwards if CUDA was initialised
nevertheless.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

CHILD_TIMEOUT_S = 60.0  # a driver that wakes up eight GPUs one after the other takes half of this
_CUDA_SUCCESS = 0
_RTLD_NOLOAD = 4  # flag of `dlopen`: return a library only if the process has loaded it already


@contextlib.contextmanager
def query_in_child_process(torch: Any) -> Iterator[None]:
    """Context in which a child process answers queries about GPUs.

    No effect in a build of torch without CUDA, or in a process that initialised CUDA before.
    """
    if not hasattr(torch._C, "_cuda_getDeviceCount") or torch.cuda.is_initialized():
        yield
        return
    devices = _Devices(torch)
    replacements = (
        (torch._C, "_cuda_getDeviceCount", devices.count),
        (torch.cuda, "get_device_properties", devices.properties),
        (torch.cuda, "current_device", lambda: 0),  # nothing has chosen another one yet
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            original = getattr(owner, name)
            setattr(owner, name, devices.during_imports(replacement, original))
            stack.callback(setattr, owner, name, original)
        stack.callback(setattr, devices, "importing", False)  # first of all
        yield


class _NoAnswer(Exception):
    """The child failed: the query goes to CUDA itself, and ranks become fresh interpreters."""


class _Devices:
    """GPU properties from one child process, which answers all queries."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._count: Callable[[], int] = torch._C._cuda_getDeviceCount
        self._properties: Callable[[int], Any] = torch.cuda.get_device_properties
        self._properties_by_index: list[dict[str, Any]] | None = None  # once the child answered
        self.importing = True

    def during_imports(
        self, replacement: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that uses the original after the imports, for stored references."""

        def query(*args: Any, **kwargs: Any) -> Any:
            if self.importing and not self._torch.cuda.is_initialized():
                with contextlib.suppress(_NoAnswer):
                    return replacement(*args, **kwargs)
            return original(*args, **kwargs)

        return query

    def count(self) -> int:
        return len(self._all())

    def properties(self, device: Any = None) -> Any:
        index = self._torch.cuda._utils._get_device_index(device, optional=True)
        devices = self._all()
        if not 0 <= index < len(devices):
            raise AssertionError("Invalid device id")
        return SimpleNamespace(**devices[index])

    def _all(self) -> list[dict[str, Any]]:
        if self._properties_by_index is None:
            self._properties_by_index = _in_child(self._query)
        return self._properties_by_index

    def _query(self) -> list[dict[str, Any]]:
        """Query CUDA in the child, where the originals call each other."""
        self.importing = False
        return [_values(self._properties(index)) for index in range(self._count())]


def _values(properties: Any) -> dict[str, Any]:
    """Return the public attributes of a device's properties, without methods."""
    values = {}
    for name in dir(properties):
        if not name.startswith("_"):
            value = getattr(properties, name)
            if not callable(value):
                values[name] = value
    return values


def _in_child(query: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the result of `query` in a forked child. Raise _NoAnswer on failure or timeout."""
    # 1. The child.
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Our only other thread waits for the parent and holds no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as pipe:
                answer = json.dumps(query(), default=str)
                pipe.write(answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    # 2. Its answer.
    os.close(write_end)
    try:
        received = _read_all(read_end)
    finally:
        os.close(read_end)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    try:
        devices = json.loads(received)
        return [dict(device) for device in devices]
    except ValueError as error:
        raise _NoAnswer from error


def _read_all(read_end: int) -> bytes:
    """Read until the other end is closed, or silent for too long."""
    received = b""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    while poll.poll(CHILD_TIMEOUT_S * 1000):
        piece = os.read(read_end, 65536)
        if not piece:
            break
        received += piece
    return received


def initialised() -> str | None:
    """Return the reason that CUDA is unusable in forks of this process, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    # Before cuInit, the result is CUDA_ERROR_NOT_INITIALIZED.
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_SUCCESS:
        return "CUDA's driver was initialised"
    return None
