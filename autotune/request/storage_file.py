"""URL of a storage from a file, so that its password stays out of the command line."""

from __future__ import annotations

from pathlib import Path

from autotune.core.errors import BadInput

MAX_URL_BYTES = 4096


def storage_url(storage: str | None, storage_file: str | None) -> str | None:
    """Return the URL of --storage or of the file of --storage-file; None if neither was given."""
    if storage_file is None:
        return storage
    if storage is not None:
        raise BadInput("--storage and --storage-file were both given.", way_out="Give one of them.")
    file = Path(storage_file).expanduser()
    way_out = "Write the URL into it, as its only line: postgresql://me:PASSWORD@host/autotune."
    if not file.is_file():
        raise BadInput(f"--storage-file {file} is no file.", way_out=way_out)
    try:
        with file.open(encoding="utf-8") as opened:
            url = opened.read(MAX_URL_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInput(f"--storage-file {file} can't be read: {reason}.", way_out=way_out) from error
    if "://" not in url or len(url.split()) != 1:
        raise BadInput(f"--storage-file {file} does not hold one URL.", way_out=way_out)
    return url
