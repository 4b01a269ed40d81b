"""URLs of SQLite files, read back by what opens them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from autotune.core.files import sqlite_file, sqlite_url
from autotune.search.storage import open_storage

NAMES = ["plain", "a b", "{y}", "a?b=c", "%20", "a%3Fb", "a@b:c", "#x", "line\nbreak", "é", "{SCHEMA_VERSION}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / name / "study.db"
    file.parent.mkdir()
    url = sqlite_url(file)
    assert sqlite_file(url) == file == Path(str(make_url(url).database))
    open_storage(url)
    assert [entry.name for entry in tmp_path.iterdir()] == [name] and file.exists()


def test_other_databases_have_no_file() -> None:
    assert sqlite_file("postgresql://me@host/db") is None and sqlite_file("sqlite:///:memory:") is None
    assert sqlite_file("sqlite:////a/b.db?timeout=5") == Path("/a/b.db")
