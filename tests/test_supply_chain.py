"""Dependencies of an installation: few, bounded, declared, under permitted licences, and without
known vulnerabilities.

Everything is read from files and from installed packages: no network.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = list(map(Requirement, PROJECT["dependencies"]))
EXTRAS = PROJECT["optional-dependencies"]
OUR_EXTRAS = list(
    map(Requirement, EXTRAS["fast"] + EXTRAS["ray"] + EXTRAS["dashboard"] + EXTRAS["postgres"])
)
ADVISORIES = yaml.safe_load((ROOT / ".ci" / "constraints" / "advisories.yaml").read_text())

MOST = 14
PERMISSIVE = re.compile(r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation")
COPYLEFT_EXTRAS = {"psycopg"}
"""LGPL: installed on request for PostgreSQL, imported unchanged, never shipped with autotune."""


def test_there_are_few() -> None:
    assert len(CORE) <= MOST


@pytest.mark.parametrize("needed", [*CORE, *OUR_EXTRAS], ids=str)
def test_each_is_bounded_below_and_above(needed: Requirement) -> None:
    operators = {specifier.operator for specifier in needed.specifier}
    assert operators & {">=", "=="} and operators & {"<", "=="}, f"{needed} is open at one end"


@pytest.mark.parametrize("package", ADVISORIES)
def test_no_version_with_a_known_hole_may_be_chosen(package: str) -> None:
    allowed = [needed for needed in _everything() if canonicalize_name(needed.name) == package]
    assert allowed, f"{package} is no dependency any more: drop it from advisories.yaml"
    for identifier, mended in ADVISORIES[package]:
        for needed in allowed:
            lower_bounds = []
            for specifier in needed.specifier:
                if specifier.operator in (">=", "=="):
                    lower_bounds.append(Version(specifier.version))
            assert min(lower_bounds) >= Version(mended), (
                f"{needed} allows versions with {identifier}, mended in {mended}"
            )


@pytest.mark.parametrize("needed", [*CORE, *OUR_EXTRAS], ids=lambda needed: needed.name)
def test_licences_allow_it(needed: Requirement) -> None:
    licence = _licence(needed.name)
    if licence is None:
        assert needed not in CORE, f"{needed.name} is not installed"
        pytest.skip(f"{needed.name} is an extra that is not installed here")
    assert PERMISSIVE.search(licence) or needed.name in COPYLEFT_EXTRAS, f"{needed.name}: {licence}"


def test_every_licence_is_listed() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for needed in [*CORE, *OUR_EXTRAS]:
        assert f"| {needed.name} |" in page


def test_nothing_is_imported_that_is_not_declared() -> None:
    declared = {canonicalize_name(needed.name) for needed in [*CORE, *OUR_EXTRAS]}
    owners = packages_distributions()
    for file, module in _imports():
        distributions = set(map(canonicalize_name, owners.get(module, [module])))
        assert distributions & declared, (
            f"{file.relative_to(ROOT)} imports {module}, which is no dependency of autotune's"
        )


UNHASHED = {"torch-cpu.txt"}
"""docs/dependencies.md gives the reason."""


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".ci" / "constraints").glob("*.txt")), ids=lambda file: file.name
)
def test_what_tests_install_is_pinned_with_the_hashes_of_its_files(file: Path) -> None:
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)
    pins = text.replace(" \\\n", "").splitlines()
    assert pins
    for pin in pins:
        hashed = r"" if file.name in UNHASHED else r"(?: +--hash=sha256:[0-9a-f]{64})+"
        assert re.fullmatch(rf"[\w.-]+==[\w.+!]+{hashed}", pin), pin


def test_no_other_index_can_shadow_a_name_and_nothing_unpinned_is_installed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "extra-index-url" not in makefile
    for line in makefile.splitlines():
        if "pip install" in line and not line.startswith("#"):
            assert line == "PIP_INSTALL := $(BIN)/python -m pip install --no-deps", line
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pinned = (ROOT / ".ci" / "constraints" / "cpu.txt").read_text()
    for requirement in build:
        assert f"{Requirement(requirement).name}==" in pinned, (
            "an installation without build isolation needs them"
        )


def _everything() -> list[Requirement]:
    extras = []
    for texts in PROJECT["optional-dependencies"].values():
        for text in texts:
            extras.append(Requirement(text))
    return [*CORE, *extras]


def _licence(name: str) -> str | None:
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        return None
    kinds = []
    for line in metadata.get_all("Classifier") or []:
        if line.startswith("License"):
            kinds.append(line.split("::")[-1])
    return " ".join(
        [metadata.get("License-Expression") or "", *kinds, (metadata.get("License") or "")[:60]]
    )


def _imports() -> Iterator[tuple[Path, str]]:
    """Yield the imports of every module except those that run in the training environment or the
    user's process."""
    apart = {
        ROOT / "autotune" / "worker",
        ROOT / "autotune" / "integrations",
        ROOT / "autotune" / "emulator" / "inject",
    }
    for file in sorted((ROOT / "autotune").rglob("*.py")):
        if not apart & set(file.parents):
            for node in ast.walk(ast.parse(file.read_text())):
                for module in _named(node):
                    if module not in sys.stdlib_module_names and module != "autotune":
                        yield file, module


def _named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.split(".")[0]]
    return []
