"""Entry points that the library must define, and the arguments that the headers declare for them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from autotune.emulator.elf import ElfError, defined_in

_OURS = re.compile(r"(__)?(cuda|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|cupti|nvml|cu(?=[A-Z]))")
_DRIVER = re.compile(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(")
_RENAMED = re.compile(r"#\s*define\s+cu[A-Z]\w+\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w+)")
_NVML = re.compile(r'_nvmlGetFunctionPointer\("(\w+)"\)')
_PROTOTYPE = re.compile(r"\b((?:cuda|cublas|cusparse|cusolver|curand|cufft|cudnn|cu(?=[A-Z]))\w+)\s*\(([^(){};]*)\)\s*;")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_SCALAR = re.compile(
    r"(?:(?:unsigned\s+)?(?:int|long\s+long|long)|unsigned|size_t|u?int(?:32|64)_t|float|double)\s*\*\s*\w*(?:\s*__dv\(.*)?"
)
_ASKS = re.compile(r"Get|Query|[Bb]uffer_?[Ss]ize|lwork|WorkspaceSize|GetSize|Count")
_BYTES = {"int": 4, "unsigned": 4, "unsigned int": 4, "int32_t": 4, "uint32_t": 4, "float": 4}


def names_in(libraries: Iterable[Path], headers: Iterable[Path]) -> frozenset[str]:
    """Return what these libraries export, with the driver's names by its header and NVML's by nvidia-ml-py.

    Neither the driver nor NVML comes with a package: they belong to a GPU's machine.
    """
    found: set[str] = set()
    for library in libraries:
        try:
            found |= {name for name in defined_in(library) if _OURS.match(name)}
        except (OSError, ElfError):  # a linker script or a broken link: another file of this name has the names
            continue
    for folder in headers:
        header = folder / "cuda.h"
        if header.is_file():
            text = header.read_text(errors="replace")
            found |= {*_DRIVER.findall(text), *_RENAMED.findall(text)}
    return frozenset(found | nvml_names())


def nvml_names() -> frozenset[str]:
    """Return every function of NVML that its Python package can call."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        return frozenset()
    return frozenset(_NVML.findall(Path(spec.origin).read_text(errors="replace")))


def out_arguments(headers: Iterable[Path]) -> Mapping[str, Mapping[int, int]]:
    """Return, by function, the places of the pointers through which a query returns scalars, and the bytes of each.

    Covers functions whose name is a query: in a computation, a pointer to a number may be device memory.
    """
    found: dict[str, Mapping[int, int]] = {}
    for folder in headers:
        for header in sorted(folder.glob("cu*.h")):
            for name, parameters in _PROTOTYPE.findall(_COMMENT.sub(" ", header.read_text(errors="replace"))):
                if _ASKS.search(name):
                    places = _scalars(parameters)
                    if places:
                        found.setdefault(name, places)
    return found


def _scalars(parameters: str) -> dict[int, int]:
    words = [" ".join(parameter.split()) for parameter in parameters.split(",")]
    scalars = {place: one for place, one in enumerate(words) if "const" not in one and _SCALAR.fullmatch(one)}
    return {place: _BYTES.get(one.split("*")[0].strip(), 8) for place, one in scalars.items()}
