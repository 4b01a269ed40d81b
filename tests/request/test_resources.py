"""Resources of a job: the URL of a storage from a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.request.flags import flags_of, typed
from autotune.request.resources import storage_url


def test_the_url_is_read_from_the_file_and_never_typed(tmp_path: Path) -> None:
    file = tmp_path / "storage"
    file.write_text("postgresql://me:secret@host/db\n")
    flags = flags_of({"storage_file": str(file)})
    assert storage_url(flags.storage, flags.storage_file) == "postgresql://me:secret@host/db"
    assert "secret" not in " ".join(typed(flags)) and str(file) in typed(flags)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "one URL"),
        (b"a://b c://d", "one URL"),
        (b"password", "one URL"),
        (b"\xff\xfe", "no text"),
        (b"x" * 10_000_000, "one URL"),
    ],
)
def test_any_other_content_is_refused_without_being_shown(
    content: bytes,
    reason: str,
    tmp_path: Path,
) -> None:
    file = tmp_path / "storage"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=reason) as refused:
        storage_url(None, str(file))
    assert "c://d" not in str(refused.value)


def test_a_pipe_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        with pytest.raises(BadInput, match="is no file"):
            storage_url(None, str(tmp_path / name))
    with pytest.raises(BadInput, match="both given"):
        storage_url("sqlite:///x.db", str(tmp_path / "pipe"))
