"""The configuration file among the words of a training command."""

from __future__ import annotations

from pathlib import Path

from autotune.preflight.command_words import names, with_file


def test_a_file_is_named_alone_or_after_a_flag(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.touch()
    for word in (str(config), f"--config={config}", f"-c={config}", f"{tmp_path}/./train.yaml"):
        assert names(word, str(config)), word
    for word in ("-c", "--config", "--config=", f"config={config}", "train.yaml", "--seed=1"):
        assert not names(word, str(config)), word


def test_only_the_file_is_replaced(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.touch()
    command = ["python", "train.py", "--config", str(config), f"--again={config}", "--seed=1"]
    changed = with_file(command, str(config), Path("/new.yaml"))
    assert changed == [
        "python",
        "train.py",
        "--config",
        "/new.yaml",
        "--again=/new.yaml",
        "--seed=1",
    ]
    assert with_file(command, str(config), config) == command
