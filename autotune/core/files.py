"""The user's files: reading within limits, and atomic writing.

A file can be a device, a pipe without a writer, larger than memory, or small and a gigabyte once it
is decoded. Every reader of a file that autotune did not write itself goes through `read_bounded`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from autotune.core.errors import BadInput
from autotune.core.units import MIB

T = TypeVar("T")

FOR_EVERYBODY, TO_BE_RUN, FOR_ITS_OWNER = (
    0o666,
    0o777,
    0o600,
)  # file modes before the umask: plain file, executable, private file
PRIVATE_FOLDER = 0o700


def describe_full_disk(error: OSError) -> str | None:
    """Return the error as a sentence if no space is left; None for any other."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f" on the disk of {error.filename}" if error.filename else ""
    return f"No space is left{where}. Free some; a search goes on with --resume."


def sqlite_url(file: Path) -> str:
    """Return the URL of a database file; what a URL reads as something else is escaped."""
    return f"sqlite:///{str(file.resolve()).replace('%', '%25').replace('?', '%3F')}"


def sqlite_file(url: str) -> Path | None:
    """Return the file of such a URL, None for other databases."""
    scheme, _, path = url.partition(":///")
    return (
        Path(unquote(path.partition("?")[0]))
        if scheme.startswith("sqlite") and path not in ("", ":memory:")
        else None
    )


MAX_DEPTH = 60  # levels of nested lists and mappings in a file; real ones have fewer than ten
MAX_JSON_VALUES = 1_000_000  # values in a JSON file: about 100 MB of memory


def read_bounded(file: Path, *, largest_bytes: int, way_out: str) -> bytes:
    """Return the content of a regular file up to this size; any obstacle becomes a BadInput."""
    try:
        # Without O_NONBLOCK, a pipe would be waited for.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:  # noqa: PTH123
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
                raise BadInput(f"{file} is {what}, and a file is needed.", way_out=way_out)
            content = opened.read(largest_bytes + 1)
    except OSError as error:
        raise BadInput(f"{file} can't be read: {error.strerror}.", way_out=way_out) from None
    except ValueError as error:  # a null byte in the name
        raise BadInput(f"{str(file)!r} can't be read: {error}.", way_out=way_out) from None
    if len(content) > largest_bytes:
        size = (
            f"{largest_bytes // MIB} MiB"
            if largest_bytes >= MIB
            else f"{largest_bytes // 1024} KiB"
        )
        raise BadInput(f"{file} is larger than {size}: not the expected file.", way_out=way_out)
    return content


def refuse_special_files(place: Path, *, way_out: str) -> None:
    """Refuse a pipe or a device, alone or in a folder, that a library would open later: it would
    wait for ever.
    """
    try:
        for file in (place, *(place.iterdir() if place.is_dir() else ())):
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise BadInput(
                    f"{file} is a pipe or a device, and a file is needed.", way_out=way_out
                )
    except OSError as error:
        raise BadInput(f"{place} can't be read: {error.strerror}.", way_out=way_out) from None
    except ValueError as error:  # a null byte in the name
        raise BadInput(f"{str(place)!r} can't be read: {error}.", way_out=way_out) from None


def read_text(file: Path, *, largest_bytes: int, way_out: str) -> str:
    """Return the content of a UTF-8 file."""
    try:
        return read_bounded(file, largest_bytes=largest_bytes, way_out=way_out).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8 text (byte {error.start}).", way_out=way_out) from None


def read_loose_json(file: Path, *, largest_bytes: int, way_out: str) -> Any:
    """Decode a JSON file as Python's parser does, which accepts NaN and Infinity."""
    content = _few_values(
        file,
        read_bounded(file, largest_bytes=largest_bytes, way_out=way_out),
        MAX_JSON_VALUES,
        way_out,
    )
    try:
        return shallow(file, json.loads(content), way_out)
    except RecursionError:
        raise too_deep(file, way_out) from None
    except ValueError as error:
        raise BadInput(f"{file} cannot be read: {error}.", way_out=way_out) from None


def read_json(
    file: Path,
    kind: type[T],
    *,
    largest_bytes: int,
    way_out: str,
    most_values: int = MAX_JSON_VALUES,
) -> T:
    """Decode a JSON file into `kind`; any obstacle becomes a BadInput."""
    content = _few_values(
        file, read_bounded(file, largest_bytes=largest_bytes, way_out=way_out), most_values, way_out
    )
    try:
        return shallow(file, msgspec.json.decode(content, type=kind), way_out)
    except RecursionError:
        raise too_deep(file, way_out) from None
    except msgspec.ValidationError as error:
        raise BadInput(f"{file} has unexpected content: {error}.", way_out=way_out) from None
    except ValueError as error:  # DecodeError, undecodable text, integers of thousands of digits
        raise BadInput(f"{file} holds no JSON: {error}.", way_out=way_out) from None


def _few_values(file: Path, content: bytes, most: int, way_out: str) -> bytes:
    """Refuse content whose decoded form would be many times larger: `[],[],[]` takes 20 bytes
    per byte.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise BadInput(
            f"{file} has more than {most:,} values: not the expected file.", way_out=way_out
        )
    return content


def shallow(file: Path, decoded: T, way_out: str) -> T:
    """Refuse deep nesting, on which later stages would recurse."""
    level: list[Any] = [decoded]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _parts(one)]
        if not level:
            return decoded
    raise too_deep(file, way_out)


def _parts(value: Any) -> list[Any]:
    """Return the lists, mappings and structures inside this one."""
    if isinstance(value, msgspec.Struct):
        inner: Any = (getattr(value, name) for name in value.__struct_fields__)
    else:
        inner = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, list | tuple)
            else ()
        )
    return [one for one in inner if isinstance(one, Mapping | list | tuple | msgspec.Struct)]


def too_deep(file: Path, way_out: str) -> BadInput:
    return BadInput(f"{file} is nested more than {MAX_DEPTH} levels deep.", way_out=way_out)


def write_output(file: Path, content: bytes, *, way_out: str) -> None:
    """Write a user's file atomically; any obstacle becomes a BadInput."""
    try:
        write_atomically(file, content)
    except OSError as error:
        raise BadInput(f"{file} can't be written: {error.strerror}.", way_out=way_out) from error


def write_atomically(file: Path, content: bytes, *, mode: int = FOR_EVERYBODY) -> None:
    """Write a temporary file and rename it. The user's umask applies to `mode`."""
    handle, name = tempfile.mkstemp(prefix=".unfinished-", dir=file.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as unfinished:
            unfinished.write(content)
        Path(name).chmod(mode & ~_umask())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def make_private_folder(folder: Path) -> None:
    """Create a folder that its owner alone can read, or take that right from others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE_FOLDER)


def _umask() -> int:
    """Return the umask. To read it by setting it would change files that other threads create."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def comment(text: str) -> str:
    """Return `# text` as exactly one line, with its end. A line break ends a comment, and YAML
    also ends it at rarer separators and refuses control characters: all of them are written as
    escapes.
    """
    return f"# {printable(text)}".rstrip() + "\n"


def comments(lines: Iterable[str]) -> str:
    return "".join(comment(line) for line in lines)


def printable(text: str) -> str:
    """Return the text with an escape in place of each character that can't be printed."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


MAX_TOML_BYTES = 1024 * 1024


def read_toml(path: Path) -> Mapping[str, Any]:
    """Read a TOML file; any obstacle becomes a BadInput."""
    fix = "Give the original one."
    text = read_text(path, largest_bytes=MAX_TOML_BYTES, way_out="It must be a readable TOML file.")
    try:
        return shallow(path, tomllib.loads(text), fix)
    except RecursionError:
        raise too_deep(path, fix) from None
    except ValueError as error:  # broken TOML, and integers of thousands of digits
        what = (str(error).splitlines() or ["no message"])[0][:200]
        raise BadInput(f"{path}: broken TOML: {what}.", way_out="Mend that line.") from None


def read_by_threads(kind: type[T]) -> type[T]:
    """Register a class with msgspec at import time. msgspec inspects a class on first use and
    publishes incomplete type information meanwhile: two threads that decode a class for the first
    time at once cause a segmentation fault.
    """
    msgspec.json.Decoder(kind)
    return kind
