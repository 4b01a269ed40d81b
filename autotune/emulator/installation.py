"""Training environment to emulate GPUs for: its torch, its CUDA libraries, and what prevents emulation.

Names that a shared library defines and needs are read from the ELF file itself: no binutils are required.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.errors import TrainingEnvironmentError

_LOOK = """
import importlib.util, json, re, sys
spec = importlib.util.find_spec("torch")
folder = None if spec is None else spec.submodule_search_locations[0]
version = "" if folder is None else open(folder + "/version.py").read()
stated = dict(re.findall(r"^(__version__|cuda)[^=]*= *'?([^'\\n]*)'?", version, re.M))
nvidia = importlib.util.find_spec("nvidia")
wheels = [] if nvidia is None else list(nvidia.submodule_search_locations)
print(json.dumps({"torch": folder, "stated": stated, "wheels": wheels, "prefix": sys.prefix}))
"""
"""Without importing torch, which takes seconds. `version.py` is written by its build. NVIDIA's wheels
share one package, wherever they are on the path: an environment may be laid over another one."""

_LIBRARIES = re.compile(
    r"lib(cudart|cuda|nvidia-ml|nccl|cublas|cublasLt|cudnn|cusparse|cusparseLt|cusolver|curand|cufft|cupti)(-[0-9a-f]+)?\.so(\.|$)"
)
"""Whose entry points are taken over, also under the names that auditwheel makes."""

_NCCL = re.compile(r"^#define NCCL_VERSION_CODE (\d+)", re.MULTILINE)
CURRENT_NCCL = 22907

_NEEDED, _DYNAMIC, _SYMBOLS = 1, 6, 11  # of ELF
_FUNCTION, _INDIRECT = 2, 10


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Environment with a CUDA build of torch."""

    python: Path
    cuda: tuple[int, int]
    libraries: tuple[Path, ...]  # NVIDIA's that are taken over
    headers: tuple[Path, ...]  # folders with NVIDIA's headers, the one of cuda_runtime_api.h first

    @property
    def nccl(self) -> int:
        """Return NCCL's release as NCCL writes it, 22809 for 2.28.9; a current one where its header is missing."""
        for header in (folder / "nccl.h" for folder in self.headers):
            if header.is_file() and (found := _NCCL.search(header.read_text())):
                return int(found[1])
        return CURRENT_NCCL


def look(python: Path) -> Installation:
    """Return the installation behind this interpreter; TrainingEnvironmentError with the way out where it cannot be emulated."""
    found = _asked(python)
    folder = found["torch"]
    if folder is None:
        raise TrainingEnvironmentError(
            f"{python} has no torch. Name the interpreter of the training environment with --python. {_install(python)}"
        )
    version = str(found["stated"].get("__version__", "?"))
    match = re.match(r"(\d+)\.(\d+)", str(found["stated"].get("cuda", "")))
    if match is None:
        raise TrainingEnvironmentError(
            f"{python} has torch {version}, which is no CUDA build, and only those can be emulated. {_install(python)}"
        )
    cuda = (int(match[1]), int(match[2]))
    if cuda[0] not in (12, 13):
        raise TrainingEnvironmentError(
            f"{python} has torch {version} for CUDA {cuda[0]}; 12 and 13 can be emulated. {_install(python)}"
        )
    _refuse_a_static_runtime(python, Path(folder), version)
    wheels, prefix = [Path(one) for one in found["wheels"]], Path(found["prefix"])
    roots = [*wheels, Path(folder) / "lib", prefix / "lib"]
    files = (path for root in roots for path in sorted(root.glob("**/lib/lib*.so*" if root.name == "nvidia" else "lib*.so*")))
    libraries = tuple(dict.fromkeys(path.resolve() for path in files if _LIBRARIES.match(path.name)))
    return Installation(python=python, cuda=cuda, libraries=libraries, headers=_headers(python, wheels, prefix, cuda))


def _asked(python: Path) -> dict[str, Any]:
    try:
        answer = subprocess.run([str(python), "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise TrainingEnvironmentError(f"{python} can't be started as a Python interpreter: {error}.") from error
    return found


def _install(python: Path) -> str:
    return f"Install one: {python} -m pip install --force-reinstall torch --index-url https://pypi.org/simple"


def _refuse_a_static_runtime(python: Path, torch: Path, version: str) -> None:
    """A runtime inside torch's own libraries is out of reach of a preloaded one."""
    library = torch / "lib" / "libc10_cuda.so"
    try:
        shared = any(name.startswith("libcudart") for name in needed_by(library))
    except (OSError, ElfError) as error:
        raise TrainingEnvironmentError(
            f"{library} can't be read ({error}), so torch {version} can't be emulated. {_install(python)}"
        ) from error
    if not shared:
        raise TrainingEnvironmentError(
            f"torch {version} of {python} has CUDA's runtime linked into itself, which can't be emulated. {_install(python)}"
        )


def _headers(python: Path, wheels: list[Path], prefix: Path, cuda: tuple[int, int]) -> tuple[Path, ...]:
    in_wheels = (folder for wheel in wheels for folder in sorted(wheel.glob("**/include")))
    folders = [*in_wheels, prefix / "include", prefix / "targets/x86_64-linux/include"]
    with_runtime = [folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()]
    if not with_runtime:
        package = "nvidia-cuda-runtime" if cuda[0] >= 13 else f"nvidia-cuda-runtime-cu{cuda[0]}"
        raise TrainingEnvironmentError(
            f"{python} has no headers of CUDA. Install them: {python} -m pip install '{package}=={cuda[0]}.{cuda[1]}.*'"
        )
    return tuple(dict.fromkeys([*with_runtime, *(folder for folder in folders if folder.is_dir())]))


class ElfError(Exception):
    """A file that is no 64-bit little-endian ELF library."""


def defined_in(path: Path) -> frozenset[str]:
    """Return the functions that the library exports."""
    entries = _entries(path, _SYMBOLS, "<IBBHQQ")
    return frozenset(
        text(name) for text, (name, info, _, section, _, _) in entries if section and info & 15 in (_FUNCTION, _INDIRECT)
    )


def needed_by(path: Path) -> tuple[str, ...]:
    """Return the libraries that the loader brings along with it."""
    return tuple(text(value) for text, (tag, value) in _entries(path, _DYNAMIC, "<QQ") if tag == _NEEDED)


def _entries(path: Path, kind: int, layout: str) -> Iterator[tuple[Callable[[int], str], tuple[int, ...]]]:
    """Yield the entries of every section of this kind, with the function that reads a name of theirs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError("no 64-bit ELF file")
        try:
            (table,) = struct.unpack_from("<Q", data, 40)
            width, count = struct.unpack_from("<HH", data, 58)
            sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + width * index) for index in range(count)]
        except struct.error as error:
            raise ElfError("a broken section table") from error
        size = struct.calcsize(layout)
        for _, section_kind, _, _, offset, length, link, *_ in sections:
            if section_kind == kind and link < len(sections):
                text = partial(_text, data, sections[link][4])
                for at in range(offset, offset + length - size + 1, size):
                    yield text, struct.unpack_from(layout, data, at)


def _text(data: mmap.mmap, names: int, at: int) -> str:
    return data[names + at : data.find(b"\0", names + at)].decode(errors="replace")
