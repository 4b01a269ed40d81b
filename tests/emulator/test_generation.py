"""Entry points that are generated: which there are, what each does, and which answers were
judged.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from autotune.emulator import build, reports
from autotune.emulator.entry_points import Stub, c_text, judged, names_in, out_arguments, stubs_for
from tests.emulator.installations import elf

HEADER = (Path(__file__).parent / "programs/generation_head.py.txt").read_text()


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "cuda.h").write_text(HEADER)
    return folder


def test_names_come_from_libraries_the_drivers_header_and_nvml(
    tmp_path: Path, headers: Path
) -> None:
    library = tmp_path / "libcublas.so.13"
    library.write_bytes(elf(defined=("cublasSgemm_v2", "cublasDdot_v2", "_init", "free_me")))
    (tmp_path / "libcudart.so").write_text("INPUT(a linker script)")
    names = names_in([library, tmp_path / "libcudart.so"], [headers])
    assert {
        "cublasSgemm_v2",
        "cublasDdot_v2",
        "cuDeviceGetLuid",
        "cuMemAlloc_v2",
        "nvmlDeviceGetFanSpeed",
    } <= names
    assert not names & {"_init", "free_me"}


def test_only_questions_answer_through_scalars(headers: Path) -> None:
    assert out_arguments([headers]) == {
        "cusparseXcsrsort_bufferSizeExt": {3: 8},
        "cublasGetSmCountTarget": {1: 4},
        "cuDeviceGetLuid": {1: 4},
    }


def test_each_kind_of_stub(headers: Path) -> None:
    outs = out_arguments([headers])
    names = {
        "cublasGetSmCountTarget",
        "cublasSgemm_v2",
        "nvmlDeviceGetFanSpeed",
        "cusparseGetErrorString",
        "cudnnCreateX",
        "mine",
    }
    stub_by_name = {stub.name: stub for stub in stubs_for(names, frozenset({"mine"}), outs)}
    kinds = {name: stub.kind for name, stub in stub_by_name.items()}
    assert kinds == {
        "cublasGetSmCountTarget": "zeros",
        "cublasSgemm_v2": "success",
        "nvmlDeviceGetFanSpeed": "refusal",
        "cusparseGetErrorString": "text",
        "cudnnCreateX": "handle",
    }
    assert {name for name, stub in stub_by_name.items() if stub.judged is None} == {
        "cublasGetSmCountTarget"
    }


@pytest.mark.parametrize(
    "name",
    [
        "cublasSgemm_v2",
        "cublasGemmEx",
        "cublasGemmStridedBatchedEx_64",
        "cublasLtMatmul",
        "cudaFuncSetAttribute",
        "cuModuleUnload",
        "cudnnDestroy",
        "cudaMemAdvise_v2",
        "cudaGraphExecDestroy",
        "cublasSetWorkspace_v2",
        "nvmlDeviceGetFanSpeed",
        "cuCtxDestroy_v2",
        "cudaDeviceEnablePeerAccess",
        "cuptiActivityEnable",
    ],
)
def test_where_success_is_right_the_reason_is_given(name: str) -> None:
    assert judged(name)


@pytest.mark.parametrize(
    "name",
    [
        "cublasSdot_v2",
        "cublasIsamax_v2",
        "cublasDnrm2_v2",
        "cudaGraphExecUpdate",
        "cudaStreamGetAttribute",
        "cusparseSpGEMM_compute",
        "cuMemGetHandleForAddressRange",
        "cusolverDnSgetrf",
        "cudaSomethingNew",
        "ncclCommQueryProperties",
    ],
)
def test_what_the_host_reads_is_not_judged_by_its_name(name: str) -> None:
    assert judged(name) is None


def test_the_hand_written_entry_points_are_found_in_the_sources() -> None:
    written = build.written_by_hand()
    assert {
        "cudaMalloc",
        "cuMemAlloc_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyHtoDAsync",
        "cublasCreate_v2",
        "cublasGetMathMode",
        "dlopen",
        "nvmlDeviceGetMemoryInfo_v2",
        "ncclAllReduce",
        "cudaGetDeviceProperties",
        "cudaStreamGetCaptureInfo",
        "nvmlErrorString",
        "__cudaRegisterFunction",
        "cublasLtGetVersion",
    } <= written
    for_python = {
        f"emu_{name}"
        for name in (
            "set_foreign",
            "phase",
            "peak",
            "note_torch",
            "compiled_for",
            "copy_written",
            "give_back",
            "engine_kernels",
        )
    }
    assert {name for name in written if name.startswith("emu")} == for_python


def test_the_text_compiles_and_counts_calls(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    outs = {"cublasGetSmCountTarget": {1: 4}}
    stubs = stubs_for(
        {"cublasGetSmCountTarget", "cublasSgemm_v2", "nvmlDeviceGetFanSpeed", "cudnnCreateX"},
        frozenset(),
        outs,
    )
    (tmp_path / "stubs.c").write_text(c_text(stubs, outs))
    (tmp_path / "main.c").write_text("""
#include "emu.h"
static char room[sizeof(Report) + 64];
Report *emu_report = (Report *)room;
void *emu_handle(void) { return room; }
int cublasGetSmCountTarget(void *, int *), nvmlDeviceGetFanSpeed(void), cudnnCreateX(void **);
int main(void) {
  int count = 7;
  void *handle = NULL;
  cublasGetSmCountTarget(NULL, &count);
  cudnnCreateX(&handle);
  nvmlDeviceGetFanSpeed();
  int refused = nvmlDeviceGetFanSpeed(), made = handle == room;
  printf("%d %d %d %d %u %u", emu_stub_count, count, made, refused, emu_report->calls[0],
      emu_report->calls[3]);
}""")
    sources = [tmp_path / "stubs.c", tmp_path / "main.c"]
    subprocess.run(
        [compiler, f"-I{build.SOURCES}", "-w", "-o", tmp_path / "main", *sources], check=True
    )
    assert (
        subprocess.run([tmp_path / "main"], capture_output=True, text=True).stdout == "4 0 1 3 1 2"
    )


def report(*, calls: tuple[int, ...], peak: int = 5 * 2**30) -> bytes:
    head = struct.pack(
        "<IIiiii5q", reports.MAGIC, reports.VERSION, 4711, 1, len(calls), 2, 100, 2, 1, 2**20, 3
    )
    zeros = [0] * 15
    peaks = struct.pack("<16q", peak, *zeros) + struct.pack("<48q", *[0] * 48)
    phases = b"".join(
        name.encode().ljust(32, b"\0") + struct.pack("<16q", value, *zeros)
        for name, value in (("load", 2**30), ("backward", peak))
    )
    return head + peaks + phases + bytes(30 * (32 + 128)) + struct.pack(f"<{len(calls)}I", *calls)


STUBS = (
    Stub(
        name="cublasSgemm_v2",
        kind="success",
        judged="computes",
    ),
    Stub(
        name="cudaNew",
        kind="success",
        judged=None,
    ),
)


def test_what_a_process_left_is_read(tmp_path: Path) -> None:
    (tmp_path / "4711-1.report").write_bytes(report(calls=(12, 0)))
    (tmp_path / "4712-1.report").write_bytes(report(calls=(12, 0))[:300])
    (tmp_path / "4713-1.report").write_bytes(b"something else")
    run_report = reports.read(tmp_path, STUBS)
    (process,) = run_report.processes
    assert (process.pid, process.peak_bytes, process.refused, process.launches) == (
        4711,
        {0: 5 * 2**30},
        3,
        100,
    )
    assert process.phase_peak_bytes == {"load": {0: 2**30}, "backward": {0: 5 * 2**30}}
    assert run_report.sentences() == ()


def test_unjudged_calls_and_skipped_operators_are_told(tmp_path: Path) -> None:
    (tmp_path / "1-1.report").write_bytes(report(calls=(12, 2)))
    (tmp_path / "2-1.report").write_bytes(report(calls=(0, 1)))
    (tmp_path / "1.values").write_text(
        "skipped\taten.bitwise_and.Tensor of 9 elements\nfailed\taten.x: no kernel\n"
    )
    (tmp_path / "2.values").write_text("skipped\taten.bitwise_and.Tensor of 9 elements\n")
    run_report = reports.read(tmp_path, STUBS)
    assert run_report.unjudged == {"cudaNew": 3}
    unjudged, skipped, failed = run_report.sentences()
    assert "nobody has checked: cudaNew (3 times)." in unjudged
    assert skipped.endswith(
        "another path of the code may have run: aten.bitwise_and.Tensor of 9 elements."
    )
    assert "aten.x: no kernel" in failed


def test_the_report_in_c_has_the_layout_that_is_read(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "size.c").write_text(
        '#include "emu.h"\nint main(void) { printf("%zu", sizeof(Report)); }'
    )
    subprocess.run(
        [compiler, f"-I{build.SOURCES}", "-w", "-o", tmp_path / "size", tmp_path / "size.c"],
        check=True,
    )
    size = int(subprocess.run([tmp_path / "size"], capture_output=True, text=True).stdout)
    assert size == len(report(calls=()))
