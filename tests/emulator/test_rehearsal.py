"""`autotune rehearse`: a whole command, its peaks by phase, or the error that ended it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.emulator.launch import first_failure

TRAIN = """
import sys, torch
width = int(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, device="cuda") for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(16, width, device="cuda")).sum().backward()
    optimizer.step()
print("trained")
"""

TORCHS_ERROR = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 7, in main
[rank1]:     loss.backward()
[rank1]:   File "/env/torch/autograd/graph.py", line 869, in _engine_run_backward
[rank1]:     return run()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED
"""


def test_the_first_error_counts_and_the_users_own_line() -> None:
    failure = first_failure(TORCHS_ERROR.splitlines())
    assert failure is not None
    assert (
        failure.message == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    )
    assert failure.place == "/home/me/train.py:7 main"


def test_no_error_is_none() -> None:
    assert first_failure(["step 1", "loss: 0.3"]) is None


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", "rehearse", *arguments], capture_output=True, text=True
    )


def test_a_card_that_nobody_knows_is_one_sentence() -> None:
    ran = rehearse("--gpus", "2xA100", "--", "true")
    assert ran.returncode == 2
    assert (
        ran.stderr == "Error: 'A100' comes with different amounts of memory. Say which: A100-40G or"
        " A100-80G.\n"
    )


def test_a_stride_below_one_is_one_sentence() -> None:
    ran = rehearse("--gpus", "L4", "--stride", "0", "--", "true")
    assert ran.returncode == 2 and "--stride" in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_an_environment_without_cuda_is_one_sentence(tmp_path: Path) -> None:
    from tests.emulator.installations import environment

    python = environment(tmp_path, cuda="None", version="2.13.0+cpu")
    ran = rehearse("--gpus", "L4", "--python", str(python), "--", "true")
    assert (
        ran.returncode == 4
        and "which is no CUDA build" in ran.stderr
        and ran.stderr.count("\n") == 1
    )


def test_a_statically_linked_runtime_is_one_sentence(tmp_path: Path) -> None:
    from tests.emulator.installations import environment

    ran = rehearse(
        "--gpus", "L4", "--python", str(environment(tmp_path, runtime="libm.so.6")), "--", "true"
    )
    assert (
        ran.returncode == 4
        and "CUDA's runtime linked into itself" in ran.stderr
        and ran.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--gpus", "L4"],
            "Error: No command was given. Write it behind two dashes: -- torchrun train.py\n",
        ),
        (
            ["--gpus", "L4", "--", "no-such-program", "x"],
            (
                "Error: COMMAND 'no-such-program' is no program. Write what starts the training"
                " behind the two dashes.\n"
            ),
        ),
        (
            ["--", "true"],
            "Error: No GPUs were named. Say which are emulated, like --gpus 2xA100-40G.\n",
        ),
        (
            ["--gpus", "local", "--", "true"],
            (
                "Error: 'local' names no card that could be emulated. Name one, like --gpus"
                " 2xA100-40G.\n"
            ),
        ),
        (
            ["--gpus", "MI300X", "--", "true"],
            (
                "Error: MI300X is not an NVIDIA GPU, and only those are emulated. `autotune show"
                " gpus` lists them.\n"
            ),
        ),
    ],
)
def test_bad_use_is_one_sentence_with_the_way_out(arguments: list[str], error: str) -> None:
    ran = rehearse(*arguments)
    assert (ran.returncode, ran.stderr, ran.stdout) == (2, error, "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_command_that_fits_ends_with_its_peaks_by_phase(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ran = rehearse("--gpus", "L4", "--", python, str(tmp_path / "train.py"), "8192")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "trained\n" in ran.stdout
    assert "Rehearsed on 1 emulated L4: it ran to its end." in ran.stdout
    for phase in ("load", "forward", "backward", "optimizer"):
        assert f"\n  {phase} " in ran.stdout
    assert "Emulated, not measured" in ran.stdout
    assert "nobody has checked" not in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_command_that_does_not_fit_ends_with_its_error_and_its_place(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ran = rehearse("--gpus", "L4", "--", python, str(tmp_path / "train.py"), "22000")
    assert ran.returncode == 3
    assert "it ended with exit code 1. torch.OutOfMemoryError: CUDA out of memory." in ran.stdout
    assert f"Raised in {tmp_path}/train.py:" in ran.stdout
    assert "memory ran out, in the optimizer's step" in ran.stdout and "adamw_8bit" in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_rank_of_a_launcher_is_told_in_the_document(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch; torch.zeros(1 << 20, device=f'cuda:{os.environ[\"LOCAL_RANK\"]}')"
    )
    torchrun = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "train.py"),
    ]
    ran = rehearse("--gpus", "2xL4", "--json", "--", *torchrun)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert (document["status"], document["basis"]) == ("fits", "emulated")
    assert sorted(
        (row["rank"], row["card"]) for row in document["processes"] if row["rank"] is not None
    ) >= [(0, 0), (1, 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_values_end_with_a_table(python: str, tmp_path: Path) -> None:
    """Rows of 1 MiB and a copy of them: 2 MiB a row; `--limit` is what each card offers."""
    (tmp_path / "loop.py").write_text(
        "import sys, torch; torch.zeros(int(sys.argv[2]), 1 << 18, device='cuda').clone()"
    )
    loop = [python, str(tmp_path / "loop.py"), "--micro", "1"]
    ran = rehearse("--gpus", "L4", "--limit", "4GiB", "--vary", "micro=256,1024,4096", "--", *loop)
    assert ran.returncode == 0, ran.stdout + ran.stderr  # that of the best run
    rows = {line.split("  ")[0]: line for line in ran.stdout.splitlines()[-8:]}
    assert "fits" in rows["256"] and "512 MiB" in rows["256"]
    assert "fits" in rows["1024"] and "2 GiB" in rows["1024"]
    assert "out of memory" in rows["4096"]
