"""Whole logs with known causes: made by really failing, or with the words of a failure that
needs a GPU set in real places.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec.yaml

from autotune.core.measurement import PHASES
from autotune.diagnosis import diagnose
from autotune.failures.table import CAUSES, MEMORY_CAUSES
from tests.every import for_each

HERE = Path(__file__).parent
LABELS: list[dict[str, Any]] = msgspec.yaml.decode((HERE / "labels.yaml").read_text())["logs"]
BY_NAME = {label["name"]: label for label in LABELS}
LARGEST_BYTES = 60_500
MISTAKEN = {
    "peft-prefix-checkpointing": "two settings at odds show only as two tensors of different sizes",
    "cublas-no-room": (
        "cuBLAS found no room for its handle: whoever calls it first is not what fills the GPU"
    ),
    "ray-actor-killed": (
        "the same of an actor: memory is one of three things that Ray supposes, of whatever it was"
    ),
    "map-worker-killed": (
        "a worker that died of an unknown cause: that it was memory stands only in the kernel's log"
    ),
}
"""Logs that are known to be named wrongly, each with why. None may be a failure that is not
about memory and is called one.
"""


def log_of(name: str) -> str:
    return (HERE / "logs" / f"{name}.log").read_text()


def test_each_log_has_its_label_and_each_label_its_log_and_script() -> None:
    assert {file.stem for file in (HERE / "logs").iterdir()} == set(BY_NAME)
    assert len(BY_NAME) == len(LABELS)
    assert all((HERE / "provoke" / label["script"]).is_file() for label in LABELS)
    scripts = {file.name for file in (HERE / "provoke").iterdir() if file.is_file()}
    assert scripts == {label["script"] for label in LABELS} | {"parts.py", "run.py", "__init__.py"}


def test_there_are_enough_of_each_kind() -> None:
    unseen = [label for label in LABELS if not label["used_for_patterns"]]
    other_causes = [
        label for label in LABELS if label["is_memory"] is False and label["cause"] != "none"
    ]
    assert len(LABELS) >= 80 and 2 * len(unseen) >= len(LABELS) and len(other_causes) >= 30
    assert sum(label["is_memory"] is True for label in unseen) >= 20
    assert (
        sum(label["cause"] is None for label in unseen) >= 5
        and sum(label["cause"] == "none" for label in unseen) >= 3
    )


@for_each(BY_NAME)
def test_a_label_is_well_formed(name: str) -> None:
    label = BY_NAME[name]
    assert label["cause"] is None or label["cause"] in CAUSES
    assert label["made"] in ("provoked", "placed") and label.get("phase") in (None, *PHASES)
    assert label["set"] in ("patterns", "first", "second")
    expected = None if label["cause"] is None else label["cause"] in MEMORY_CAUSES
    # Memory that a neighbour gives back while vLLM measures it has that neighbour as its cause, and
    # did not run out.
    assert label["is_memory"] == expected or (label["cause"], label["is_memory"]) == (
        "gpu_other_process",
        False,
    )


@for_each(BY_NAME)
def test_a_log_is_small_and_says_nothing_of_the_machine_that_made_it(name: str) -> None:
    text = log_of(name)
    assert 0 < len(text.encode()) <= LARGEST_BYTES
    assert not any(
        path in text
        for path in (str(HERE.parents[1]), sys.prefix, str(Path.home() / "."))
        if len(path) > 5
    )
    assert not re.search(r"provoke-[a-z0-9_]{8}/|/simple/", text)
    host = socket.gethostname()
    assert host == "localhost" or not re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text)


@for_each(BY_NAME)
def test_it_is_named_for_what_it_is(name: str) -> None:
    label, diagnosis = BY_NAME[name], diagnose(log_of(name))
    if name in MISTAKEN:
        assert diagnosis.cause != label["cause"], (
            f"{name} is named rightly now: take it out of MISTAKEN"
        )
        assert not diagnosis.is_memory or label["is_memory"]
        return
    assert (diagnosis.cause, diagnosis.is_memory) == (label["cause"], label["is_memory"]), diagnosis
    assert diagnosis.known == (label["cause"] is not None)
    for fact in ("phase", "rank"):
        assert fact not in label or getattr(diagnosis, fact) == label[fact], diagnosis


def test_at_most_one_in_twenty_is_mistaken() -> None:
    assert len(MISTAKEN) <= len(LABELS) // 20
