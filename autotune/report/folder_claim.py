"""Claim of an output folder: one run at a time works in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from autotune.core.errors import BadInput

CLAIM = ".running"
"""File name of the claim. The kernel releases its lock however the run ends."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Run that works in a folder."""

    pid: int
    host: str
    since: str


def unwritable(out: Path, error: OSError) -> BadInput:
    """Return the error for a folder that can't be written."""
    return BadInput(f"--out {out} can't be written: {error.strerror}.", way_out="Give another folder: --out ~/autotune-out.")


@contextlib.contextmanager
def claimed_folder(out: Path) -> Iterator[None]:
    """Create the folder and claim it; BadInput if another run works in it.

    On exit the claim is removed, and so are the folders created here, if they are still empty.
    """
    missing = [folder for folder in (out.absolute(), *out.absolute().parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    claim = out / CLAIM
    try:
        descriptor = _lock(claim, out)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if _is_same(claim, descriptor):
                    claim.unlink()
            os.close(descriptor)
    finally:
        for folder in missing:  # deepest first
            with contextlib.suppress(OSError):  # not empty, or deleted
                folder.rmdir()


def _lock(file: Path, out: Path) -> int:
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(out, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                busy = _busy(out, descriptor)
                os.close(descriptor)
                raise busy from None
            # This file system has no locks: nothing to rely on.
        if _is_same(file, descriptor):
            break
        os.close(descriptor)  # the former owner removed the file between the two calls
    owner = Owner(pid=os.getpid(), host=platform.node(), since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"))
    with contextlib.suppress(OSError):  # a full disk: the lock counts without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(owner), 0)
    return descriptor


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _busy(out: Path, descriptor: int) -> BadInput:
    try:
        owner = msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
        whose = f"process {owner.pid} on {owner.host}, since {owner.since}"
    except (OSError, msgspec.MsgspecError):
        whose = "another run"
    return BadInput(
        f"--out {out} is in use by {whose}.",
        way_out="Give this run a folder of its own: --out FOLDER. Runs may share a study by --storage and --resume.",
    )
