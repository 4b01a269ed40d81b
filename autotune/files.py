"""Files of the user's: read with a bound, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from autotune.errors import BadInput
from autotune.units import MIB

T = TypeVar("T")


def read_json(file: Path, kind: type[T], *, largest_bytes: int, way_out: str) -> T:
    """What the file holds, checked against `kind`; whatever stands in the way is said in a sentence."""
    try:
        if file.stat().st_size > largest_bytes:
            raise BadInput(f"{file} has more than {largest_bytes // MIB} MiB, and is something else.", way_out=way_out)
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise BadInput(f"{file} can't be read: {error.strerror}.", way_out=way_out) from None
    except msgspec.ValidationError as error:
        raise BadInput(f"{file} holds something else: {error}.", way_out=way_out) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} holds no JSON: {error}.", way_out=way_out) from None


FOR_EVERYBODY, TO_BE_RUN, FOR_ITS_OWNER = 0o666, 0o777, 0o600


def write_whole(file: Path, content: bytes, *, way_out: str) -> None:
    """Whole or not at all, with the permissions that the user's other files get; what stands in the way is said in a sentence."""
    try:
        put_whole(file, content)
    except OSError as error:
        raise BadInput(f"{file} can't be written: {error.strerror}.", way_out=way_out) from error


def put_whole(file: Path, content: bytes, *, mode: int = FOR_EVERYBODY) -> None:
    """Written beside and moved into place, whoever else writes the same; the user's umask takes away from `mode` as always."""
    handle, name = tempfile.mkstemp(prefix=".unfinished-", dir=file.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as unfinished:
            unfinished.write(content)
        Path(name).chmod(mode & ~_umask())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """There is no way to ask for it but to set it."""
    was = os.umask(0)
    os.umask(was)
    return was
