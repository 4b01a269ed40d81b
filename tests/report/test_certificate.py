"""Certificate items from the probe's counters, with the reason for each missing one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.answer import Trial
from autotune.core.measurement import DeviceMemory, LoopActivity, ModelMemory
from autotune.core.units import MIB
from autotune.report.certificate import (
    certificate_lines,
    certificate_row,
    describe_models,
    items_of,
)
from tests.report.answers import answered

CASE = answered(900)

WHOLE = LoopActivity(
    optimizer_steps=6,
    generations=6,
    weight_syncs=5,
    sleeps=6,
    wakes=6,
    checkpoint_saves=1,
    evaluations=1,
    shortest_prompt=64,
    longest_prompt=64,
    shortest_completion=256,
    longest_completion=256,
    seconds=9.0,
)


def proof(ran: LoopActivity | None, **memory: Any) -> Trial:
    certificate = CASE.answer.certificate
    assert certificate is not None
    settings = {
        **certificate.candidate.settings,
        "max_prompt_length": 64,
        "max_completion_length": 256,
    }
    measured = replace(
        certificate.measurement,
        exercised=ran,
        memory=replace(certificate.measurement.memory, **memory),
    )
    return replace(
        certificate,
        candidate=replace(certificate.candidate, settings=settings),
        measurement=measured,
    )


def states(ran: LoopActivity | None) -> dict[str, str]:
    return {item["name"]: item["state"] for item in items_of(CASE.job, proof(ran))}


def test_everything_that_happened_is_done() -> None:
    assert set(states(WHOLE).values()) == {"done"}
    for item in items_of(CASE.job, proof(WHOLE)):
        assert item["state"] != "not done"


def test_what_the_run_has_not_is_not_applicable() -> None:
    state_by_name = states(
        replace(
            WHOLE,
            weight_syncs=None,
            sleeps=None,
            wakes=None,
            evaluations=None,
        )
    )
    assert in_state("not applicable", state_by_name) == [
        "evaluation",
        "sleep and wake",
        "weight sync",
    ]
    assert "not done" not in state_by_name.values()


def in_state(state: str, state_by_name: dict[str, str]) -> list[str]:
    return sorted(name for name in state_by_name if state_by_name[name] == state)


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"optimizer_steps": 2}, "optimizer steps"),
        ({"borrowed_generations": 1}, "rollouts"),
        ({"generations": 1}, "rollouts"),
        ({"weight_syncs": 0}, "weight sync"),
        ({"wakes": 0}, "sleep and wake"),
        ({"checkpoint_saves": 0}, "checkpoint save"),
        ({"evaluations": 0}, "evaluation"),
        ({"shortest_completion": 255}, "longest lengths"),
        ({"shortest_prompt": 3}, "longest lengths"),
    ],
)
def test_what_did_not_happen_is_never_assumed(change: dict[str, int], item: str) -> None:
    ran = replace(WHOLE, **change)
    assert in_state("not done", states(ran)) == [item]
    assert certificate_lines(CASE.job, proof(ran))[0].startswith("Certified in part")


@pytest.mark.parametrize(
    ("effective", "state", "says"),
    [
        ({}, "not applicable", "does not report its settings"),
        ({"max_prompt_length": 64, "beta": 0}, "done", "none of them changed"),
        (
            {"max_prompt_length": 64.0, "optim": "ADAMW_torch", "dtype": "torch.bfloat16"},
            "done",
            "3 of ",
        ),
        (
            {"max_prompt_length": 64, "max_completion_length": 128},
            "not done",
            "max_completion_length=128 instead of 256",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "done", "1 of "),
        ({"bf16": False}, "not done", "bf16=False instead of True"),
    ],
)
def test_a_setting_that_a_launched_framework_took_otherwise_is_named(
    effective: dict[str, Any],
    state: str,
    says: str,
) -> None:
    trial = proof(LoopActivity(watched="outside", optimizer_steps=4))
    settings = {
        **trial.candidate.settings,
        "optim": "adamw_torch",
        "deepspeed": "zero3",
        "bf16": True,
        "beta": 0.0,
        "dtype": "bfloat16",
    }
    trial = replace(
        trial,
        candidate=replace(trial.candidate, settings=settings),
        measurement=replace(trial.measurement, effective=effective),
    )
    item = next(item for item in items_of(CASE.job, trial) if item["name"] == "settings as asked")
    assert item["state"] == state and says in item["says"]
    row = certificate_row(CASE.job, trial)
    assert row is not None and row["complete"] is (state != "not done" and trial.verdict.fits)


def test_a_probe_without_counters_certifies_nothing() -> None:
    assert set(states(None).values()) == {"not done"}


def test_model_tensors_are_described_for_the_fullest_rank_and_recorded_for_all() -> None:
    models = (
        ModelMemory(rank=0, bytes={"weights": 100 * MIB, "optimizer": 300 * MIB}),
        ModelMemory(
            rank=1,
            bytes={"weights": 100 * MIB, "optimizer": 300 * MIB, "reference_weights": 200 * MIB},
        ),
    )
    trial = proof(WHOLE, models=models)
    description = describe_models(trial.measurement)
    assert (
        description is not None
        and "rank 1" in description
        and description.index("optimizer 300 MiB") < description.index("reference weights 200 MiB")
    )
    row = certificate_row(CASE.job, trial)
    assert row is not None and [row_of_rank["rank"] for row_of_rank in row["models"]] == [0, 1]
    assert row["models"][1]["bytes"]["reference_weights"] == 200 * MIB
    assert describe_models(proof(WHOLE, models=()).measurement) is None


def test_the_worst_device_is_named() -> None:
    first = DeviceMemory(
        index=0,
        uuid=None,
        name="H200",
        peak_bytes=700 * MIB,
        measured_by="nvml-processes",
    )
    second = replace(first, index=1, peak_bytes=800 * MIB)
    row = certificate_row(CASE.job, proof(WHOLE, devices=(first, second), peak_bytes=800 * MIB))
    assert row is not None
    json.dumps(row)
    assert row["peak_by"] == "nvml-processes on device 1, the worst of 2"
    assert [device["peak_bytes"] for device in row["devices"]] == [700 * MIB, 800 * MIB]
    assert row["margin_bytes"] == proof(WHOLE).verdict.margin_bytes
    assert certificate_row(CASE.job, None) is None
    assert certificate_lines(CASE.job, None)[0].startswith("Not certified")
