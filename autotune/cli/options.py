"""Command-line options from `autotune.request.flags`, grouped, with shell completion."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import click

from autotune.cli.output import Context
from autotune.request.flags import (
    FLAGS,
    GROUPS,
    REPEATED,
    PredictOptions,
    RunOptions,
    SolveOptions,
    option_name,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class RequestCommand(click.Command):
    """Command with its options listed by group in --help."""

    context_class = Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in (*GROUPS, "Other")}
        for param in self.get_params(ctx):
            name, record = str(param.name), param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                rows[FLAGS[name][1].group if name in FLAGS else "Other"].append(record)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def request_options(
    kind: type[RunOptions] | type[PredictOptions] | type[SolveOptions],
) -> Callable[[F], F]:
    """Add the declared options of `run`, `predict` or `solve`, and the words after two dashes."""
    metavar = "[-- COMMAND|ARGUMENTS...]" if kind is RunOptions else "[-- ARGUMENTS...]"

    def decorate(command: F) -> F:
        command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar=metavar)(
            command
        )
        for name in reversed([name for name in FLAGS if name in kind.__annotations__]):
            command = declared_option(name)(command)
        return command

    return decorate


def declared_option(name: str, **changes: Any) -> Callable[[F], F]:
    """Return the click option of a declared flag; `changes` override its attributes."""
    hint, flag = FLAGS[name]
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(one for one in get_args(hint) if one is not types.NoneType)
    attributes: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar}
    if name in REPEATED:
        attributes["multiple"] = True
    elif hint is bool:
        attributes["is_flag"] = True
    else:
        attributes |= {"default": flag.default, "show_default": flag.default is not None}
    if get_origin(hint) is Literal:
        attributes["type"] = click.Choice(get_args(hint))
    elif hint is int:
        attributes["type"] = int if flag.minimum is None else click.IntRange(min=flag.minimum)
    elif flag.completes == "file":
        attributes["type"] = click.Path()  # completed as a file; reading it checks that it exists
    elif flag.completes is not None:
        attributes["shell_complete"] = _COMPLETIONS[flag.completes]
    return click.option(option_name(name), name, **{**attributes, **changes})


def storage_options(
    help: str, *, required: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add --storage and --storage-file; the command receives the URL as `storage`."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def with_url(
            *args: Any, storage: str | None, storage_file: str | None, **options: Any
        ) -> int:
            from autotune.request.resources import storage_url

            if required and storage is None and storage_file is None:
                raise click.UsageError("Missing option '--storage' or '--storage-file'.")
            return command(*args, storage=storage_url(storage, storage_file), **options)

        return click.option("--storage", metavar="URL", help=help)(
            declared_option("storage_file")(with_url)
        )

    return decorate


def as_json_option(
    help: str = "Print one JSON document on stdout; progress goes to stderr.",
) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help)


def _names(kind: str) -> Iterable[str]:
    from autotune import catalog
    from autotune.catalog import space_files

    if kind == "models":
        return (hub_id.split("/")[1] for known in catalog.models() for hub_id in known.ids)
    return (
        space_files.names()
        if kind == "spaces"
        else ("local", "cpu", *(gpu.name for gpu in catalog.gpus()))
    )


def _completion(kind: str, *, path: str | None = None) -> Callable[..., list[CompletionItem]]:
    """Return a completion of names, or of paths (`dir`, `file`) if no name matches."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name)
            for name in sorted(set(_names(kind)))
            if name.lower().startswith(incomplete.lower())
        ]
        return found or ([CompletionItem(incomplete, type=path)] if path else [])

    return complete


_COMPLETIONS = {
    "models": _completion("models", path="dir"),
    "gpus": _completion("gpus"),
    "spaces": _completion("spaces", path="file"),
}
