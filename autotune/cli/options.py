"""Command-line options from `autotune.request.flags`, grouped, with shell completion."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import click

from autotune.cli.output import Context
from autotune.request.command_flags import PredictOptions, RunOptions, SolveOptions
from autotune.request.flags import FLAGS, REPEATED, option_name
from autotune.request.request_flags import GROUPS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


Options = type[RunOptions] | type[PredictOptions] | type[SolveOptions]
OTHER = "Other"  # group of options that are no flags of a request


class RequestCommand(click.Command):
    """Command with its options listed by group in --help."""

    context_class = Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for group in (*GROUPS, OTHER):
            records[group] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                records[_group_of(str(param.name))].append(record)
        for group, listed in records.items():
            if listed:
                with formatter.section(group):
                    formatter.write_dl(listed)


def _group_of(name: str) -> str:
    if name not in FLAGS:
        return OTHER
    _, flag = FLAGS[name]
    return flag.group


def request_options(options: Options) -> Callable[[F], F]:
    """Add the declared options of `run`, `predict` or `solve`, and the words after two dashes."""
    metavar = "[-- COMMAND|ARGUMENTS...]" if options is RunOptions else "[-- ARGUMENTS...]"
    names = [name for name in FLAGS if name in options.__annotations__]
    arguments = click.argument(
        "arguments",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar=metavar,
    )

    def decorate(command: F) -> F:
        command = arguments(command)
        for name in reversed(names):
            command = declared_option(name)(command)
        return command

    return decorate


def declared_option(name: str, **changes: Any) -> Callable[[F], F]:
    """Return the click option of a declared flag; `changes` override its attributes."""
    hint, flag = FLAGS[name]
    hint = _without_none(hint)
    attributes: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar}

    # 1. Given once, several times, or as a switch.
    if name in REPEATED:
        attributes["multiple"] = True
    elif hint is bool:
        attributes["is_flag"] = True
    else:
        attributes["default"] = flag.default
        attributes["show_default"] = flag.default is not None

    # 2. Its type, and the completion of its values.
    if get_origin(hint) is Literal:
        attributes["type"] = click.Choice(get_args(hint))
    elif hint is int:
        attributes["type"] = int if flag.minimum is None else click.IntRange(min=flag.minimum)
    elif flag.completes == "file":
        attributes["type"] = click.Path()  # completed as a file; reading it checks that it exists
    elif flag.completes is not None:
        attributes["shell_complete"] = _COMPLETIONS[flag.completes]
    attributes.update(changes)
    return click.option(option_name(name), name, **attributes)


def _without_none(hint: Any) -> Any:
    """Return `int` for `int | None`."""
    if get_origin(hint) not in (types.UnionType, Union):
        return hint
    return next(part for part in get_args(hint) if part is not types.NoneType)


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

        storage_option = click.option("--storage", metavar="URL", help=help)
        return storage_option(declared_option("storage_file")(with_url))

    return decorate


def as_json_option(
    help: str = "Print one JSON document on stdout; progress goes to stderr.",
) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help)


# Shell completion.


def _model_names() -> Iterator[str]:
    from autotune import catalog

    for model in catalog.models():
        for hub_id in model.ids:
            yield hub_id.split("/")[1]


def _gpu_names() -> Iterator[str]:
    from autotune import catalog

    yield from ("local", "cpu")
    for gpu in catalog.gpus():
        yield gpu.name


def _space_names() -> Iterator[str]:
    from autotune.catalog import space_files

    yield from space_files.names()


def _completion(
    names: Callable[[], Iterator[str]], *, path: str | None = None
) -> Callable[..., list[CompletionItem]]:
    """Return a completion of names, or of paths (`dir`, `file`) if no name matches."""

    def complete(
        context: click.Context,
        parameter: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        items = []
        for name in sorted(set(names())):
            if name.lower().startswith(incomplete.lower()):
                items.append(CompletionItem(name))
        if not items and path is not None:
            items.append(CompletionItem(incomplete, type=path))
        return items

    return complete


_COMPLETIONS = {
    "models": _completion(_model_names, path="dir"),
    "gpus": _completion(_gpu_names),
    "spaces": _completion(_space_names, path="file"),
}
