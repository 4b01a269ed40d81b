"""Code inserted into training processes: it runs under any Python from 3.9 on, and does nothing
without emulated cards.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.emulator import launch
from autotune.emulator.build import LIBRARY, Built
from autotune.emulator.launch import INJECTED, Stand

WORKER = Path(launch.__file__).parents[1] / "worker"


@pytest.mark.parametrize("file", sorted(INJECTED.glob("*.py")), ids=lambda file: file.name)
def test_the_oldest_python_reads_it(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=(3, 9))


def start(tmp_path: Path, program: str, **variables: str) -> str:
    (tmp_path / "sitecustomize.py").write_text("print('of the environment')")
    path = os.pathsep.join([str(INJECTED), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_environments_own_sitecustomize_has_its_turn_and_no_hook_is_left(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; print([type(finder).__name__ for finder in sys.meta_path if '_TorchImportHook'"
        " in str(type(finder))])"
    )
    assert start(tmp_path, program) == "of the environment\n[]\n"


def test_code_runs_after_an_import_however_often_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "from types import SimpleNamespace\nversion = SimpleNamespace(cuda=None)\n"
    )
    program = """
import importlib.util, emulator_start
seen = []
emulator_start._keep_values, kept = None, emulator_start._keep_values
hook = emulator_start._TorchImportHook({"torch": [lambda module: seen.append(module.__name__)]})
import sys
sys.meta_path.insert(0, hook)
importlib.util.find_spec("torch")
importlib.util.find_spec("torch")
assert seen == []
import torch
import torch as again
kept(torch)
print(seen)
"""
    assert start(tmp_path, program).splitlines()[-1] == "['torch']"


@pytest.mark.parametrize(
    "order",
    [(INJECTED, WORKER / "startup"), (WORKER / "startup", INJECTED)],
    ids=["emulator", "watch"],
)
def test_each_sitecustomize_runs_once(order: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the environment')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*order, tmp_path)))}
    done = subprocess.run(
        [sys.executable, "-c", "print('begun')"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("of the environment\nbegun\n", "")


@pytest.mark.parametrize("first", ["emulator", "watch"])
def test_the_hook_that_watches_a_frameworks_models_runs_beside_it(
    first: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("")
    program = f"""
import sys
sys.path.insert(0, {str(WORKER)!r})
import emulator_start, import_hook
seen = []
hooks = [
    emulator_start._TorchImportHook({{"torch": [lambda module: seen.append("emulator")]}}),
    import_hook.AfterImport({{"torch": [lambda module: seen.append("watch")]}}),
]
sys.meta_path[:0] = hooks if "{first}" == "emulator" else hooks[::-1]
import torch
print(sorted(seen))
"""
    assert start(tmp_path, program).splitlines()[-1] == "['emulator', 'watch']"


def stand(tmp_path: Path) -> Stand:
    return Stand(
        folder=tmp_path,
        built=Built(
            folder=tmp_path / "built",
            stubs=(),
            cuda=(13, 0),
        ),
    )


def test_a_running_ray_cluster_is_not_joined(tmp_path: Path) -> None:
    environment = stand(tmp_path).environment({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert (environment["RAY_ADDRESS"], environment["RAY_TMPDIR"]) == ("", str(tmp_path))


def test_the_users_environment_goes_on_behind_ours(tmp_path: Path) -> None:
    users = {
        "LD_PRELOAD": "libjemalloc.so",
        "PYTHONPATH": "/mine",
        "DS_BUILD_OPS": "1",
        "HOME": "/home/me",
    }
    environment = stand(tmp_path).environment(users)
    assert environment["LD_PRELOAD"] == f"{tmp_path}/built/{LIBRARY}:libjemalloc.so"
    assert environment["PYTHONPATH"] == f"{INJECTED}:/mine"
    assert (environment["DS_BUILD_OPS"], environment["HOME"], environment["LD_LIBRARY_PATH"]) == (
        "1",
        "/home/me",
        f"{tmp_path}/built",
    )
    assert "AUTOTUNE_EMULATOR_PHASES" not in environment
