"""Entry points that the library must define, and the C text of those that are generated.

Names are read from the ELF files themselves: no binutils are required.

A generated entry point does nothing and returns success. That is right if nothing that the host
reads depends on it. Such names are judged here, with the reason. A call of an entry point without a
judgement is reported after the run.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

# 1. Names.

_OURS = re.compile(
    r"(__)?(cuda|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|cupti|nvml|cu(?=[A-Z]))"
)
_DRIVER = re.compile(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(")
_RENAMED = re.compile(r"#\s*define\s+cu[A-Z]\w+\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu[A-Z]\w+)")
_NVML = re.compile(r'_nvmlGetFunctionPointer\("(\w+)"\)')
_PROTOTYPE = re.compile(
    r"\b((?:cuda|cublas|cusparse|cusolver|curand|cufft|cudnn|cu(?=[A-Z]))\w+)\s*\(([^(){};]*)\)\s*;"
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_SCALAR = re.compile(
    r"(?:(?:unsigned\s+)?(?:int|long\s+long|long)|unsigned|size_t|u?int(?:32|64)_t|float|double)"
    r"\s*\*\s*\w*(?:\s*__dv\(.*)?"
)
_QUERY = re.compile(r"Get|Query|[Bb]uffer_?[Ss]ize|lwork|WorkspaceSize|GetSize|Count")
_BYTES = {"int": 4, "unsigned": 4, "unsigned int": 4, "int32_t": 4, "uint32_t": 4, "float": 4}


def names_in(libraries: Iterable[Path], headers: Iterable[Path]) -> frozenset[str]:
    """Return what these libraries export, with the driver's names by its header and NVML's by
    nvidia-ml-py.

    Neither the driver nor NVML comes with a package: they belong to a GPU's machine.
    """
    names: set[str] = set(nvml_names())
    for library in libraries:
        try:
            names.update(filter(_OURS.match, defined_in(library)))
        except (OSError, ElfError):
            continue  # a linker script or a broken link: another file of this name has the names
    for folder in headers:
        header = folder / "cuda.h"
        if header.is_file():
            text = header.read_text(errors="replace")
            names.update(_DRIVER.findall(text))
            names.update(_RENAMED.findall(text))
    return frozenset(names)


def nvml_names() -> frozenset[str]:
    """Return every function of NVML that its Python package can call."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        return frozenset()
    return frozenset(_NVML.findall(Path(spec.origin).read_text(errors="replace")))


def out_arguments(headers: Iterable[Path]) -> Mapping[str, Mapping[int, int]]:
    """Return, by function, the places of the pointers through which a query returns scalars, and
    the bytes of each.

    Covers functions whose name is a query: in a computation, a pointer to a number may be device
    memory.
    """
    out_arguments: dict[str, Mapping[int, int]] = {}
    for folder in headers:
        for header in sorted(folder.glob("cu*.h")):
            text = _COMMENT.sub(" ", header.read_text(errors="replace"))
            for name, parameters in _PROTOTYPE.findall(text):
                sizes = _scalar_sizes(parameters) if _QUERY.search(name) else {}
                if sizes:
                    out_arguments.setdefault(name, sizes)
    return out_arguments


def _scalar_sizes(parameters: str) -> dict[int, int]:
    """Return the bytes of the scalars that are written through pointers, by their place."""
    sizes = {}
    for place, parameter in enumerate(parameters.split(",")):
        declaration = " ".join(parameter.split())
        if "const" not in declaration and _SCALAR.fullmatch(declaration):
            kind = declaration.split("*")[0].strip()
            sizes[place] = _BYTES.get(kind, 8)
    return sizes


# 2. Names that a shared library defines and needs.

# Of ELF: a tag of the dynamic section, two types of sections, two types of symbols.
_NEEDED = 1
_DYNAMIC = 6
_SYMBOLS = 11
_FUNCTION = 2
_INDIRECT = 10

_SECTION = struct.Struct("<IIQQQQIIQQ")


class ElfError(Exception):
    """A file that is no 64-bit little-endian ELF library."""


def defined_in(path: Path) -> frozenset[str]:
    """Return the functions that the library exports."""
    names = set()
    for name_at, (name, info, _, section, _, _) in _entries(path, _SYMBOLS, "<IBBHQQ"):
        kind = info & 15
        if section and kind in (_FUNCTION, _INDIRECT):
            names.add(name_at(name))
    return frozenset(names)


def needed_by(path: Path) -> tuple[str, ...]:
    """Return the libraries that the loader brings along with it."""
    names = []
    for name_at, (tag, value) in _entries(path, _DYNAMIC, "<QQ"):
        if tag == _NEEDED:
            names.append(name_at(value))
    return tuple(names)


def _entries(
    path: Path,
    kind: int,
    layout: str,
) -> Iterator[tuple[Callable[[int], str], tuple[int, ...]]]:
    """Yield the entries of every section of this kind, with the function that reads a name of
    theirs.
    """
    entry = struct.Struct(layout)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sections = _sections(data)
        for _, section_kind, _, _, offset, length, link, *_ in sections:
            if section_kind == kind and link < len(sections):
                names = sections[link][4]
                for at in range(offset, offset + length - entry.size + 1, entry.size):
                    yield partial(_text, data, names), entry.unpack_from(data, at)


def _sections(data: mmap.mmap) -> list[tuple[int, ...]]:
    """Return the headers of a library's sections."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ElfError("no 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        width, count = struct.unpack_from("<HH", data, 58)
        return [_SECTION.unpack_from(data, table + width * index) for index in range(count)]
    except struct.error as error:
        raise ElfError("a broken section table") from error


def _text(
    data: mmap.mmap,
    names: int,
    at: int,
) -> str:
    """Return the text at a place of a table of names."""
    start = names + at
    return data[start : data.find(b"\0", start)].decode(errors="replace")


# 3. Judgements.

ReturnKind = Literal["success", "refusal", "text", "handle", "zeros"]

_ANSWERS: Mapping[ReturnKind, tuple[re.Pattern[str], str]] = {
    "text": (re.compile(r"(Error|Status)(String|Name)$|GetErrorString"), "a text for people"),
    "refusal": (re.compile(r"^nvml"), "not supported, as NVML says itself of much on many cards"),
    "handle": (
        re.compile(
            r"^(cublas|cudnn|cusparse|cusolver|curand)\w*(Create|createDescr)(?!\w*Permutation)"
        ),
        "a handle of nothing",
    ),
}
"""Names whose stub answers with something, by the kind of answer, with the reason that it is
right: an empty text, NVML_ERROR_NOT_SUPPORTED, a fresh handle in the first argument.
"""

_MATH = r"(cublas|cublasLt|cudnn|cusparse|cusparseLt|cusolver\w*?|curand|cufft)"
_EITHER = r"cu(da)?"
_COMPUTES = "computes on the device"
_NO_PROFILE = "profiling, which finds no activity"
# Not the BLAS routines whose result may go to the host.
_NO_SCALARS = r"(?!\w*(dot|nrm2|asum|amax|amin|rotm?g))"
_GEMMS = (
    r"(GemmEx|GemmBatchedEx|GemmStridedBatchedEx|GemmGroupedBatchedEx|LtMatmul|LtMatrixTransform)"
)
_LIMITS = r"(Limit|CacheConfig|SharedMemConfig|Flags|MemPool)"
_GRAPH_OBJECTS = r"(Upload|Debug\w*|RetainUserObject|ReleaseUserObject)"
_REASONS = {
    rf"({_MATH}|cupti|{_EITHER})\w*(Destroy|Unload|Finalize)\w*": "what it ends holds nothing",
    rf"{_MATH}\w*Set[A-Z]\w*": "a setting of a computation that is left out",
    rf"cublas([SDCZH]|[SDCZH]gemm){_NO_SCALARS}[a-z]\w*": _COMPUTES,
    rf"cublas{_GEMMS}(_\w+)?": _COMPUTES,
    r"cusparse(SpMM|SpMV|SDDMM|SpSV|SpSM)(_solve|_preprocess)?": _COMPUTES,
    r"cufft(Exec|XtExec)\w*": _COMPUTES,
    r"cudnnBackend(Execute|Initialize|Finalize|SetAttribute)": (
        "no engine was offered, so none runs"
    ),
    rf"{_EITHER}Logs(Register|Unregister)Callback": "the emulated driver writes no messages",
    r"cupti\w+": _NO_PROFILE,
    rf"{_EITHER}Profiler(Start|Stop)": _NO_PROFILE,
    rf"{_EITHER}(Func|Kernel)Set(Attribute\w*|CacheConfig|SharedMemConfig|BlockShape)": (
        "a kernel that does not run"
    ),
    rf"{_EITHER}(Device|Ctx|DevicePrimaryCtx)Set{_LIMITS}(_v2)?": "without effect",
    rf"{_EITHER}(SetDeviceFlags|SetValidDevices|DeviceReset|CtxResetPersistingL2Cache)": (
        "there is nothing to set"
    ),
    rf"{_EITHER}(Device|Ctx)(Enable|Disable)PeerAccess": "every card reaches every other",
    rf"{_EITHER}Mem(Advise|Prefetch\w*|RangePrefetch\w*)(_v2)?": (
        "where managed memory lies is not followed"
    ),
    rf"{_EITHER}MemPool(SetAttribute|SetAccess|TrimTo)": "pools hold nothing back",
    r"cuDevicePrimaryCtx(Release|Reset)(_v2)?": "the context stays until the process ends",
    rf"{_EITHER}(Graph{_GRAPH_OBJECTS}|UserObject(Retain|Release))": "a graph is only a name",
    rf"{_EITHER}Stream(SetAttribute|CopyAttributes|AttachMemAsync|UpdateCapture\w*)": (
        "streams run nothing"
    ),
    rf"{_EITHER}IpcGetEventHandle": "an event of another process is always finished",
    rf"{_EITHER}Stream(WriteValue64|WaitValue32|WaitValue64)(_v2)?": (
        "what it waits for is finished"
    ),
    r"cuMemcpy\w*Peer\w*|cu(da)?Memcpy(2D|3D)\w*": "values of large copies are left out",
    r"nccl(CommDeregister|CommRegister\w*|GroupSimulateEnd|RedOpDestroy|CommWindow\w*)": (
        "buffers need no registration"
    ),
    r"__cuda\w+": "registration of what never runs",
}

_RULES = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS.items())
"""Patterns of whole names."""


def judged(name: str) -> str | None:
    """Return the reason that success, or another answer, is right for this entry point; None
    without a judgement.
    """
    kind = _kind(name)
    if kind is not None:
        return _ANSWERS[kind][1]
    for pattern, reason in _RULES:
        if pattern.fullmatch(name):
            return reason
    return None


def _kind(name: str) -> ReturnKind | None:
    for kind, (pattern, _) in _ANSWERS.items():
        if pattern.search(name):
            return kind
    return None


# 4. Generated text.

_NOT_SUPPORTED = 3
_HEAD = """/* Generated; do not edit. */
#include "emu.h"
#define COUNT(place) emu_report->calls[place]++
"""


@dataclass(frozen=True, kw_only=True)
class Stub:
    """Generated entry point."""

    name: str
    kind: ReturnKind
    judged: str | None  # reason that its answer is right; None without a judgement


def stubs_for(
    names: Iterable[str],
    written: frozenset[str],
    outs: Mapping[str, Mapping[int, int]],
) -> tuple[Stub, ...]:
    """Return a stub for each name that is not written by hand, in alphabetical order."""
    stubs = []
    for name in sorted(set(names) - written):
        kind = _kind(name) or "success"
        if name in outs and kind not in ("text", "refusal"):
            kind = "zeros"
        stubs.append(
            Stub(
                name=name,
                kind=kind,
                judged=judged(name),
            )
        )
    return tuple(stubs)


def c_text(stubs: Sequence[Stub], outs: Mapping[str, Mapping[int, int]]) -> str:
    """Return the source of all stubs, each counting its calls at its own place."""
    lines = [_HEAD, f"const int emu_stub_count = {len(stubs)};"]
    for place, stub in enumerate(stubs):
        lines.append(_definition(place, stub, outs.get(stub.name, {})))
    return "\n".join(lines) + "\n"


def _definition(
    place: int,
    stub: Stub,
    outs: Mapping[int, int],
) -> str:
    name = stub.name
    count = f"COUNT({place});"
    if stub.kind == "text":
        return f'ENTRY const char *{name}(void) {{ {count} return ""; }}'
    if stub.kind == "refusal":
        return f"ENTRY int {name}(void) {{ {count} return {_NOT_SUPPORTED}; }}"
    if stub.kind == "handle":
        return f"ENTRY long {name}(void **handle) {{ {count} *handle = emu_handle(); return 0; }}"
    if stub.kind == "zeros":
        arguments = ", ".join(f"void *a{index}" for index in range(max(outs) + 1))
        zeros = " ".join(f"if (a{at}) memset(a{at}, 0, {size});" for at, size in outs.items())
        return f"ENTRY long {name}({arguments}) {{ {count} {zeros} return 0; }}"
    return f"ENTRY long {name}(void) {{ {count} return 0; }}"
