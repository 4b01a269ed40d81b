"""Durations and shares as people type them, and numbers whose unit would be a guess."""

from __future__ import annotations

import pytest

from autotune.core.errors import BadInput, suggestion
from autotune.core.units import parse_seconds, parse_share


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20min", 1200),
        ("20 minutes", 1200),
        ("0.5h", 1800),
        ("1.5 hours", 5400),
        ("1h 30min", 5400),
        ("1hr", 3600),
        ("90sec", 90),
        ("2 Min 5 Secs", 125),
    ],
)
def test_units_may_be_written_out(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["20", "90", "1.5"])
def test_a_duration_without_a_unit_is_refused_with_a_guess(text: str) -> None:
    with pytest.raises(BadInput, match=rf"has no unit\. Did you mean {text}m\?"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["1h30", "20mi", "5 months", "1m1h", "20%"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="20m"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "share"), [("95%", 0.95), (" 12.5 % ", 0.125), ("100%", 1.0)])
def test_a_share_is_read(text: str, share: float) -> None:
    assert parse_share(text) == share


def test_a_text_without_a_percent_sign_is_no_share() -> None:
    assert parse_share("38G") is None and parse_share("0.95") is None


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "ninety%", "1e1%"])
def test_a_share_beyond_the_whole_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="95%"):
        parse_share(text)


def test_a_suggestion_ignores_the_case_and_says_nothing_where_nothing_is_near() -> None:
    names = ["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "gemma-3-4b", "phi-4", "SmolLM2", "GPT-2"]
    assert suggestion("QWEN2.5-7", names).startswith("Did you mean 'Qwen2.5-7B'")
    assert suggestion("0000", names) == ""
    assert suggestion("0000", names[:2]) == "Did you mean 'Llama-3.1-8B' or 'Qwen2.5-7B'?"
