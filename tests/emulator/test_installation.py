"""A training environment that cannot be emulated is one sentence, and what to type."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autotune.core.errors import TrainingEnvironmentError
from autotune.emulator import build
from autotune.emulator.build import CURRENT_NCCL, Installation, look
from autotune.emulator.entry_points import ElfError, defined_in, needed_by
from tests.emulator.installations import elf, environment


def refused(python: Path) -> str:
    with pytest.raises(TrainingEnvironmentError) as caught:
        look(python)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_are_read_from_the_library_itself(tmp_path: Path) -> None:
    library = tmp_path / "libx.so"
    library.write_bytes(
        elf(needed=("libcudart.so.13", "libc.so.6"), defined=("cudaMalloc", "cudaFree"))
    )
    assert needed_by(library) == ("libcudart.so.13", "libc.so.6")
    assert defined_in(library) == {"cudaMalloc", "cudaFree"}


@pytest.mark.parametrize(
    "content", [b"no library at all", b"\x7fELF\x02\x01" + bytes(20), elf()[:100]]
)
def test_what_is_no_library_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "libx.so"
    file.write_bytes(content)
    with pytest.raises(ElfError):
        defined_in(file)


def test_the_libc_of_this_machine_is_read() -> None:
    assert "malloc" in defined_in(next(Path("/").glob("lib*/x86_64-linux-gnu/libc.so.6")))


def test_no_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert re.search(
        r"has no torch. Name .* with --python. Install one: .*python -m pip install",
        refused(python),
    )


def test_a_cpu_build_of_torch(tmp_path: Path) -> None:
    message = refused(environment(tmp_path, cuda="None", version="2.13.0+cpu"))
    assert "torch 2.13.0+cpu, which is no CUDA build" in message and "Install one:" in message


def test_a_cuda_that_is_too_old(tmp_path: Path) -> None:
    assert "for CUDA 11; 12 and 13 can be emulated" in refused(environment(tmp_path, cuda="'11.8'"))


def test_a_statically_linked_runtime(tmp_path: Path) -> None:
    assert "has CUDA's runtime linked into itself, which can't be emulated" in refused(
        environment(tmp_path, runtime="libm.so.6")
    )


def test_no_headers(tmp_path: Path) -> None:
    message = refused(environment(tmp_path, cuda="'12.8'"))
    assert (
        "has no headers of CUDA. Install them:" in message
        and "'nvidia-cuda-runtime-cu12==12.8.*'" in message
    )


def test_nvidias_wheels_are_found_wherever_they_are_on_the_path(tmp_path: Path) -> None:
    python = environment(tmp_path, cuda="'13.0'")
    headers = tmp_path / "below/nvidia/cu13/include"
    headers.mkdir(parents=True)
    (headers / "cuda_runtime_api.h").touch()
    python.write_text(python.read_text().replace("/site ", f"/site:{tmp_path}/below "))
    assert look(python).headers[0] == headers


def test_release_of_nccl_is_that_of_its_header(tmp_path: Path) -> None:
    installed = installation(tmp_path)
    assert installed.nccl == CURRENT_NCCL
    (installed.headers[0] / "nccl.h").write_text(
        "#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE 22105\n"
    )
    assert installed.nccl == 22105


def test_no_interpreter(tmp_path: Path) -> None:
    assert "can't be started as a Python interpreter" in refused(tmp_path / "nothing")


def installation(tmp_path: Path) -> Installation:
    nothing = tmp_path / "include"
    nothing.mkdir()
    return Installation(
        python=Path(sys.executable),
        cuda=(13, 0),
        libraries=(),
        headers=(nothing,),
    )


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        TrainingEnvironmentError, match=r"There is no C compiler here.*apt-get install gcc"
    ):
        build.build(installation(tmp_path), tmp_path / "cache")


def test_a_compiler_that_refuses_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'x.c:1:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(
        TrainingEnvironmentError, match=r"does not compile with .*: x\.c:1:1: error: no such thing"
    ):
        build.build(installation(tmp_path), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
