"""Counting allocator for CPU tensors: requested bytes of real tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
WITHOUT_COMPILER = (
    None if shutil.which("g++") else "counting tensors needs a C++ compiler: g++ not found"
)
"""Reason for `pytest.mark.skipif`, or None."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN packs the operands of bfloat16 products differently on each newer processor: up to 0.5
    # MB of temporary memory that no GPU has. With AVX2 alone it packs nothing.
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Environment of processes that count real tensors."""


def compiled(folder: Path | None = None) -> Path:
    """Return the shared library: compiled in about 15 s the first time, cached afterwards."""
    import torch
    from torch.utils.cpp_extension import include_paths

    made_of = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = folder or Path(tempfile.gettempdir()) / f"autotune-counting-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"counting-{made_of}.so"
    if library.exists():
        return library
    headers = [f"-I{path}" for path in include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    half = library.with_suffix(f".{os.getpid()}")
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        abi,
        *headers,
        str(SOURCE),
        "-o",
        str(half),
    ]
    subprocess.run(
        [*command, f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"],
        check=True,
        capture_output=True,
        timeout=200,
    )
    half.replace(library)
    return library


class Counting:
    """Counting allocator of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.live_bytes.restype = library.peak_bytes.restype = ctypes.c_int64

    def live(self) -> int:
        return int(self._library.live_bytes())

    def peak(self) -> int:
        return int(self._library.peak_bytes())

    def reset_peak(self) -> None:
        self._library.reset_peak()


def install(library: Path) -> Counting:
    """Count every CPU tensor of this process from now on."""
    import torch  # noqa: F401

    loaded = ctypes.CDLL(str(library))
    loaded.install()
    return Counting(loaded)
