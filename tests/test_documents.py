"""Commands of README and docs, parsed by the program that would run them. test_documents_run.py
runs them.

The fence of a block defines its content: `sh` commands, `console` a command with its output, `text`
no command. A fence without a kind fails, and so does a command of a program without a check.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from autotune.cli import autotune_command
from tests.cli.command import autotune

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
KINDS = {"sh", "console", "text", "python", "yaml", "toml"}
WRITTEN = {
    "demo-out/report.html",
    "demo-out/launch.sh",
    "autotune-out/report.html",
    "autotune-out/launch.sh",
}
"""Files that a run writes, so that a page may name them."""


@dataclass(frozen=True)
class Block:
    """Content between two fences."""

    page: Path
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        text = re.sub(r"\\\n\s*", "", self.text)
        if self.kind == "sh":
            commands = []
            for line in text.splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    commands.append(line)
            return commands
        if self.kind == "console":
            commands = []
            for line in text.splitlines():
                if line.startswith("$ "):
                    commands.append(line.removeprefix("$ "))
            return commands
        # The pages of the commands are help, whose examples are commands.
        _, _, examples = text.partition("Example")
        commands = []
        for line in examples.splitlines():
            if re.match(r" {4}(?:autotune|torchrun) ", line):
                commands.append(line.strip())
        return commands


BLOCKS = [
    Block(page, kind, text) for page in PAGES for kind, text in _FENCE.findall(page.read_text())
]
_SPAN = re.compile(r"`(autotune [a-z]+ [^`]+|make [a-z-]+|pip [^`]+)`")
"""Commands in README's sentences and tables. Other pages may name a part of a command."""


def _commands() -> Iterator[tuple[str, str]]:
    """Yield each page's name and command, without its comment."""
    for block in BLOCKS:
        for line in block.commands:
            yield str(block.page.relative_to(ROOT)), line.partition("  #")[0].rstrip()
    for line in _SPAN.findall(_FENCE.sub("", PAGES[0].read_text())):
        yield "README.md", line


COMMANDS = sorted(set(_commands()))


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.kind in KINDS
        if block.kind == "console":
            assert block.commands
    # A command in a block that says it has none would be passed over.
    hidden = []
    for block in BLOCKS:
        if block.kind == "text" and re.search(
            r"^(?:\$ |autotune \w+ -|make \w+$)", block.text, re.M
        ):
            hidden.append(block)
    assert hidden == []


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_the_program_would_take_it(page: str, line: str) -> None:
    for command_line in _programs(line):
        _CHECKS[command_line[0]](command_line[1:])


def _programs(line: str) -> list[list[str]]:
    """The programs of one line, without what the shell itself takes: pipes, and files that are
    written.
    """
    tokens = shlex.split(re.sub(r"2>&1", "", line), comments=True)
    programs: list[list[str]] = [[]]
    for word in tokens:
        if word in ("|", "&&", ";"):
            programs.append([])
        elif word in (">", "<", ">>"):
            programs[-1].append("\0")
        elif programs[-1][-1:] == ["\0"]:
            programs[-1].pop()
        else:
            programs[-1].append(word)
    assert all(programs), line
    return list(map(_without_variables, programs))


def _without_variables(tokens: list[str]) -> list[str]:
    while re.fullmatch(r"[A-Z_]+=.*", tokens[0]):
        tokens = tokens[1:]
    return tokens


def _parsed(tokens: list[str]) -> None:
    context = click.Context(autotune_command, info_name="autotune")
    command: click.Command = autotune_command
    while isinstance(command, click.Group):
        subcommand = command.get_command(context, tokens[0])
        assert subcommand is not None, tokens
        command, tokens = subcommand, tokens[1:]
    command.make_context(command.name, tokens, parent=context)


def _makes(targets_and_variables: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= set(
        re.findall(
            r"^([\w-]+):", (ROOT / "examples" / "pipelines" / "Makefile").read_text(), re.MULTILINE
        )
    )
    for word in targets_and_variables:
        assert word in targets or "=" in word or word.startswith("-")


def _installs(arguments: list[str]) -> None:
    extras_of_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert arguments[0] in ("install", "download")
    extras_of_command = set()
    for word in arguments:
        for extra in re.findall(r"\[([\w,-]+)\]", word):
            extras_of_command.add(extra)
    for extras in extras_of_command:
        assert set(extras.split(",")) <= set(extras_of_project)


def _scripts(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert arguments[1] in ("autotune.cli.reference_pages", "pytest", "tests.fuzz"), arguments
        return
    script = ROOT / arguments[0]
    assert script.is_file(), arguments
    flags = [word for word in arguments[1:] if word.startswith("--")]
    for flag in flags:
        assert f'"{flag}"' in script.read_text(), f"{script} does not know one of {flags}"


def _is_written(tokens: list[str]) -> None:
    assert tokens[0] in WRITTEN


def _is_there(tokens: list[str]) -> None:
    assert any((ROOT / "examples" / "pipelines" / word).is_file() for word in tokens), tokens


_CHECKS = {
    "autotune": _parsed,
    "make": _makes,
    "pip": _installs,
    "python": _scripts,
    "bash": _is_written,
    "xdg-open": _is_written,
    "sh": _is_there,
    "sbatch": _is_there,
    "torchrun": lambda tokens: None,
    "tee": lambda tokens: None,
}
"""Check for each program. Programs before a pipe into autotune belong to the user."""


def test_a_flag_that_is_not_there_is_found() -> None:
    with pytest.raises(click.UsageError):
        _parsed(["run", "--modell", "x"])
    with pytest.raises(KeyError):
        test_the_program_would_take_it("", "somebody --else")
    with pytest.raises(AssertionError):
        _makes(["no-such-target"])


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.kind in ("python", "yaml", "toml")]
)
def test_what_is_no_command_can_be_read_as_what_it_is(block: Block) -> None:
    {"python": ast.parse, "yaml": yaml.safe_load, "toml": tomllib.loads}[block.kind](block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    targets = [target for target in _LINK.findall(page.read_text()) if "://" not in target]
    for target in targets:
        assert (page.parent / target).exists(), target


@pytest.mark.slow
def test_the_prediction_that_a_page_shows_is_what_is_predicted(tmp_path: Path) -> None:
    (shown,) = (block for block in BLOCKS if block.kind == "console")
    done = autotune(
        *_programs(shown.commands[0])[0][1:],
        cwd=tmp_path,
        timeout=250,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.code == 3, done.err
    for beginning in ("does not fit", "  --set per_device", "  backward", "settings "):
        line = next(line for line in shown.text.splitlines() if line.startswith(beginning))
        assert line in done.out


def test_the_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(
        re.findall(r"`((?:autotune/|search_spaces/|tests/)?[\w/-]+(?:/|\.(?:py|yaml|json)))`", text)
    )
    roots = (ROOT, ROOT / "autotune")
    made_up = {"autotune/frameworks/NAME.py", "NAME.yaml", "recommendation.json"}
    for name in paths - made_up:
        assert any((root / name).exists() for root in roots), name
    assert len(paths) > 40
