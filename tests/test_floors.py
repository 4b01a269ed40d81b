"""Imports go strictly down: the table of docs and README, held against every import statement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "autotune"

# From the ground up. Who stands on one line does not see the others on it; a floor of several lines has steps.
FLOORS = [
    ("0", {"errors"}),
    ("0", {"units", "document", "nvml", "secrets", "signals", "decoding"}),
    ("0", {"catalogue", "files"}),
    ("1", {"candidate", "devices", "hardware", "measurement", "environment"}),
    ("1", {"composition", "own_script", "prediction", "trace"}),
    ("1", {"workload", "detect"}),
    ("2", {"space", "failures", "verdict", "models", "soak", "disturbance"}),
    ("2", {"spaces", "assignments", "stamps"}),
    ("3", {"trainers", "predict"}),
    ("3", {"question", "recommendation"}),
    ("3", {"events", "forecast"}),
    ("4", {"rig"}),
    ("5", {"executors", "study", "store"}),
    ("5", {"foresight"}),
    ("6", {"conclude", "asking"}),
    ("6", {"forecasting"}),
    ("6", {"advice"}),
    ("6", {"tune", "report", "diagnose"}),
    ("6", {"answering"}),
    ("6", {"api"}),
    ("6", {"preflight"}),
    ("7", {"cli", "integrations"}),
    ("7", {"__main__"}),
]
HEIGHT = {room: height for height, (_, rooms) in enumerate(FLOORS) for room in rooms}

FRAMEWORKS = {"torch", "trl", "transformers", "peft", "accelerate", "datasets", "vllm", "tokenizers"}
TRAINING_SIDE = {"inside", "integrations"}
OURS_ONLY = {"click", "rich", "msgspec", "optuna", "psutil", "yaml"}

FILES = sorted(PACKAGE.rglob("*.py"))


def _room(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(file: Path) -> set[str]:
    """Every dotted name that the file imports, wherever in it; also what only a type checker reads."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{_from(node, file)}.{alias.name}" for alias in node.names}
    return names


def _from(node: ast.ImportFrom, file: Path) -> str:
    """The module in full; `from ..wire` in inside/adapters is autotune.inside.wire."""
    if node.level == 0:
        return node.module or ""
    here = ("autotune", *file.relative_to(PACKAGE).parts[: -node.level])
    return ".".join([*here, node.module] if node.module else here)


def _rooms_seen(file: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(file) if name.startswith("autotune.")}


def _ids(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def test_every_room_has_a_floor() -> None:
    rooms = {_room(file) for file in FILES} - {"__init__", "inside"}
    assert rooms <= set(HEIGHT), f"not in the table: {rooms - set(HEIGHT)}"


@pytest.mark.parametrize("file", [file for file in FILES if _room(file) not in ("__init__", "inside")], ids=_ids)
def test_imports_go_strictly_down(file: Path) -> None:
    room = _room(file)
    # `inside` is plain standard library at import; the parent shares its wire format. `__version__` is the package's.
    seen = _rooms_seen(file) - {room, "inside", "__version__"}
    upward = {other for other in seen if HEIGHT[other] >= HEIGHT[room]}
    assert not upward, f"{_ids(file)} (floor {FLOORS[HEIGHT[room]][0]}) reaches up or sideways to {upward}"


@pytest.mark.parametrize("file", [file for file in FILES if _room(file) == "inside"], ids=_ids)
def test_inside_knows_nothing_else_of_autotune(file: Path) -> None:
    # It runs in an environment where autotune and its dependencies may be absent.
    ours = {name for name in _imports(file) if name.startswith("autotune")}
    borrowed = {name for name in _imports(file) if name.split(".")[0] in OURS_ONLY}
    assert not {name for name in ours if not name.startswith("autotune.inside")}
    assert not borrowed


def test_only_the_study_imports_optuna() -> None:
    assert {_room(file) for file in FILES if any(name.split(".")[0] == "optuna" for name in _imports(file))} == {"study"}


def test_frameworks_load_only_on_the_training_side() -> None:
    users = {_ids(file) for file in FILES if FRAMEWORKS & {name.split(".")[0] for name in _imports(file)}}
    assert {user for user in users if Path(user).parts[0] not in TRAINING_SIDE} == set()
    assert users, "the training side imports its frameworks somewhere, or this test reads nothing"


def test_only_one_file_may_import_ray() -> None:
    assert {_ids(file) for file in FILES if any(name.split(".")[0] == "ray" for name in _imports(file))} <= {"executors/ray.py"}


def test_exit_codes_are_only_in_the_cli() -> None:
    def exits(file: Path) -> bool:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        raised = {node.id for node in nodes if isinstance(node, ast.Name)}
        return bool(called & {"sys.exit", "exit", "os._exit"} or "SystemExit" in raised)

    # `inside` ends its own processes, which have exit statuses but no exit codes of ours.
    assert {_room(file) for file in FILES if exits(file)} <= {"cli", "inside"}
