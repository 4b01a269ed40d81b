from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.errors import BadInput
from autotune.core.units import (
    GIB,
    MIB,
    counted,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("38G", 38 * GIB),
        ("1.5 GiB", int(1.5 * GIB)),
        ("800MB", 800 * MIB),
        ("1024B", 1024),
        ("2k", 2048),
        ("1T", 2**40),
        (" 3g ", 3 * GIB),
    ],
)
def test_sizes_as_people_type_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "0", "0G", "-1G", "1,5G", "38 Gigs", "1e9", "nan"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="38G"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["3", "1.5", " 40 ", "1024"])
def test_a_size_without_a_unit_is_refused_with_a_guess(text: str) -> None:
    with pytest.raises(BadInput, match=rf"has no unit\. Did you mean {text.strip()}GiB\?"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20m", 1200),
        ("1h30m", 5400),
        ("90s", 90),
        ("1h", 3600),
        ("0.5s", 0.5),
        ("1h5s", 3605),
        ("2m 30s", 150),
    ],
)
def test_durations_as_people_type_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "  ", "0", "0m", "-5m", "5x", "m", "soon", "30m1h"])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="20m"):
        parse_seconds(text)


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_reads_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count).replace(" ", "")) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (48, "48 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"), (119.6, "120 s")],
)
def test_formatted_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999.4 * MIB, "999 MiB"), (999.7 * MIB, "1000 MiB"), (1017 * MIB, "1017 MiB")],
)
def test_no_size_is_written_with_an_exponent(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1200, "1,200 probes")]
)
def test_a_number_has_its_noun_in_singular_or_plural(count: int, text: str) -> None:
    assert counted(count, "probe") == text
    assert counted(count, "process", "processes").endswith("process" if count == 1 else "processes")
