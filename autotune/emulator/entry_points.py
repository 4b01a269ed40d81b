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
    r"(?:(?:unsigned\s+)?(?:int|long\s+long|long)|unsigned|size_t|u?int(?:32|64)_t|float|double)\s*\*\s*\w*(?:\s*__dv\(.*)?"
)
_ASKS = re.compile(r"Get|Query|[Bb]uffer_?[Ss]ize|lwork|WorkspaceSize|GetSize|Count")
_BYTES = {"int": 4, "unsigned": 4, "unsigned int": 4, "int32_t": 4, "uint32_t": 4, "float": 4}


def names_in(libraries: Iterable[Path], headers: Iterable[Path]) -> frozenset[str]:
    """Return what these libraries export, with the driver's names by its header and NVML's by
    nvidia-ml-py.

    Neither the driver nor NVML comes with a package: they belong to a GPU's machine.
    """
    found: set[str] = set()
    for library in libraries:
        try:
            found |= {name for name in defined_in(library) if _OURS.match(name)}
        except (
            OSError,
            ElfError,
        ):  # a linker script or a broken link: another file of this name has the names
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
    """Return, by function, the places of the pointers through which a query returns scalars, and
    the bytes of each.

    Covers functions whose name is a query: in a computation, a pointer to a number may be device
    memory.
    """
    found: dict[str, Mapping[int, int]] = {}
    for folder in headers:
        for header in sorted(folder.glob("cu*.h")):
            for name, parameters in _PROTOTYPE.findall(
                _COMMENT.sub(" ", header.read_text(errors="replace"))
            ):
                if _ASKS.search(name):
                    places = _scalars(parameters)
                    if places:
                        found.setdefault(name, places)
    return found


def _scalars(parameters: str) -> dict[int, int]:
    words = [" ".join(parameter.split()) for parameter in parameters.split(",")]
    scalars = {
        place: one
        for place, one in enumerate(words)
        if "const" not in one and _SCALAR.fullmatch(one)
    }
    return {place: _BYTES.get(one.split("*")[0].strip(), 8) for place, one in scalars.items()}


# 2. Names that a shared library defines and needs.

_NEEDED, _DYNAMIC, _SYMBOLS = 1, 6, 11  # of ELF
_FUNCTION, _INDIRECT = 2, 10


class ElfError(Exception):
    """A file that is no 64-bit little-endian ELF library."""


def defined_in(path: Path) -> frozenset[str]:
    """Return the functions that the library exports."""
    entries = _entries(path, _SYMBOLS, "<IBBHQQ")
    return frozenset(
        text(name)
        for text, (name, info, _, section, _, _) in entries
        if section and info & 15 in (_FUNCTION, _INDIRECT)
    )


def needed_by(path: Path) -> tuple[str, ...]:
    """Return the libraries that the loader brings along with it."""
    return tuple(
        text(value) for text, (tag, value) in _entries(path, _DYNAMIC, "<QQ") if tag == _NEEDED
    )


def _entries(
    path: Path, kind: int, layout: str
) -> Iterator[tuple[Callable[[int], str], tuple[int, ...]]]:
    """Yield the entries of every section of this kind, with the function that reads a name of
    theirs.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError("no 64-bit ELF file")
        try:
            (table,) = struct.unpack_from("<Q", data, 40)
            width, count = struct.unpack_from("<HH", data, 58)
            sections = [
                struct.unpack_from("<IIQQQQIIQQ", data, table + width * index)
                for index in range(count)
            ]
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


# 3. Judgements.

Kind = Literal["success", "refusal", "text", "handle", "zeros"]

_ANSWERS: Mapping[Kind, tuple[re.Pattern[str], str]] = {
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
_SCALARS = (  # BLAS routines whose result may go to the host
    r"(?!\w*(dot|nrm2|asum|amax|amin|rotm?g))"
)
_REASONS = {
    rf"({_MATH}|cupti|{_EITHER})\w*(Destroy|Unload|Finalize)\w*": "what it ends holds nothing",
    rf"{_MATH}\w*Set[A-Z]\w*": "a setting of a computation that is left out",
    rf"cublas([SDCZH]|[SDCZH]gemm){_SCALARS}[a-z]\w*": _COMPUTES,
    r"cublas(GemmEx|GemmBatchedEx|GemmStridedBatchedEx|GemmGroupedBatchedEx|LtMatmul|LtMatrixTransform)(_\w+)?": (
        _COMPUTES
    ),
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
    rf"{_EITHER}(Device|Ctx|DevicePrimaryCtx)Set(Limit|CacheConfig|SharedMemConfig|Flags|MemPool)(_v2)?": (
        "without effect"
    ),
    rf"{_EITHER}(SetDeviceFlags|SetValidDevices|DeviceReset|CtxResetPersistingL2Cache)": (
        "there is nothing to set"
    ),
    rf"{_EITHER}(Device|Ctx)(Enable|Disable)PeerAccess": "every card reaches every other",
    rf"{_EITHER}Mem(Advise|Prefetch\w*|RangePrefetch\w*)(_v2)?": (
        "where managed memory lies is not followed"
    ),
    rf"{_EITHER}MemPool(SetAttribute|SetAccess|TrimTo)": "pools hold nothing back",
    r"cuDevicePrimaryCtx(Release|Reset)(_v2)?": "the context stays until the process ends",
    rf"{_EITHER}(Graph(Upload|Debug\w*|RetainUserObject|ReleaseUserObject)|UserObject(Retain|Release))": (
        "a graph is only a name"
    ),
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

_RULES = tuple(
    (re.compile(pattern), reason) for pattern, reason in _REASONS.items()
)  # patterns of whole names


def judged(name: str) -> str | None:
    """Return the reason that success, or another answer, is right for this entry point; None
    without a judgement.
    """
    if (kind := _kind(name)) is not None:
        return _ANSWERS[kind][1]
    return next((reason for pattern, reason in _RULES if pattern.fullmatch(name)), None)


def _kind(name: str) -> Kind | None:
    return next((kind for kind, (pattern, _) in _ANSWERS.items() if pattern.search(name)), None)


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
    kind: Kind
    judged: str | None  # reason that its answer is right; None without a judgement


def stubs_for(
    names: Iterable[str], written: frozenset[str], outs: Mapping[str, Mapping[int, int]]
) -> tuple[Stub, ...]:
    """Return a stub for each name that is not written by hand, in alphabetical order."""

    def kind(name: str) -> Kind:
        found = _kind(name)
        return "zeros" if name in outs and found not in ("text", "refusal") else found or "success"

    return tuple(
        Stub(name=name, kind=kind(name), judged=judged(name))
        for name in sorted(set(names))
        if name not in written
    )


def c_text(stubs: Sequence[Stub], outs: Mapping[str, Mapping[int, int]]) -> str:
    """Return the source of all stubs, each counting its calls at its own place."""
    lines = [_HEAD, f"const int emu_stub_count = {len(stubs)};"]
    lines += [_definition(place, stub, outs.get(stub.name, {})) for place, stub in enumerate(stubs)]
    return "\n".join(lines) + "\n"


def _definition(place: int, stub: Stub, outs: Mapping[int, int]) -> str:
    name = stub.name
    if stub.kind == "text":
        return f'ENTRY const char *{name}(void) {{ COUNT({place}); return ""; }}'
    if stub.kind == "refusal":
        return f"ENTRY int {name}(void) {{ COUNT({place}); return {_NOT_SUPPORTED}; }}"
    if stub.kind == "handle":
        return (
            f"ENTRY long {name}(void **handle) {{ COUNT({place}); *handle = emu_handle(); return"
            " 0; }"
        )
    if stub.kind == "zeros":
        arguments = ", ".join(f"void *a{index}" for index in range(max(outs) + 1))
        zeros = " ".join(f"if (a{at}) memset(a{at}, 0, {size});" for at, size in outs.items())
        return f"ENTRY long {name}({arguments}) {{ COUNT({place}); {zeros} return 0; }}"
    return f"ENTRY long {name}(void) {{ COUNT({place}); return 0; }}"
