"""What a shell offers behind a flag: names that are known, asked for only when somebody presses the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _models() -> Iterable[str]:
    from autotune import catalogue

    return (hub_id.split("/")[1] for known in catalogue.models() for hub_id in known.ids)


def _gpus() -> Iterable[str]:
    from autotune import catalogue

    return ("local", "cpu", *(gpu.name for gpu in catalogue.gpus()))


def _spaces() -> Iterable[str]:
    from autotune import spaces

    return spaces.names()


def _offering(names: Callable[[], Iterable[str]], *, also: str | None = None) -> Callable[..., list[CompletionItem]]:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        begun = incomplete.lower()
        found = [CompletionItem(name) for name in sorted(set(names())) if name.lower().startswith(begun)]
        # A folder of the user's own serves as well as a name.
        return found or ([CompletionItem(incomplete, type=also)] if also else [])

    return complete


model_names = _offering(_models, also="dir")
gpu_names = _offering(_gpus)
space_names = _offering(_spaces, also="file")
FILE = click.Path()
"""Completed as a file; whether there is one is said where it is read."""
