"""A pack of wheels that travels in two halves, and the program that starts from it. The pack is a
made-up one, whose installer writes the file that the real one writes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = 'mkdir -p "$1" && cat part-* > "$1/all" && echo "export PACKED=yes" > "$1/env.sh"\n'
INSTALL = f'cd "$(dirname "$0")"\n{INSTALL}'
CONTENT = {"part-000": "first ", "part-001": "second", "install.sh": INSTALL}


@pytest.fixture(name="machine")
def empty_machine(tmp_path: Path) -> Path:
    """A machine whose program says what it was given."""
    program = tmp_path / "repository" / "benchmarks" / "first_light.py"
    program.parent.mkdir(parents=True)
    program.write_text("import os, sys; print('ran', os.environ.get('PACKED'), *sys.argv[1:])\n")
    return tmp_path


def call(machine: Path, *names: str) -> str:
    """Bring these files of the pack along and start; everything brought before is gone."""
    wheels = machine / "brought" / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for file in wheels.iterdir():
        file.unlink()
    sums = ""
    for name, text in CONTENT.items():
        sums += f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"
    for name in names:
        (wheels / name).write_text(CONTENT[name])
    (wheels / "SHA256SUMS").write_text(sums)
    variables = {"OUT": "out", "SITE": "site", "PARTS": "parts", "KEPT": "kept", "HOME": "home"}
    environment = {**os.environ, "XDG_CACHE_HOME": str(machine / "cache")}
    environment |= {name: str(machine / folder) for name, folder in variables.items()}
    command = ["bash", str(ROOT / "benchmarks" / "first_light.sh"), str(machine / "brought")]
    result = subprocess.run(
        [*command, "--seconds", "500"],
        cwd=machine / "repository",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_program_starts_when_both_halves_are_there(machine: Path) -> None:
    first = call(machine, "install.sh", "part-000")
    assert "ran" not in first
    assert "1 parts of the pack are here" in first
    second = call(machine, "install.sh", "part-001")
    assert "ran yes" in second
    assert "--seconds 500" in second
    assert (machine / "site" / "all").read_text() == "first second"


def test_a_pack_that_is_installed_is_not_needed_again(machine: Path) -> None:
    call(machine, "install.sh", "part-000", "part-001")
    assert "ran yes" in call(machine, "install.sh", "part-000")


def test_a_machine_with_its_own_packages_needs_no_pack(machine: Path) -> None:
    (machine / "brought").mkdir()
    script = str(ROOT / "benchmarks" / "first_light.sh")
    environment = {
        **os.environ,
        "SITE": str(machine / "site"),
        "KEPT": str(machine / "kept"),
    }
    result = subprocess.run(
        ["bash", script, str(machine / "brought")],
        cwd=machine / "repository",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ran None" in result.stdout
