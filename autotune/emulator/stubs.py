"""C text of the generated entry points, and the list that describes each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.emulator.judgements import MAKES, REFUSES, SAYS, judged

Kind = Literal["success", "refusal", "text", "handle", "zeros"]

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


def stubs_for(names: Iterable[str], written: frozenset[str], outs: Mapping[str, Mapping[int, int]]) -> tuple[Stub, ...]:
    """Return a stub for each name that is not written by hand, in alphabetical order."""
    return tuple(
        Stub(name=name, kind=_kind(name, outs), judged=judged(name)) for name in sorted(set(names)) if name not in written
    )


def c_text(stubs: Sequence[Stub], outs: Mapping[str, Mapping[int, int]]) -> str:
    """Return the source of all stubs, each counting its calls at its own place."""
    lines = [_HEAD, f"const int emu_stub_count = {len(stubs)};"]
    lines += [_definition(place, stub, outs.get(stub.name, {})) for place, stub in enumerate(stubs)]
    return "\n".join(lines) + "\n"


def _kind(name: str, outs: Mapping[str, Mapping[int, int]]) -> Kind:
    if SAYS.search(name):
        return "text"
    if REFUSES.match(name):
        return "refusal"
    if name in outs:
        return "zeros"
    return "handle" if MAKES.match(name) else "success"


def _definition(place: int, stub: Stub, outs: Mapping[int, int]) -> str:
    name = stub.name
    if stub.kind == "text":
        return f'ENTRY const char *{name}(void) {{ COUNT({place}); return ""; }}'
    if stub.kind == "refusal":
        return f"ENTRY int {name}(void) {{ COUNT({place}); return {_NOT_SUPPORTED}; }}"
    if stub.kind == "handle":
        return f"ENTRY long {name}(void **handle) {{ COUNT({place}); *handle = emu_handle(); return 0; }}"
    if stub.kind == "zeros":
        arguments = ", ".join(f"void *a{index}" for index in range(max(outs) + 1))
        zeros = " ".join(f"if (a{at}) memset(a{at}, 0, {size});" for at, size in outs.items())
        return f"ENTRY long {name}({arguments}) {{ COUNT({place}); {zeros} return 0; }}"
    return f"ENTRY long {name}(void) {{ COUNT({place}); return 0; }}"
