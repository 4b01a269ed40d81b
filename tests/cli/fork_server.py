"""Processes of the program, forked from one that has imported it.

Importing the program takes 0.5 s of CPU time, most of a short call; a fork takes 0.07 s with the
call. `python fork_server.py SOCKET` imports every module once and forks for each connection. A
connection sends the call as JSON with its standard streams, and receives the exit code.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import autotune
import autotune.cli

LEFT_OUT = ("autotune.worker", "autotune.integrations", "autotune.emulator.inject")
"""Packages that run in other processes than the program's own."""

STREAMS = 3
MAX_CALL_BYTES = 1 << 20


class ForkServer:
    """A server in a process of its own, and the calls to it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "calls"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._path)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens

    def call(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        streams: Sequence[IO[Any]],
        timeout: float,
    ) -> int:
        """Run the program, and return its exit code; subprocess.TimeoutExpired if it does not
        end.
        """
        call = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
        descriptors = [stream.fileno() for stream in streams]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout)
            connection.connect(str(self._path))
            socket.send_fds(connection, [json.dumps(call).encode()], descriptors)
            pid = int(connection.recv(64))
            try:
                return int(connection.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(arguments), timeout) from None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(path: str) -> None:
    """Fork for each connection; the processes in between end by themselves."""
    for module in pkgutil.walk_packages(autotune.__path__, "autotune."):
        if not module.name.startswith(LEFT_OUT) and not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
                os._exit(0)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Run one call in a child, and send its number and its exit code."""
    message, descriptors = _receive(connection)
    call = json.loads(message)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(call, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize * STREAMS
    message, ancillary, _, _ = connection.recvmsg(MAX_CALL_BYTES, socket.CMSG_LEN(size))
    descriptors = array.array("i")
    for _, _, payload in ancillary:
        descriptors.frombytes(payload)
    return message, list(descriptors)


def _become(call: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Become the program: its streams, folder, environment and arguments.

    Its end is the interpreter's own, with the exit handlers of what was imported.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(call["environment"])
    os.chdir(call["cwd"])
    sys.path[0] = call["cwd"]
    sys.argv = ["autotune", *call["arguments"]]
    autotune.cli.main()
    raise AssertionError("the program exits")


if __name__ == "__main__":
    serve(sys.argv[1])
