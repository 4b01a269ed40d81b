"""Generator of the help pages: `python -m autotune.cli.reference_pages docs/commands`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from autotune.cli import autotune_command

_WIDTH = 110


def pages() -> dict[str, str]:
    """Return file name -> content, one page per command; subcommands are sections."""
    context = click.Context(
        autotune_command,
        info_name="autotune",
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
    )
    contents = {}
    for name in autotune_command.list_commands(context):
        command = autotune_command.get_command(context, name)
        if command is not None:
            contents[f"{name}.md"] = "\n".join(_page(command, context, name))
    return contents


def _page(
    command: click.Command,
    parent: click.Context,
    name: str,
) -> Iterator[str]:
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
    )
    yield f"# `{context.command_path}`"
    yield ""
    yield "```text"
    yield command.get_help(context)
    yield "```"
    yield ""
    if isinstance(command, click.Group):
        for subname in command.list_commands(context):
            subcommand = command.get_command(context, subname)
            if subcommand is not None:
                heading, *lines = _page(subcommand, context, subname)
                yield f"#{heading}"  # a section of the group's page
                yield from lines


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(
            "usage: python -m autotune.cli.reference_pages FOLDER (docs/commands, for instance)"
        )
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
