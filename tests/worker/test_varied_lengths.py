"""Completions of varied lengths: what is generated, and that the worse peak counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import adapter, events_stage, inside, load_request, measure_request

MIB = 2**20
REWARDS = """
import gc

SEEN = []
HELD = []
TRAINERS = []


def lengths(completion_ids, **kwargs):
    SEEN.append([len(ids) for ids in completion_ids])
    return [0.5] * len(completion_ids)


def trainers(completion_ids, **kwargs):
    gc.collect()
    TRAINERS.append(sum(type(held).__name__ == "GRPOTrainer" for held in gc.get_objects()))
    return [0.5] * len(completion_ids)


def filled(completion_ids, **kwargs):
    # Memory is needed where all completions are short, and freed at once.
    if max(map(len, completion_ids)) <= 2:
        HELD.append(bytearray(b"1" * 96 * 2**20))
        HELD.clear()
    return [0.5] * len(completion_ids)
"""


def test_shorter_completions_come_first_and_the_last_are_mixed() -> None:
    lengths = inside("trl.rollouts").VariedLengths(16)
    patterns = [lengths.take("abcd") for _ in range(5)]
    assert patterns == [[2] * 4, [8] * 4, [16] * 4, [16, 2, 8, 16], [2] * 4]
    assert inside("trl.rollouts").VariedLengths(3).take("ab") == [1, 1]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("trl")
    (tmp_path / "varied_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trl = adapter()
    request = load_request(tmp_path)
    trl.warm(request)
    return trl.load(request, events_stage()[0])


def measured(loaded: Any, reward: str, *, varied: bool = True) -> dict[str, Any]:
    stage, _ = events_stage()
    request = measure_request(
        completion=16,
        plan={"varied_lengths": varied},
        reward_funcs=[f"varied_rewards.{reward}"],
    )
    try:
        return adapter().measure(loaded, request, stage)  # type: ignore[no-any-return]
    finally:
        adapter().release(loaded)


@pytest.mark.slow
def test_one_cycle_of_each_pattern_follows_the_longest(loaded: Any) -> None:
    result = measured(loaded, "lengths")
    import varied_rewards  # type: ignore[import-not-found]

    generated = [sorted(lengths) for lengths in varied_rewards.SEEN]
    # On a busy machine up to four cycles more come first, until the speed is steady.
    longest, patterns = generated[:-4], generated[-4:]
    assert 3 <= len(longest) <= 7 and longest == [[16] * 4] * len(longest)
    assert patterns == [[2] * 4, [8] * 4, [16] * 4, [2, 8, 16, 16]]
    assert result["exercised"]["varied_generations"] == 4
    assert result["worst"]["cycle_loss_tokens"] == [4 * 16] * 2
    assert result["optimizer_steps"] == len(longest)
    memory = result["memory"]
    assert memory["peak_bytes"] >= memory["longest_peak_bytes"] > 0

    varied_rewards.SEEN.clear()
    result = measured(loaded, "lengths", varied=False)
    generated = varied_rewards.SEEN
    assert 3 <= len(generated) <= 7 and generated == [[16] * 4] * len(generated)
    assert "varied_generations" not in result["exercised"]


@pytest.mark.slow
def test_a_peak_of_short_completions_counts(loaded: Any) -> None:
    measured(loaded, "lengths")  # the first run on a load grows the heap
    memory = measured(loaded, "filled")["memory"]
    assert memory["peak_bytes"] - memory["longest_peak_bytes"] > 60 * MIB


@pytest.mark.slow
def test_no_other_trainer_is_in_memory_meanwhile(loaded: Any) -> None:
    measured(loaded, "trainers")
    import varied_rewards  # type: ignore[import-not-found]

    assert len(varied_rewards.TRAINERS) >= 7 and set(varied_rewards.TRAINERS) == {1}
