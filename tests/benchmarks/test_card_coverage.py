"""Intervals of training seconds with the card of a row held back, from the committed figures."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import combinations
from pathlib import Path

from autotune.catalog import gpus

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROWS = json.loads((RESULTS / "cards.json").read_text())["rows"]
OTHER_ROWS = json.loads((RESULTS / "cards-again.json").read_text())["rows"]

SETTING = ("model", "method", "tuning", "seq_len", "gpus")
DISTINCT = 1.04  # ratio of two times whose order counts
ORDER_BAR = 0.9

SYNCHRONISATIONS = {"low": 12e-6, "high": 40e-6}
"""Seconds of one position, which a card has no part in."""


def test_nine_of_ten_rows_are_inside_without_their_card() -> None:
    inside = [row["low_by_card"] <= row["measured"] <= row["high_by_card"] for row in ROWS]
    assert len(inside) == 23
    assert sum(inside) >= 0.9 * len(inside)


def test_without_rows_of_its_card_an_interval_is_twice_as_wide_at_both_ends() -> None:
    """But for mixtures on B200, whose loops over experts are known from that card alone."""
    compared = 0
    for row in ROWS:
        if row["gpu"] == "B200" and "Qwen3-4B" not in row["model"]:
            continue
        low = SYNCHRONISATIONS["low"] * row["seq_len"]
        high = SYNCHRONISATIONS["high"] * row["seq_len"]
        assert abs((row["low_by_card"] - low) - (row["low"] - low) / 2) < 0.002
        assert abs((row["high_by_card"] - high) - (row["high"] - high) * 2) < 0.002
        compared += 1
    assert compared == 20


def test_cards_are_measured_by_the_seconds_of_their_steps() -> None:
    """Row 015: 9.23 s for two micro-batches, whatever the tokens per second of the run's mean."""
    [row] = [row for row in ROWS if row["id"] == "primerl-015"]
    assert row["measured"] == round(row["step_seconds"] / row["micro_batches"], 3)
    by_tokens = row["seq_len"] / row["tokens_per_second"]
    assert row["measured"] < 0.7 * by_tokens


def test_cards_below_the_bar_of_order_are_marked() -> None:
    """A pair counts for its card with the mark alone: what is left has to meet the bar."""
    marked = {gpu.name for gpu in gpus() if gpu.is_misordered}
    right: dict[str, list[bool]] = defaultdict(list)
    for first, second in combinations([*ROWS, *OTHER_ROWS], 2):
        if first["gpu"] == second["gpu"] or any(first[name] != second[name] for name in SETTING):
            continue
        measured = sorted((first, second), key=lambda row: row["measured"])
        if measured[1]["measured"] < DISTINCT * measured[0]["measured"]:
            continue
        in_order = measured[0]["predicted"] < measured[1]["predicted"]
        for card in {first["gpu"], second["gpu"]} & marked or {"others"}:
            right[card].append(in_order)
    assert sum(map(len, right.values())) == 32
    for card, pairs in right.items():
        assert (sum(pairs) < ORDER_BAR * len(pairs)) == (card in marked)
