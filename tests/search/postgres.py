"""A PostgreSQL server of the test's own: made by initdb, on a free port, in a folder of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLACES = (
    *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
    Path("/usr/local/bin"),
    Path("/usr/bin"),
)
PASSWORD = "correct-horse"


def installed(name: str) -> str | None:
    """Debian keeps the server's programs beside PATH."""
    return shutil.which(name, path=os.pathsep.join(map(str, PLACES)))


def program(name: str) -> str:
    path = installed(name)
    assert path is not None, "PostgreSQL is needed for this test: apt-get install postgresql"
    return path


class Server:
    """Can be stopped, killed and started again; what it holds stays."""

    def __init__(self, folder: Path) -> None:
        self._data, self._folder = folder / "data", folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        # The server refuses to run as root.
        self._user = "nobody" if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        word = folder / "password"
        word.write_text(PASSWORD)
        if self._user is not None:
            os.chown(word, pwd.getpwnam("nobody").pw_uid, -1)
        arguments = [
            "-D",
            str(self._data),
            "-U",
            "tuner",
            "--pwfile",
            str(word),
            "-A",
            "scram-sha-256",
            "--no-sync",
            "-E",
            "UTF8",
        ]
        subprocess.run(
            [program("initdb"), *arguments],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=folder,
        )

    @property
    def url(self) -> str:
        return f"postgresql://tuner:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = [
            "-D",
            str(self._data),
            "-p",
            str(self.port),
            "-k",
            str(self._folder),
            "-c",
            "fsync=off",
            "-h",
            "127.0.0.1",
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), *options],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._folder,
            )
        until = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < until, (
                self._folder / "log"
            ).read_text()
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are cut at once; SIGQUIT: as if the machine had failed."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(timeout=30)

    def _answers(self) -> bool:
        command = [program("pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def server() -> Iterator[Server]:
    # Not in pytest's folders: whichever run of it starts next closes them to the user that the
    # server runs as.
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        cluster = Server(Path(folder))
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
