"""Estimates of unmeasured candidates, and their correction by measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.core.answer import Trial
from autotune.core.measurement import DeviceMemory, Failure, Outcome, Phase, judge
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.search.loop import SHORT_PROBE, legal_candidates
from autotune.search.surrogate.candidate_table import CandidateTable
from autotune.search.surrogate.estimates import SearchOptions, SurrogateModel
from autotune.search.surrogate.memory_model import MemoryModel, minimum_need
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

SPACE = toy_space()
CANDIDATES = legal_candidates(toy_job(Path("/nowhere"), SPACE, 1), ToyTrainer())
TABLE = CandidateTable(SPACE, CANDIDATES)
MACHINE = Machine(limit_bytes=700 * MIB)


def surrogate(
    predictions: Mapping[str, Prediction],
    options: SearchOptions = SearchOptions(),  # noqa: B008
) -> SurrogateModel:
    return SurrogateModel(TABLE, predictions, limit_bytes=MACHINE.limit_bytes, options=options)


def foreseen(bias: float, off: float = 0.2) -> Mapping[str, Prediction]:
    return Oracle(
        machine=MACHINE,
        bias=bias,
        off=off,
    ).screen(CANDIDATES)


def measured(candidates: Sequence[Candidate]) -> list[Trial]:
    trials = []
    for candidate in candidates:
        measurement = MACHINE.measure(candidate, SHORT_PROBE)
        trials.append(
            Trial(
                number=0,
                purpose="search",
                candidate=candidate,
                measurement=measurement,
                verdict=judge(measurement),
            )
        )
    return trials


FITTING = [candidate for candidate in CANDIDATES if MACHINE.need(candidate) <= MACHINE.limit_bytes]
NEEDS = np.log([MACHINE.need(candidate) / MACHINE.limit_bytes for candidate in CANDIDATES])
"""True memory of each candidate, over the limit."""


def test_without_a_measurement_the_estimate_is_the_prediction() -> None:
    believed = surrogate(foreseen(1.0)).estimate([])
    assert np.allclose(believed.need.mean, NEEDS, atol=1e-6)
    speeds = np.log(list(map(MACHINE.speed, CANDIDATES)))
    assert np.allclose(believed.speed.mean, speeds)


@pytest.mark.parametrize("bias", [0.85, 1.15])
def test_a_common_bias_is_seen_after_a_few_probes_and_doubt_shrinks(bias: float) -> None:
    before = surrogate(foreseen(bias)).estimate([])
    after = surrogate(foreseen(bias)).estimate(measured(FITTING[::9][:6]))
    error_before = np.abs(before.need.mean - NEEDS).mean()
    error_after = np.abs(after.need.mean - NEEDS).mean()
    assert error_after < 0.3 * error_before
    assert after.need.deviation.mean() < 0.7 * before.need.deviation.mean()


def test_the_screen_refuses_only_what_lies_beyond_the_interval_and_takes_it_back() -> None:
    predictions = foreseen(1.2, off=0.1)  # everything is predicted to need a fifth too much
    before = surrogate(predictions).estimate([])
    wrongly = []
    for p, candidate in enumerate(CANDIDATES):
        if before.refused[p] and MACHINE.need(candidate) <= MACHINE.limit_bytes:
            wrongly.append(p)
    assert wrongly, "the case must hold false refusals"
    allowed = []
    for p in range(0, len(CANDIDATES), 7):
        if not before.refused[p]:
            allowed.append(CANDIDATES[p])
    after = surrogate(predictions).estimate(measured(allowed[:8]))
    assert after.refused[wrongly].sum() < len(wrongly) / 2
    for index, candidate in enumerate(CANDIDATES):
        assert not (
            before.refused[index]
            and predictions[candidate.id].peak_memory_bytes.low <= MACHINE.limit_bytes
        )


def test_parts_can_be_left_out() -> None:
    predictions = foreseen(1.2, off=0.1)
    trials = measured(FITTING[:5])
    assert not surrogate(predictions, SearchOptions(screen=False)).estimate(trials).refused.any()
    fixed = surrogate(predictions, SearchOptions(calibrate=False))
    assert np.allclose(
        fixed.estimate(trials).need.mean, surrogate(predictions).estimate([]).need.mean
    )


def test_without_predictions_an_unmeasured_neighbour_is_estimated_like_the_measured() -> None:
    trials = measured([candidate for candidate in FITTING if not candidate.knobs["use_vllm"]][:8])
    believed = surrogate({}).estimate(trials)
    for trial in trials:
        index = TABLE.row_by_id[trial.candidate.id]
        assert trial.measurement.worst is not None
        assert believed.speed.mean[index] == pytest.approx(
            math.log(trial.measurement.worst.tokens_per_second), abs=0.1
        )
    assert not believed.refused.any(), "nothing is refused without a prediction"


def test_the_number_in_an_error_is_a_measurement() -> None:
    out = next(
        candidate for candidate in CANDIDATES if MACHINE.need(candidate) > MACHINE.limit_bytes
    )
    trial = measured([out])[0]
    failure = Failure(
        evidence="tried to allocate",
        cause="activations",
        numbers={"asked_bytes": 300 * MIB},
    )
    completed = replace(trial, measurement=replace(trial.measurement, failure=failure))
    assert minimum_need(completed.measurement) == 1000 * MIB
    index = TABLE.row_by_id[out.id]
    options = SearchOptions(imply=False)

    def need(measured: Trial) -> float:
        return float(surrogate({}, options).estimate([measured]).need.mean[index])

    assert need(completed) > need(trial) > 0


def test_an_engine_without_room_implies_nothing_about_the_trainer() -> None:
    trial = measured([CANDIDATES[0]])[0]
    failure = Failure(
        evidence="no room",
        phase="load",
        cause="kv_cache",
        row="vllm_kv_too_small",
    )
    starved = replace(
        trial,
        measurement=replace(
            trial.measurement,
            outcome=Outcome.OOM_LOAD,
            failure=failure,
            worst=None,
        ),
    )
    assert np.allclose(
        surrogate({}).estimate([starved]).need.mean, surrogate({}).estimate([]).need.mean
    )


def test_a_servers_card_changes_no_estimate_of_the_trainers() -> None:
    """A server fills its card whatever the trainer needs; the prediction is of the first device
    alone.
    """
    table = CandidateTable(SPACE, CANDIDATES)
    limit = MACHINE.limit_bytes
    half = Estimate(
        value=0.5 * limit,
        low=0.45 * limit,
        high=0.55 * limit,
    )
    phases = (
        PhasePrediction(
            name="backward",
            peak_bytes=half,
            seconds=None,
        ),
    )
    predictions = []
    for candidate in CANDIDATES:
        predictions.append(
            replace(
                foreseen(1.0)[candidate.id],
                peak_memory_bytes=half,
                phases=phases,
                training_devices=1,
            )
        )
    trial = measured([CANDIDATES[0]])[0]
    trainer, server = (
        DeviceMemory(
            index=index,
            uuid=None,
            name=None,
            measured_by="nvml-processes",
            peak_bytes=peak,
            phase_peak_bytes={"backward": peak},
        )
        for index, peak in enumerate((limit // 2, round(0.97 * limit)))
    )
    memory = replace(
        trial.measurement.memory,
        peak_bytes=server.peak_bytes,
        phase_peak_bytes=server.phase_peak_bytes,
        devices=(trainer, server),
    )
    measured_trial = replace(trial, measurement=replace(trial.measurement, memory=memory))
    need, _, _ = MemoryModel(table, predictions, limit).posterior(
        [measured_trial], np.zeros(0, dtype=np.int64)
    )
    assert np.exp(need.mean) == pytest.approx(np.full(len(CANDIDATES), 0.5), abs=0.02)
    assert memory.on_first(None) is memory
    assert memory.on_first(3) is memory


def test_an_engines_memory_error_is_the_same_for_every_batch() -> None:
    """Predictions of the rollout are moved by the engine's share alone, those of training by the
    batch alone.
    """
    engines = [candidate for candidate in CANDIDATES if candidate.knobs["use_vllm"]]
    table = CandidateTable(SPACE, engines)

    def peak(part: float) -> Estimate:
        return Estimate(
            value=part * MACHINE.limit_bytes,
            low=0.85 * part * MACHINE.limit_bytes,
            high=1.15 * part * MACHINE.limit_bytes,
        )

    def completed(candidate: Candidate) -> Prediction:
        rollout, training = (
            peak(float(candidate.knobs["share"]) * 4),
            peak(0.1 + 0.08 * float(candidate.knobs["batch"])),
        )  # type: ignore[arg-type]
        phases = (
            PhasePrediction(
                name="rollout",
                peak_bytes=rollout,
                seconds=None,
            ),
            PhasePrediction(
                name="backward",
                peak_bytes=training,
                seconds=None,
            ),
        )
        return replace(
            foreseen(1.0)[candidate.id],
            peak_memory_bytes=max(rollout, training, key=lambda estimate: estimate.value),
            phases=phases,
        )

    appetite = MemoryModel(table, list(map(completed, engines)), MACHINE.limit_bytes)
    first = next(
        candidate
        for candidate in engines
        if candidate.knobs["share"] == 0.2 and candidate.knobs["batch"] == 1
    )
    trial = measured([first])[0]
    peaks: Mapping[Phase, int] = {
        "rollout": round(0.95 * MACHINE.limit_bytes),
        "backward": round(0.18 * MACHINE.limit_bytes),
    }
    memory = replace(trial.measurement.memory, peak_bytes=peaks["rollout"], phase_peak_bytes=peaks)
    measured_trial = replace(trial, measurement=replace(trial.measurement, memory=memory))
    need, fits, _ = appetite.posterior([measured_trial], np.zeros(0, dtype=np.int64))
    knobs = [candidate.knobs for candidate in engines]
    large = knobs.index({**first.knobs, "batch": 8})
    assert math.exp(need.mean[large]) == pytest.approx(0.95, abs=0.02), "0.8 was predicted"
    assert fits[large] > 0.9
