"""docs/commands equals the generated help pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli.reference_pages import pages

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "commands"


def test_there_is_a_page_for_every_command_and_no_other() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(pages())


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], (
        "make it anew with: python -m autotune.cli.reference_pages docs/commands"
    )


@pytest.mark.parametrize("name", sorted(pages()))
def test_every_page_has_an_example(name: str) -> None:
    assert f"autotune {name.removesuffix('.md')}" in pages()[name].split("Example", 1)[1]
