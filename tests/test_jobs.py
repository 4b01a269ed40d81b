"""Examples for jobs and agents, read by the tools that they are for."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from autotune.cli import autotune_command, exit_codes
from autotune.core.shell_script import commands_of

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "examples" / "jobs"
SKILL = ROOT / "examples" / "agents" / "SKILL.md"
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}


def test_the_dockerfile_copies_what_there_is_and_starts_autotune() -> None:
    text = (JOBS / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [
        line.split(maxsplit=1)
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert {name for name, _ in lines} <= INSTRUCTIONS and lines[0][0] == "FROM"
    for name, rest in lines:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    extras = re.search(r"\.\[([\w,]+)\]", text)
    assert extras is not None
    known = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    assert set(extras[1].split(",")) <= known
    assert json.loads(next(rest for name, rest in lines if name == "ENTRYPOINT")) == ["autotune"]


def test_skypilot_reads_its_task() -> None:
    path = JOBS / "skypilot.yaml"
    task = yaml.safe_load(path.read_text())
    assert set(task) <= {"name", "resources", "envs", "file_mounts", "setup", "run"}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True, timeout=30)
    accept(
        [
            word
            for command in commands_of(task["run"], (), task["envs"])
            for word in [[one.text for one in command.words]]
        ]
    )
    sky = pytest.importorskip("sky")
    found = sky.Task.from_yaml(str(path))
    assert found.name == "autotune" and "A100-80GB" in str(found.resources)


def test_the_job_for_hugging_face_is_taken_by_its_command() -> None:
    text = (JOBS / "hf_job.sh").read_text()
    subprocess.run(["bash", "-n", str(JOBS / "hf_job.sh")], check=True, timeout=30)
    hf = pytest.importorskip("huggingface_hub.cli.hf").app
    joined = text.replace("\\\n", " ")
    start = joined.index("hf jobs run")
    words = shlex.split(joined[start:])[1:]
    run = hf.commands["jobs"].get_command(None, "run")  # imported when it is asked for
    with run.make_context("run", words[2:]) as context:
        assert context.params["flavor"] is not None and "autotune run" in words[-1]
    inner = words[-1]
    subprocess.run(["bash", "-n", "-c", inner], check=True, timeout=30)


def accept(commands: list[list[str]]) -> None:
    """Parse each `autotune` command, without running it."""
    for words in commands:
        if Path(words[0]).name == "autotune":
            words = words[: words.index(">")] if ">" in words else words
            take(words[1:])


def take(words: list[str]) -> None:
    with click.Context(autotune_command) as context:
        command = autotune_command.get_command(context, words[0])
        assert command is not None, words
        command.make_context(words[0], list(words[1:]), parent=context).close()


def test_the_skill_names_commands_codes_and_keys_that_exist() -> None:
    text = SKILL.read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["name"] == "autotune" and len(head["description"]) < 1024
    for line in re.findall(r"`(autotune [^`]+)`", text):
        take(shlex.split(line)[1:])
    codes = {
        value
        for name, value in vars(exit_codes).items()
        if name.isupper() and isinstance(value, int)
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)} <= codes
    contracts = (ROOT / "tests" / "contracts.json").read_text()
    for key in (
        "ways_to_fit",
        "margin_bytes",
        "depends_on",
        "recommendation",
        "remedies",
        "evidence",
    ):
        assert key in text and key in contracts
