"""Reading an answer's document from disk, and writing its page there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from autotune.units import MIB

LARGEST_BYTES = 256 * MIB
"""A document of thousands of trials has a few megabytes; what is larger than this is something else."""


def read_document(source: Path) -> dict[str, Any]:
    """The JSON object in this file, whatever stands in the way said in a sentence."""
    import msgspec

    way_out = "Name the folder that `autotune run` wrote, or its recommendation.json."
    try:
        if source.stat().st_size > LARGEST_BYTES:
            raise BadInput(f"{source} has more than {LARGEST_BYTES // MIB} MiB, which no answer has.", way_out=way_out)
        document = msgspec.json.decode(source.read_bytes())
    except OSError as error:
        raise BadInput(f"{source} can't be read: {error.strerror}.", way_out=way_out) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{source} holds no JSON: {error}.", way_out=way_out) from None
    if not isinstance(document, dict):
        raise BadInput(f"{source} holds no JSON object.", way_out=way_out)
    return document


def write_page(target: Path, page: str) -> None:
    """Whole or not at all, with the permissions that the user's other files get."""
    try:
        handle, name = tempfile.mkstemp(prefix=".unfinished-", dir=target.absolute().parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
            umask = os.umask(0)
            os.umask(umask)
            Path(name).chmod(0o666 & ~umask)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadInput(
            f"{target} can't be written: {error.strerror}.", way_out="Name another file: --to ~/report.html."
        ) from error
