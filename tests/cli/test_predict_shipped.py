"""`autotune predict` where nothing can be traced: the package's own step models answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import autotune, shape_only


@pytest.fixture(name="bare", scope="module")
def bare_interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("environment") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def test_a_shipped_family_is_predicted_without_a_framework(bare: str, tmp_path: Path) -> None:
    """Its model card states 7.61 billion parameters, each of two bytes."""
    done = autotune(
        *("predict", "--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--json", "--python", bare),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["fits"] is True
    parts = {row["name"]: row["bytes"] for row in document["breakdown"]}
    assert parts["weights"] == pytest.approx(2 * 7_615_616_512, rel=1e-4)
    assert document["versions"]["trl"]


def test_another_family_names_what_is_missing(bare: str, tmp_path: Path) -> None:
    shape_only(tmp_path / "model")
    done = autotune(
        *("predict", "--model", "model", "--gpus", "A100-40G", "--python", bare), cwd=tmp_path
    )
    assert done.code == 4
    assert "has no torch" in done.err and "-m pip install" in done.err


@pytest.fixture(name="older")
def older_interpreter(tmp_path: Path) -> str:
    """An interpreter that lists other releases, none of which can be imported."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, version in {"torch": "2.9.0", "transformers": "5.1.0", "trl": "1.8.0"}.items():
        metadata = packages / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return str(folder / "bin" / "python")


QUESTION = ("predict", "--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--python")


def test_other_releases_are_answered_quickly_and_named(older: str, tmp_path: Path) -> None:
    done = autotune(*QUESTION, older, "--quick", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith("fits: ")
    assert "has trl 1.8.0 and transformers 5.1.0 and torch 2.9.0" in done.out
    assert "trl 1.16.0" in done.out  # of the traced step


def test_the_answer_for_the_package_comes_before_the_trace(older: str, tmp_path: Path) -> None:
    """The trace fails here, as nothing can be imported: the first answer stands before it."""
    done = autotune(*QUESTION, older, cwd=tmp_path)
    assert done.code == 4
    first, second, *_ = done.out.splitlines()
    assert first.startswith("For trl 1.16.0") and first.endswith("comes with the package:")
    assert second.startswith("  fits: ")


def test_an_assumed_model_is_named_under_the_verdict(tmp_path: Path) -> None:
    """And only there: the line of the other assumptions does not repeat it. The code tells
    programs that read no text.
    """
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: my-org/Secret-7B-Zero\nuse_peft: true\ndtype: bfloat16\n"
    )
    done = autotune(
        "predict", "--config", "train.yaml", "--gpus", "2xA100-80G", "--quick", cwd=tmp_path
    )
    assert done.code == 5, done.err
    verdict, assumed, *evidence = done.out.splitlines()
    assert verdict.startswith("fits: ")
    assert assumed.startswith("  assumed: the model is Qwen/Qwen2.5-7B, ")
    assert not any("the model is" in line for line in evidence)
