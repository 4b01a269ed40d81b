"""Tables of an answer in the terminal, and the figures in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from autotune.core.answer import Recommendation, Trial
from autotune.core.measurement import Speed
from autotune.core.units import format_bytes
from autotune.report.answer_facts import relative_spread

if TYPE_CHECKING:
    from rich.console import Console


NOT_KNOWN = "not known"


def show_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        header_style="bold",
    )
    for index, column in enumerate(columns):
        table.add_column(
            column,
            overflow="fold",
            justify="left" if index == 0 or column in ("why", "outcome") else "right",
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def rate_text(speed: Speed | None, answer: Recommendation) -> str:
    if speed is None:
        return NOT_KNOWN
    text = f"{speed.tokens_per_second:,.0f}"
    spread = relative_spread(speed, answer)
    if spread is not None:
        text += f" ± {100 * spread:.0f} %"
    return text


def peak_text(trial: Trial | None) -> str:
    if trial is None or trial.measurement.memory.peak_bytes is None:
        return NOT_KNOWN
    return format_bytes(trial.measurement.memory.peak_bytes)
