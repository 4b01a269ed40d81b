"""Exact edits of one call in somebody else's file: nothing else moves, and what can't be edited
is said.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.frameworks.trl.script_calls import most_calls
from autotune.frameworks.trl.script_patch import Call, patch, patch_file

LONG = """\
from trl import GRPOConfig

args = GRPOConfig(
    output_dir="runs",  # ein Ordner: größer
    per_device_train_batch_size=8,  # as large as fits
    learning_rate=1e-6,
)
"""


def call_in(source: str, **fields: object) -> Call:
    node = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    assert node.end_lineno is not None and node.end_col_offset is not None
    span = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
    return Call(line=node.lineno, span=span, **fields)  # type: ignore[arg-type]


def patched(source: str, **changes: object) -> str:
    edited = patch(source.encode(), call_in(source), changes)  # type: ignore[arg-type]
    assert not edited.by_hand, edited.by_hand
    return edited.text.decode()


def test_a_literal_is_replaced_and_its_comment_stays() -> None:
    text = patched(LONG, per_device_train_batch_size=4)
    assert text == LONG.replace("batch_size=8,", "batch_size=4,")


def test_new_arguments_get_lines_of_their_own_where_the_others_have_them() -> None:
    text = patched(LONG, gradient_checkpointing=False, steps_per_generation=2)
    assert text == LONG.replace(
        "1e-6,\n", "1e-6,\n    gradient_checkpointing=False,\n    steps_per_generation=2,\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("c = GRPOConfig()\n", "c = GRPOConfig(n=4)\n"),
        ("c = GRPOConfig('runs')\n", "c = GRPOConfig('runs', n=4)\n"),
        ("c = GRPOConfig('runs', )\n", "c = GRPOConfig('runs', n=4, )\n"),
        ("c = GRPOConfig(a=(1))\n", "c = GRPOConfig(a=(1), n=4)\n"),
        ("c = GRPOConfig(a=f(1, 2)  # why)\n)\n", None),
        (
            "c = GRPOConfig(\n\ta=1,\n\tb=2  # no , )\n)\n",
            "c = GRPOConfig(\n\ta=1,\n\tb=2,\n\tn=4  # no , )\n)\n",
        ),
        (
            "c = G(\n  a=1,\n  b={\n    'k': 1,\n  },\n)\n",
            "c = G(\n  a=1,\n  b={\n    'k': 1,\n  },\n  n=4,\n)\n",
        ),
        (
            "c = GRPOConfig(a=1,\n               b=2)\n",
            "c = GRPOConfig(a=1,\n               b=2,\n               n=4)\n",
        ),
        ("c = GRPOConfig(a='''\nx\n''')\n", None),
        (
            "c = GRPOConfig(\r\n    a=1,\r\n)\r\n",
            "c = GRPOConfig(\r\n    a=1,\r\n    n=4,\r\n)\r\n",
        ),
        ("c = GRPOConfig(a=-1, n=16)", "c = GRPOConfig(a=-1, n=4)"),
        ("größe = 1; c = GRPOConfig(ä=1, n=1)\n", "größe = 1; c = GRPOConfig(ä=1, n=4)\n"),
    ],
)
def test_every_style_of_call_stays_itself(before: str, after: str | None) -> None:
    text = patched(before, n=4)
    assert after is None or text == after
    call = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
    assert {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg == "n"} == {"n": 4}


@pytest.mark.parametrize(
    ("source", "fields", "why"),
    [
        ("c = GRPOConfig(n=args.n)\n", {}, "given as args.n"),
        ("c = GRPOConfig(**cfg)\n", {"expanded": ("n",)}, "through the **"),
        ("c = GRPOConfig(**made())\n", {"expanded": ("*",)}, "through the **"),
        ("c = GRPOConfig()\nc.n = 3\n", {"changed": ("n",)}, "assigned after the call"),
    ],
)
def test_what_cannot_be_edited_stays_and_is_said(
    source: str,
    fields: dict[str, object],
    why: str,
) -> None:
    edited = patch(source.encode(), call_in(source, **fields), {"n": 4, "m": 1})
    assert why in edited.by_hand["n"]
    assert b"n=4" not in edited.text and (b"m=1" in edited.text) == ("m" not in edited.by_hand)


def test_a_call_that_moved_is_not_guessed_at() -> None:
    edited = patch(("\n" + LONG).encode(), call_in(LONG), {"per_device_train_batch_size": 4})
    assert (
        edited.text == ("\n" + LONG).encode()
        and "no such call" in edited.by_hand["per_device_train_batch_size"]
    )


@given(
    values=st.dictionaries(
        st.sampled_from(["output_dir", "per_device_train_batch_size", "learning_rate", "x", "y"]),
        st.one_of(
            st.integers(),
            st.booleans(),
            st.text(max_size=5),
            st.floats(allow_nan=False, allow_infinity=False),
            st.none(),
        ),
    )
)
def test_what_was_asked_for_is_what_the_call_says(values: dict[str, object]) -> None:
    call = next(n for n in ast.walk(ast.parse(patched(LONG, **values))) if isinstance(n, ast.Call))
    keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    before = {"output_dir": "runs", "per_device_train_batch_size": 8, "learning_rate": 1e-6}
    assert keywords == {**before, **values}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_has_no_literal_is_left_to_do_by_hand(value: float) -> None:
    edited = patch(LONG.encode(), call_in(LONG), {"learning_rate": value, "x": 1})
    assert "no plain value" in edited.by_hand["learning_rate"] and "x" not in edited.by_hand
    assert "x=1" in edited.text.decode() and "learning_rate=1e-6" in edited.text.decode()


@pytest.mark.skipif(shutil.which("patch") is None, reason="no program `patch`")
@pytest.mark.parametrize(
    "source",
    [LONG, "c = GRPOConfig(n=1)", LONG.replace("\n", "\r\n")],
    ids=["long", "no-newline", "crlf"],
)
def test_the_diff_is_what_patch_takes(source: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(source.encode())
    diff, by_hand = patch_file(file, call_in(source), {"n": 4})
    (tmp_path / "recommended.patch").write_bytes(diff.encode())
    assert not by_hand
    subprocess.run(
        ["patch", "--binary", "-p1", "-i", "recommended.patch"], cwd=tmp_path, check=True
    )
    assert file.read_bytes() == patch(source.encode(), call_in(source), {"n": 4}).text


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("t.train()\n", 1),
        ("t.train()\nt.train()\n", 2),
        ("if resume:\n    t.train(1)\nelse:\n    t.train()\n", 1),
        ("if resume:\n    t.train(1)\n    exit_early()\nt.train()\n", 2),
        ("def f():\n    if resume:\n        t.train(1)\n        return\n    t.train()\n", 1),
        ("for _ in range(3):\n    t.train()\n", 2),
        ("try:\n    t.train()\nexcept OSError:\n    t.train()\n", 1),
        ("model.train()\nt.train()\n", 1),
        ("def main():\n    with x():\n        t.train()\nmain()\n", 1),
    ],
)
def test_calls_are_counted_along_the_longest_way(
    source: str,
    times: int,
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.py"
    file.write_text(source)
    line = max(number for number, text in enumerate(source.splitlines(), 1) if "t.train(" in text)
    assert most_calls(str(file), line, "train") == times
