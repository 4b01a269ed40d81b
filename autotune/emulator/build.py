"""The library for one training environment: what is installed there, and its compilation, kept
for the next time.
"""

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
from typing import Any

from autotune.core.errors import TrainingEnvironmentError
from autotune.emulator import entry_points
from autotune.emulator.entry_points import ElfError, Stub, needed_by

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
LIBRARY = "libautotune-emulated-cuda.so"
LIST = "stubs.json"
_LINKS = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so")
"""Names that a GPU's machine has and no package brings: whoever looks for them in the folder
finds the library.
"""

_WRITTEN = re.compile(
    r"^(?:ENTRY [\w\s*]*?\b(\w+)\(|(?:ALIAS|MAKES|ANSWERS|COPY|COPY_LATER)\((\w+))", re.MULTILINE
)
_WITH_VERSION_2 = re.compile(r"^COPY(?:_LATER)?\((\w+)\)", re.MULTILINE)

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
"""Looks at an environment without importing torch, which takes seconds. `version.py` is written by
torch's build. NVIDIA's wheels share one package, wherever they are on the path: an environment may
be laid over another one.
"""

_LIBRARIES = re.compile(
    r"lib(cudart|cuda|nvidia-ml|nccl|cublas|cublasLt|cudnn|cusparse|cusparseLt|cusolver|curand"
    r"|cufft|cupti)(-[0-9a-f]+)?\.so(\.|$)"
)
"""Whose entry points are taken over, also under the names that auditwheel makes."""

_NCCL = re.compile(r"^#define NCCL_VERSION_CODE (\d+)", re.MULTILINE)
CURRENT_NCCL = 22907


# 1. What is installed.


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Environment with a CUDA build of torch."""

    python: Path
    cuda: tuple[int, int]
    libraries: tuple[Path, ...]  # NVIDIA's that are taken over
    headers: tuple[Path, ...]  # folders with NVIDIA's headers, the one of cuda_runtime_api.h first

    @property
    def nccl(self) -> int:
        """Return NCCL's release as NCCL writes it, 22809 for 2.28.9; a current one where its
        header is missing.
        """
        for folder in self.headers:
            header = folder / "nccl.h"
            if header.is_file():
                version = _NCCL.search(header.read_text())
                if version is not None:
                    return int(version[1])
        return CURRENT_NCCL


def look(python: Path) -> Installation:
    """Return the installation behind this interpreter; TrainingEnvironmentError with the way out
    where it cannot be emulated.
    """
    description = _describe(python)
    if description["torch"] is None:
        raise TrainingEnvironmentError(
            f"{python} has no torch. Name the interpreter of the training environment with"
            f" --python. {_install(python)}"
        )
    torch = Path(description["torch"])
    version = str(description["stated"].get("__version__", "?"))
    cuda = _cuda_version(python, version, str(description["stated"].get("cuda", "")))
    _refuse_a_static_runtime(python, torch, version)
    wheels = [Path(folder) for folder in description["wheels"]]
    prefix = Path(description["prefix"])
    return Installation(
        python=python,
        cuda=cuda,
        libraries=_libraries_in([*wheels, torch / "lib", prefix / "lib"]),
        headers=_headers(python, wheels, prefix, cuda),
    )


def _describe(python: Path) -> dict[str, Any]:
    """Return what `_LOOK` prints in this environment."""
    try:
        answer = subprocess.run(
            [str(python), "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        description: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter: {error}."
        ) from error
    return description


def _cuda_version(
    python: Path,
    torch_version: str,
    stated: str,
) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", stated)
    if match is None:
        raise TrainingEnvironmentError(
            f"{python} has torch {torch_version}, which is no CUDA build, and only those can be"
            f" emulated. {_install(python)}"
        )
    major = int(match[1])
    minor = int(match[2])
    if major not in (12, 13):
        raise TrainingEnvironmentError(
            f"{python} has torch {torch_version} for CUDA {major}; 12 and 13 can be emulated."
            f" {_install(python)}"
        )
    return major, minor


def _install(python: Path) -> str:
    return (
        f"Install one: {python} -m pip install --force-reinstall torch --index-url"
        " https://pypi.org/simple"
    )


def _refuse_a_static_runtime(
    python: Path,
    torch: Path,
    version: str,
) -> None:
    """Refuse a runtime inside torch's own libraries: it is out of reach of a preloaded one."""
    library = torch / "lib" / "libc10_cuda.so"
    try:
        shared = any(name.startswith("libcudart") for name in needed_by(library))
    except (OSError, ElfError) as error:
        raise TrainingEnvironmentError(
            f"{library} can't be read ({error}), so torch {version} can't be emulated."
            f" {_install(python)}"
        ) from error
    if not shared:
        raise TrainingEnvironmentError(
            f"torch {version} of {python} has CUDA's runtime linked into itself, which can't be"
            f" emulated. {_install(python)}"
        )


def _libraries_in(folders: list[Path]) -> tuple[Path, ...]:
    """Return NVIDIA's libraries in these folders, each once."""
    libraries: dict[Path, None] = {}
    for folder in folders:
        pattern = "**/lib/lib*.so*" if folder.name == "nvidia" else "lib*.so*"
        for path in sorted(folder.glob(pattern)):
            if _LIBRARIES.match(path.name):
                libraries[path.resolve()] = None
    return tuple(libraries)


def _headers(
    python: Path,
    wheels: list[Path],
    prefix: Path,
    cuda: tuple[int, int],
) -> tuple[Path, ...]:
    """Return the folders with headers, those with the runtime's first."""
    folders: list[Path] = []
    for wheel in wheels:
        folders += sorted(wheel.glob("**/include"))
    folders += [prefix / "include", prefix / "targets/x86_64-linux/include"]
    folders = [folder for folder in folders if folder.is_dir()]
    with_runtime = [folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()]
    if not with_runtime:
        major, minor = cuda
        package = "nvidia-cuda-runtime" if major >= 13 else f"nvidia-cuda-runtime-cu{major}"
        raise TrainingEnvironmentError(
            f"{python} has no headers of CUDA. Install them: {python} -m pip install"
            f" '{package}=={major}.{minor}.*'"
        )
    return tuple(dict.fromkeys([*with_runtime, *folders]))


# 2. The library.


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
    folder = (cache or _default_cache()) / _key(installation)
    if not (folder / LIST).is_file():
        _build_into(installation, folder)
    stubs = [Stub(**fields) for fields in json.loads((folder / LIST).read_text())]
    return Built(
        folder=folder,
        stubs=tuple(stubs),
        cuda=installation.cuda,
    )


def _default_cache() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return caches / "autotune" / "emulator"


def written_by_hand() -> frozenset[str]:
    """Return the entry points that the C files define."""
    names: set[str] = set()
    for source in SOURCES.glob("*.c"):
        text = source.read_text()
        for entry, macro in _WRITTEN.findall(text):
            names.add(entry or macro)
        for name in _WITH_VERSION_2.findall(text):
            names.add(f"{name}_v2")
    return frozenset(names)


def sources_fingerprint() -> str:
    """Return a fingerprint of the emulator itself."""
    files: list[Path] = []
    for pattern in ("*.py", "*.c", "*.h"):
        files += HERE.rglob(pattern)
    fingerprint = hashlib.sha256()
    for path in sorted(files):
        fingerprint.update(path.read_bytes())
    return fingerprint.hexdigest()[:16]


def _key(installation: Installation) -> str:
    """Return the cache key: the sources, the environment's libraries, the compiler."""
    key = hashlib.sha256()
    for path in (*sorted(SOURCES.rglob("*.[ch]")), Path(entry_points.__file__), Path(__file__)):
        key.update(path.read_bytes())
    for library in installation.libraries:
        stat = library.stat()
        key.update(f"{library} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    key.update(f"{installation.cuda} {_compiler()} {os.uname().machine}".encode())
    return key.hexdigest()[:24]


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise TrainingEnvironmentError(
            "There is no C compiler here, and the emulated driver is compiled for the libraries"
            " that are installed. Install one: apt-get install gcc (or set CC)."
        )
    return compiler


def _build_into(installation: Installation, folder: Path) -> None:
    """Build in a folder of its own, which gets its name when it is complete."""
    compiler = _compiler()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
    try:
        # 1. Generated entry points.
        names = entry_points.names_in(installation.libraries, installation.headers)
        outs = entry_points.out_arguments(installation.headers)
        stubs = entry_points.stubs_for(names, written_by_hand(), outs)
        (work / "stubs.c").write_text(entry_points.c_text(stubs, outs))

        # 2. The library.
        sources = [*sorted(SOURCES.glob("*.c")), work / "stubs.c"]
        _compile(compiler, installation, sources, work / LIBRARY)
        for link in _LINKS:
            (work / link).symlink_to(LIBRARY)
        (work / LIST).write_text(json.dumps([asdict(stub) for stub in stubs]))

        # 3. Its place in the cache.
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            if not (folder / LIST).is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(
    compiler: str,
    installation: Installation,
    sources: list[Path],
    library: Path,
) -> None:
    """Compile and link. The soname makes the loader take the library wherever something was linked
    with the driver.
    """
    includes: list[str] = []
    for folder in installation.headers:
        includes += ["-isystem", str(folder)]
    command = [
        *[compiler, "-O2", "-g0", "-w", "-fPIC", "-fvisibility=hidden", "-shared"],
        f"-DCUDA_MAJOR={installation.cuda[0]}",
        f"-DNCCL_CODE={installation.nccl}",
        *[f"-I{SOURCES}", *includes, "-idirafter", str(SOURCES / "headers")],
        "-Wl,-soname,libcuda.so.1",
        *["-o", str(library), *map(str, sources), "-ldl", "-lpthread", "-lrt"],
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise TrainingEnvironmentError(
            f"The emulated driver does not compile with {compiler}: {_first_error(result.stderr)} "
            "Name another compiler with CC=..., or report this line with your torch's version."
        )


def _first_error(output: str) -> str:
    lines = output.strip().splitlines()
    errors = [line.strip() for line in output.splitlines() if "error" in line]
    return (errors or lines or ["it says nothing"])[0]
