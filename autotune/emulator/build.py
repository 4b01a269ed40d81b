"""The library for one training environment, compiled when it is first needed and kept for the next time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.core.errors import TrainingEnvironmentError
from autotune.emulator import entry_points
from autotune.emulator.entry_points import Stub
from autotune.emulator.installation import Installation

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
LIBRARY, LIST = "libautotune-emulated-cuda.so", "stubs.json"
_LINKS = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so")
"""Names that a GPU's machine has and no package brings: whoever looks for them in the folder finds the library."""

_WRITTEN = re.compile(r"^(?:ENTRY [\w\s*]*?\b(\w+)\(|(?:ALIAS|MAKES|ANSWERS|COPY|COPY_LATER)\((\w+))", re.MULTILINE)
_WITH_VERSION_2 = re.compile(r"^COPY(?:_LATER)?\((\w+)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A library, ready to be preloaded."""

    folder: Path
    stubs: tuple[Stub, ...]
    cuda: tuple[int, int]  # of the torch that it is for

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY


def build(installation: Installation, cache: Path | None = None) -> Built:
    """Return the library for this installation, compiling it where the cache has none."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "autotune" / "emulator"
    folder = cache / _key(installation)
    if not (folder / LIST).is_file():
        _build_into(installation, folder)
    listed = json.loads((folder / LIST).read_text())
    return Built(folder=folder, stubs=tuple(Stub(**one) for one in listed), cuda=installation.cuda)


def written_by_hand() -> frozenset[str]:
    """Return the entry points that the C files define."""
    found: set[str] = set()
    for source in SOURCES.glob("*.c"):
        text = source.read_text()
        found |= {entry or macro for entry, macro in _WRITTEN.findall(text)}
        found |= {f"{name}_v2" for name in _WITH_VERSION_2.findall(text)}
    return frozenset(found)


def sources_fingerprint() -> str:
    """Return a fingerprint of the emulator itself."""
    parts = hashlib.sha256()
    for path in sorted(file for kind in ("*.py", "*.c", "*.h") for file in HERE.rglob(kind)):
        parts.update(path.read_bytes())
    return parts.hexdigest()[:16]


def _key(installation: Installation) -> str:
    """Return the cache key: the sources, the environment's libraries, the compiler."""
    parts = hashlib.sha256()
    for path in (*sorted(SOURCES.rglob("*.[ch]")), Path(entry_points.__file__), Path(__file__)):
        parts.update(path.read_bytes())
    for library in installation.libraries:
        stat = library.stat()
        parts.update(f"{library} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    parts.update(f"{installation.cuda} {_compiler()} {os.uname().machine}".encode())
    return parts.hexdigest()[:24]


def _compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        raise TrainingEnvironmentError(
            "There is no C compiler here, and the emulated driver is compiled for the libraries that are installed. "
            "Install one: apt-get install gcc (or set CC)."
        )
    return found


def _build_into(installation: Installation, folder: Path) -> None:
    compiler = _compiler()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
    try:
        names = entry_points.names_in(installation.libraries, installation.headers)
        outs = entry_points.out_arguments(installation.headers)
        made = entry_points.stubs_for(names, written_by_hand(), outs)
        (work / "stubs.c").write_text(entry_points.c_text(made, outs))
        _compile(compiler, installation, [*sorted(SOURCES.glob("*.c")), work / "stubs.c"], work / LIBRARY)
        for link in _LINKS:
            (work / link).symlink_to(LIBRARY)
        (work / LIST).write_text(json.dumps([asdict(stub) for stub in made]))
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            if not (folder / LIST).is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(compiler: str, installation: Installation, sources: list[Path], library: Path) -> None:
    """The soname makes the loader take the library wherever something was linked with the driver."""
    included = [word for folder in installation.headers for word in ("-isystem", str(folder))]
    command = [
        compiler, "-O2", "-g0", "-w", "-fPIC", "-fvisibility=hidden", "-shared", f"-DCUDA_MAJOR={installation.cuda[0]}",
        f"-DNCCL_CODE={installation.nccl}",
        f"-I{SOURCES}", *included, "-idirafter", str(SOURCES / "headers"), "-Wl,-soname,libcuda.so.1",
        "-o", str(library), *map(str, sources), "-ldl", "-lpthread", "-lrt",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line]
        first = (lines or done.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise TrainingEnvironmentError(
            f"The emulated driver does not compile with {compiler}: {first} "
            "Name another compiler with CC=..., or report this line with your torch's version."
        )
