"""The real frameworks' steps at drawn points of a space: what follows from a few short traces, against each traced by itself."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import trainers
from autotune.candidate import Candidate
from autotune.detect import hardware
from autotune.errors import CannotPredict
from autotune.foresight import Foresight, ruled_out
from autotune.predict.pieces import phase_peaks, requests
from autotune.predict.pieces.family import Family
from autotune.prediction import Estimate, Prediction
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.trainers.base import Job
from autotune.units import MIB
from autotune.workload import Model, Workload

CONFIG: dict[str, object] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
WITHIN = 0.002
"""How far a phase may be foreseen too low, of the highest."""

ABOVE = 0.01
"""And how far too high: a loss that works in chunks may be taken for fuller than it is between the traced points."""


@pytest.fixture(name="tracer", scope="module")
def one_tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracer]:
    with Tracer(Path(sys.executable), cache=TraceCache(tmp_path_factory.mktemp("traces"))) as tracer:
        yield tracer


def job_of(method: str = "grpo", gpus: str = "A100-40G", tuning: str = "lora", **config: object) -> Job:
    model = Model(name="made/up", config={**CONFIG, **config}, folder=None, origin="catalogue")
    workload = Workload(model=model, python=Path(sys.executable), method=method, tuning=tuning)  # type: ignore[arg-type]
    return Job(workload=workload, hardware=hardware(gpus))


def foresight_of(job: Job, tracer: Tracer) -> Foresight:
    trainer = trainers.trainer("trl", job.workload.method)
    return Foresight(job=job, trainer=trainer, limit_bytes=job.hardware.memory_bytes, tracer=tracer)


def family_of(foresight: Foresight, candidate: Candidate) -> Family:
    (key,) = foresight._families_of([candidate])
    return foresight._families[key]


def made_up_prediction(size: float) -> Prediction:
    size_bytes = Estimate.exactly(size)
    return Prediction(
        candidate_id=str(size), basis="traced", fits=False, limit_bytes=40, peak_memory_bytes=size_bytes,
        torch_peak_allocated_bytes=size_bytes, torch_peak_reserved_bytes=size_bytes,
    )  # fmt: skip


def space(job: Job, **held: Any) -> list[Candidate]:
    trainer = trainers.trainer("trl", job.workload.method)
    lengths: dict[str, list[Any]] = (
        {"max_prompt_length": [64, 200], "max_completion_length": [64, 120, 500], "num_generations": [2]}
        if job.workload.method == "grpo"
        else {"max_length": [128, 300, 1000]}
    )
    axes = {"per_device_train_batch_size": [1, 2, 4, 16], "gradient_accumulation_steps": [4, 6], **lengths}
    knobs = [{**dict(zip(axes, values, strict=True)), **held} for values in itertools.product(*axes.values())]
    return [trainer.complete(one, job) for one in knobs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "knobs"),
    [
        ({"tuning": "lora"}, {"gradient_checkpointing": True}),
        ({"tuning": "full"}, {"gradient_checkpointing": False}),
        ({"tuning": "full", "vocab_size": 120_000}, {"gradient_checkpointing": True, "beta": 0.1}),
        ({"tuning": "full", "method": "sft"}, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_screening_requests_what_each_trace_requests(tracer: Tracer, what: dict[str, Any], knobs: dict[str, Any]) -> None:
    job = job_of(**what)
    foresight = foresight_of(job, tracer)
    candidates = space(job, **knobs)
    screened = foresight.screen(candidates)
    assert set(screened) == {one.id for one in candidates}
    (family,) = foresight._families.values()
    trainer = trainers.trainer("trl", job.workload.method)
    seed = random.randrange(10**6)
    for one in random.Random(seed).sample(candidates, 2):
        request = trainer.trace_request(one, job)
        traced = phase_peaks(tracer.trace(request))
        foreseen = family.requested(requests.point_of(request))
        assert foreseen.keys() == traced.keys()
        errors = [(foreseen[phase] - traced[phase]) / max(traced.values()) for phase in traced]
        assert min(errors) >= -WITHIN and max(errors) <= ABOVE, f"seed {seed}: {dict(one.knobs)}"
        direct = foresight.predict(one)
        allocated = screened[one.id].torch_peak_allocated_bytes.value
        # In so small a model the blocks that torch leaves whole, up to a MiB too large each, are percents of everything.
        assert allocated == pytest.approx(direct.torch_peak_allocated_bytes.value, rel=0.005, abs=4 * MIB), f"seed {seed}"
        if direct.tokens_per_second is not None:
            speed = screened[one.id].tokens_per_second
            assert speed is not None and speed.value == pytest.approx(direct.tokens_per_second.value, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["A100-40G", "2xA100-40G"])
def test_one_family_lends_another_what_it_knows(tracer: Tracer, gpus: str) -> None:
    job = job_of(gpus=gpus)
    foresight = foresight_of(job, tracer)
    lender, borrower = (space(job, gradient_checkpointing=on) for on in (True, False))
    foresight.screen(lender)
    before = tracer.traced
    screened = foresight.screen([*lender, *borrower])
    assert foresight.families == 2
    assert tracer.traced - before <= 4, "two points, one more group of layers, and the check"
    trainer = trainers.trainer("trl", job.workload.method)
    seed = random.randrange(10**6)
    for one in random.Random(seed).sample(borrower, 2):
        request = trainer.trace_request(one, job)
        traced, foreseen = phase_peaks(tracer.trace(request)), family_of(foresight, one).requested(requests.point_of(request))
        assert foreseen.keys() == traced.keys()
        errors = [(foreseen[phase] - traced[phase]) / max(traced.values()) for phase in traced]
        assert min(errors) >= -WITHIN and max(errors) <= ABOVE, f"seed {seed}: {dict(one.knobs)}"
        direct, seen = foresight.predict(one), screened[one.id]
        # Blocks that torch leaves whole are counted as in the lender, which keeps half as many of them.
        assert seen.torch_peak_allocated_bytes.value == pytest.approx(
            direct.torch_peak_allocated_bytes.value, rel=0.005, abs=8 * MIB
        ), f"seed {seed}: {dict(one.knobs)}"
        assert direct.tokens_per_second is not None and seen.tokens_per_second is not None
        assert seen.tokens_per_second.value == pytest.approx(direct.tokens_per_second.value, rel=0.05), f"seed {seed}"


@pytest.mark.slow
def test_seconds_that_end_leave_out_what_was_not_reached(tracer: Tracer) -> None:
    job = job_of()
    several = [one for on in (True, False) for one in space(job, gradient_checkpointing=on)]
    some, every = foresight_of(job, tracer).screen(several, seconds=0), foresight_of(job, tracer).screen(several)
    assert 0 < len(some) < len(every) == len(several)
    assert all(every[name].fits == one.fits for name, one in some.items())


def test_on_a_cpu_nothing_is_foreseen(tracer: Tracer) -> None:
    job = job_of(gpus="2xcpu")
    foresight = foresight_of(job, tracer)
    assert foresight.predict_all(space(job)) == {}


def test_some_candidate_always_stays_to_be_measured() -> None:
    small, large = (made_up_prediction(size) for size in (50, 60))
    assert ruled_out({"small": small, "large": large}).keys() == {"large"}
    fitting = replace(small, fits=True)
    assert ruled_out({"small": fitting, "large": large}).keys() == {"large"}


@pytest.mark.slow
def test_what_was_screened_is_not_traced_again(tracer: Tracer) -> None:
    foresight = foresight_of(job_of(), tracer)
    candidates = space(job_of(), gradient_checkpointing=True)
    foresight.screen(candidates)
    before = tracer.traced
    assert foresight.screen(candidates[3:9]).keys() == {one.id for one in candidates[3:9]}
    assert tracer.traced == before


@pytest.mark.slow
def test_a_model_that_cannot_be_followed_is_said_to_be_such(tracer: Tracer) -> None:
    job = job_of(model_type="no_such_architecture")
    with pytest.raises(CannotPredict, match="no_such_architecture"):
        foresight_of(job, tracer).predict(space(job)[0])


@pytest.mark.slow
def test_zeros_stages_follow_the_same_step_while_modules_keep_their_weights(tracer: Tracer) -> None:
    job = job_of(gpus="2xA100-40G")
    trainer = trainers.trainer("trl", "grpo")
    plain = {"max_prompt_length": 64, "max_completion_length": 64, "num_generations": 2}
    stages: list[dict[str, object]] = [
        {"sharding": "zero1"},
        {"sharding": "zero2", "offload_optimizer_device": "cpu"},
        {"sharding": "zero3", "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    ]
    asked = [trainer.trace_request(trainer.complete({**plain, **stage}, job), job) for stage in stages]
    assert len({str(request["sharding"]) for request in asked}) == len(stages)
    followed = [requests.followed(request) for request in asked]
    assert followed[0] == followed[1] != followed[2]
    first, second, third = [replace(tracer.trace(request), seconds=0.0) for request in asked]  # but for how long following took
    assert first == second
    assert third.events != first.events  # under ZeRO-3 a linear layer keeps its input beside frozen weights, too
    copies = trainer.trace_request(trainer.complete({**plain, "sharding": "ddp"}, job), job)
    assert requests.followed(copies) == copies
