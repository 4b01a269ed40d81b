"""Row lengths of the user's dataset, and the loss at a limit on each percentile: as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.core.dataset import RowLengths


def data_lines(found: RowLengths | None) -> Iterator[str]:
    """Yield lines for a terminal; none without lengths."""
    if found is None:
        return
    part = "" if found.looked_at == found.rows else f" ({found.looked_at:,} of them read)"
    longest = found.percentiles[-1].length
    yield f"dataset  {found.rows:,} rows{part}, {found.tokens / found.looked_at:,.0f} tokens on average, {longest:,} at most"
    yield "         rows within   length   truncating drops   filtering drops"
    for at in found.percentiles[:-1]:
        yield (
            f"         {at.share:>10}%   {at.length:>6,}   {_share(at.cut, found.tokens):>6} of tokens"
            f"   {_share(at.longer, found.looked_at):>6} of rows, {_share(at.left_out, found.tokens)} of tokens"
        )


def data_row(found: RowLengths | None) -> dict[str, Any] | None:
    """Return the lengths for a document; shares refer to the rows that were read."""
    if found is None:
        return None
    return {
        "rows": found.rows,
        "looked_at": found.looked_at,
        "tokens": found.tokens,
        "percentiles": [
            {
                "share": at.share,
                "length": at.length,
                "rows_longer": at.longer,
                "truncating_drops_tokens": at.cut,
                "filtering_drops_tokens": at.left_out,
            }
            for at in found.percentiles
        ],
    }


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"
