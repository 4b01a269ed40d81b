"""Rollouts: reused only between equal generations, with the measured seconds; lengths drawn for
completions, on lists.

`test_grpo_probe.py` generates completions of drawn lengths.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.worker.trl import hooks
from autotune.worker.trl import rollouts as worker_rollouts
from autotune.worker.trl.rollouts import LengthDraws
from autotune.worker.trl.trainer_settings import ForcedLengths
from tests.worker.drive import (
    adapter,
    engine_request,
    events_stage,
    inside,
    load_request,
    measure_request,
    run_apart,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rollouts(**options: Any) -> tuple[Any, Any, Clock]:
    clock = Clock()
    stage, _ = events_stage(clock=clock)
    return inside("trl.rollouts").Rollouts(stage, **options), stage, clock


def turn(
    source: Any,
    stage: Any,
    clock: Clock,
    seconds: float,
    answer: Any = "tokens",
) -> Any:
    def generate() -> Any:
        with stage.inside("rollout"):
            clock.now += seconds
            with stage.inside("sync"):
                clock.now += seconds / 2
        return answer

    return source.turn(generate)


def test_a_rollout_is_cached_with_its_median_seconds() -> None:
    reuse, stage, clock = rollouts()
    assert [turn(reuse, stage, clock, seconds) for seconds in (9.0, 2.0, 4.0, 3.0)] == [
        "tokens"
    ] * 4
    rollout = reuse.cacheable({"rollout": 7, "sync": 5, "forward": 9})
    assert dict(rollout.seconds) == {
        "rollout": 3.0,
        "sync": 1.5,
    }  # the first, which warms up, is left out
    assert dict(rollout.peak_bytes) == {"rollout": 7, "sync": 5}
    assert (reuse.run, reuse.borrowed) == (4, 0)


def test_one_turn_is_too_few_to_know_its_seconds() -> None:
    reuse, stage, clock = rollouts()
    turn(reuse, stage, clock, 1.0)
    assert reuse.cacheable({}) is None


@pytest.mark.parametrize("real_first", [0, 1])
def test_a_reused_rollout_is_counted_and_not_run(real_first: int) -> None:
    source = inside("trl.rollouts").CachedRollout(
        "earlier", {"rollout": 3.0, "sync": 1.5}, {"rollout": 7}
    )
    reuse, stage, clock = rollouts(source=source, real_first=real_first)
    answers = [turn(reuse, stage, clock, 5.0) for _ in range(3)]
    assert answers == ["tokens"] * real_first + ["earlier"] * (3 - real_first)
    assert (reuse.run, reuse.borrowed) == (real_first, 3 - real_first)
    assert reuse.borrowed_seconds == {"rollout": 3.0 * reuse.borrowed, "sync": 1.5 * reuse.borrowed}
    assert reuse.cacheable({}) is None  # never handed on a second time


def test_the_key_ignores_settings_without_effect_on_generation() -> None:
    key_of = inside("trl.rollouts").key_of
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "beta": 0.0,
    }
    same = {
        **settings,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    }
    shape = {
        "rows": 16,
        "prompt": 8,
        "completion": 8,
        "typical": False,
        "seed": 42,
    }
    key = key_of(settings, **shape)
    assert key_of(same, **shape) == key
    changes = [{"rows": 32}, {"prompt": 9}, {"completion": 9}, {"typical": True}, {"seed": 1}]
    assert all(key_of(settings, **{**shape, **change}) != key for change in changes)
    assert key_of({**settings, "temperature": 0.5}, **shape) != key


def test_the_cache_drops_the_oldest() -> None:
    module = inside("trl.rollouts")
    library = module.RolloutCache()
    for number in range(module.MAX_CACHED_ROLLOUTS + 1):
        library.put(str(number), number)
    assert library.get("0") is None
    assert library.get("1") == 1


RUNGS = [(4, 4, True), (8, 2, True), (16, 1, True), (16, 1, False)]


def _rungs(**settings: Any) -> list[dict[str, Any]]:
    plan = {"timed_cycles": 3, "reuse_rollouts": True}
    shapes = [
        {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps,
            "gradient_checkpointing": checkpointing,
        }
        for size, steps, checkpointing in RUNGS
    ]
    return [
        measure_request(
            {**shape, **settings},
            prompt=16,
            completion=16,
            plan=plan,
        )
        for shape in shapes
    ]


def _check(measures: list[dict[str, Any]]) -> None:
    first, *further = [measure["result"] for measure in measures]
    assert (first["exercised"]["generations"], first["exercised"]["borrowed_generations"]) == (4, 0)
    for result in further:
        assert (
            result["exercised"]["generations"],
            result["exercised"]["borrowed_generations"],
        ) == (0, 4)
        assert result["worst"]["borrowed_seconds"] > 0
        assert sum(result["worst"]["phase_seconds"].values()) == pytest.approx(
            sum(result["worst"]["cycle_seconds"]), rel=0.03
        )
        assert result["worst"]["cycle_loss_tokens"] == [16 * 16] * 3
        assert result["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)
        peaks = result["memory"]["phase_peak_bytes"]
        assert peaks["rollout"] >= first["memory"]["phase_peak_bytes"]["rollout"]
        assert result["memory"]["peak_bytes"] >= max(peaks.values())


@pytest.mark.slow
def test_later_candidates_reuse_rollouts_of_the_first(tmp_path: Path) -> None:
    _check(
        run_apart({"load": load_request(tmp_path), "measures": _rungs()}, tmp_path)[0]["measures"]
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM here")
def test_later_candidates_reuse_rollouts_of_the_engine(tmp_path: Path) -> None:
    engine = engine_request(max_num_seqs=16)
    settings = {
        "use_vllm": True,
        **{name: value for name, value in engine.items() if name.startswith("vllm_")},
    }
    document = {
        "load": load_request(tmp_path, engine=engine),
        "measures": _rungs(**settings),
        "limit_bytes": 4 * 2**30,
    }
    measures = run_apart(document, tmp_path)[0]["measures"]
    _check(measures)
    assert measures[0]["result"]["exercised"]["weight_syncs"] >= 4
    assert measures[0]["result"]["exercised"]["sleeps"] is None  # no sleep mode on a CPU


@pytest.mark.slow
def test_candidates_continue_after_out_of_memory(tmp_path: Path) -> None:
    """Candidates from safe to out of memory, then others, in one process."""
    rungs = [
        measure_request(
            {
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": 64 // size,
                "gradient_checkpointing": checkpointing,
            },
            prompt=256,
            completion=4,
            plan={"reuse_rollouts": True},
        )
        for size, checkpointing in ((4, False), (16, False), (64, False), (4, True), (4, False))
    ]
    document = {"load": load_request(tmp_path), "measures": rungs, "growth_bytes": 450 * 2**20}
    measures = run_apart(document, tmp_path)[0]["measures"]
    failed = [at for at, measure in enumerate(measures) if "error" in measure]
    assert failed and failed[-1] <= 2, measures
    assert all("result" in measure for measure in measures[3:])
    assert measures[4]["result"]["gradient_norm"] == measures[0]["result"]["gradient_norm"]
    assert measures[4]["held_after"] - measures[0]["held_after"] < 32 * 2**20


@pytest.mark.slow
def test_a_whole_certificate_is_counted_while_it_happens(tmp_path: Path) -> None:
    trl = adapter()
    request = load_request(tmp_path)
    trl.warm(request)
    loaded = trl.load(request, events_stage()[0])
    plan = {"optimizer_steps": 4, "save_checkpoint": True, "evaluate": True}
    evaluation = {"settings": {"per_device_eval_batch_size": 4, "num_generations_eval": 2}}
    result = trl.measure(
        loaded,
        measure_request(
            prompt=24,
            completion=10,
            plan=plan,
            evaluation=evaluation,
        ),
        events_stage()[0],
    )
    ran = result["exercised"]
    assert (ran["checkpoint_saves"], ran["evaluations"], ran["weight_syncs"], ran["sleeps"]) == (
        1,
        1,
        None,
        None,
    )
    assert (ran["shortest_prompt"], ran["longest_prompt"]) == (24, 24)
    assert (ran["shortest_completion"], ran["longest_completion"]) == (10, 10)
    assert ran["optimizer_steps"] >= 4
    without = trl.measure(loaded, measure_request(plan=plan), events_stage()[0])
    assert without["exercised"]["evaluations"] is None
    assert not list(loaded.scratch.rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_soak_lasts_the_requested_time(tmp_path: Path) -> None:
    trl = adapter()
    request = load_request(tmp_path)
    trl.warm(request)
    loaded = trl.load(request, events_stage()[0])
    result = trl.measure(loaded, measure_request(plan={"soak_seconds": 4.0}), events_stage()[0])
    cycles = result["exercised"]["cycles"]
    assert cycles[-1]["seconds"] >= 4.0 > cycles[-2]["seconds"]
    assert [cycle["steps"] for cycle in cycles] == list(range(1, len(cycles) + 1))
    assert result["optimizer_steps"] == len(cycles)
    assert all(0 < cycle["held_bytes"] <= cycle["peak_bytes"] for cycle in cycles)


SAMPLE = [1, 2, 3, 40]


def test_every_part_of_the_distribution_occurs_in_a_batch() -> None:
    drawn = LengthDraws(SAMPLE, seed=1).take([[n] for n in range(40)])
    assert Counter(drawn) == dict.fromkeys(SAMPLE, 10)
    assert drawn != sorted(drawn)


def test_equal_prompts_get_equal_lengths_and_others_not() -> None:
    prompts = [[n, n] for n in range(40)]
    first_draws, second_draws = (LengthDraws(SAMPLE, seed=1) for _ in range(2))
    first = first_draws.take(prompts)
    second = first_draws.take(prompts)
    assert first == second_draws.take(prompts)
    assert first != second == second_draws.take(prompts)
    assert (
        LengthDraws(SAMPLE, seed=1).take(prompts[::-1])
        != first
        != LengthDraws(SAMPLE, seed=2).take(prompts)
    )


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, True),
        ({"use_vllm": True}, True),
        ({"use_vllm": True, "vllm_mode": "server"}, False),
        ({"use_transformers_paged": True}, False),
    ],
)
def test_a_server_has_one_length_for_all(settings: dict[str, Any], drawn: bool) -> None:
    assert worker_rollouts.can_be_drawn(settings) is drawn


def test_a_group_has_one_prompt_of_one_drawn_length() -> None:
    lengths = ForcedLengths(
        prompt=64,
        completion=8,
        pad_prompts=True,
        drawn_prompts=(4, 9, 70),
    )
    fitted = {n: hooks.fit([n] * 30, lengths) for n in range(40)}
    assert {len(ids) for ids in fitted.values()} == {4, 9, 70}
    assert all(hooks.fit([n] * 30, lengths) == ids for n, ids in fitted.items())
