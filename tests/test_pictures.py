"""The pictures of docs/ show what the program prints today: by the hashes of their texts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.report import shown_texts

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
assert SPEC is not None and SPEC.loader is not None
make_pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_pictures)


def test_the_pictures_are_of_todays_texts() -> None:
    stored = json.loads(make_pictures.FINGERPRINTS.read_text())
    today = make_pictures.fingerprints()
    drifted = [kind for kind, fingerprint in stored.items() if today[kind] != fingerprint]
    assert stored and not drifted, "make pictures"


def test_another_word_is_noticed_and_other_figures_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = make_pictures.fingerprints()
    text = shown_texts.terminal_text()
    assert "recommended" in text
    monkeypatch.setattr(shown_texts, "terminal_text", lambda: text.replace("450", "451"))
    assert make_pictures.fingerprints() == before
    monkeypatch.setattr(shown_texts, "terminal_text", lambda: text.replace("limit", "bound"))
    changed = make_pictures.fingerprints()
    assert changed["terminal"] != before["terminal"] and changed["report"] == before["report"]


def test_every_picture_exists_and_is_small() -> None:
    for name in make_pictures.NAMES:
        size = (make_pictures.PICTURES / name).stat().st_size
        assert 0 < size <= make_pictures.LARGEST_BYTES
