"""Screening of the real frameworks' steps, compared with a trace of each drawn point."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import frameworks
from autotune.core.errors import CannotPredict
from autotune.core.job import Model, Task, Workload
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate
from autotune.core.units import MIB
from autotune.estimate.screening import Family, point_of, traced_request
from autotune.estimate.screening.step_model import phase_peaks, sizes_at
from autotune.machine.hardware_detection import hardware
from autotune.prediction.service import PredictionService, predict_candidates
from autotune.prediction.trace_cache import TraceCache
from autotune.prediction.tracer import Tracer
from autotune.prediction.tracer_pool import TracerPool

CONFIG: dict[str, object] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
WITHIN = 0.002
"""Largest underestimate of a phase's peak, relative to the highest peak."""

ABOVE = 0.01
"""Largest overestimate: a chunked loss may be taken for fuller than it is between the traced
points."""


@pytest.fixture(name="tracer", scope="module")
def one_tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracerPool]:
    cache = TraceCache(tmp_path_factory.mktemp("traces"))
    tracers = TracerPool(
        lambda versions: Tracer(Path(sys.executable), cache=cache, versions=versions), most=1
    )
    yield tracers
    tracers.close()


def task_of(
    method: str = "grpo", gpus: str = "A100-40G", tuning: str = "lora", **config: object
) -> Task:
    model = Model(
        name="synthetic/model",
        config={**CONFIG, **config},
        folder=None,
        origin="catalogue",
    )
    workload = Workload(
        model=model,
        python=Path(sys.executable),
        method=method,
        tuning=tuning,
    )  # type: ignore[arg-type]
    return Task(workload=workload, hardware=hardware(gpus))


def service_of(task: Task, tracer: TracerPool) -> PredictionService:
    trainer = frameworks.trainer("trl", task.workload.method)
    return PredictionService(
        task=task,
        trainer=trainer,
        limit_bytes=task.hardware.memory_bytes,
        tracer=tracer,
    )


def family_of(service: PredictionService, candidate: Candidate) -> Family:
    (key,) = service._families.by_key([candidate])
    return service._surveys.families[key]


def synthetic_prediction(size: float) -> Prediction:
    size_bytes = Estimate.exactly(size)
    return Prediction(
        candidate_id=str(size),
        basis="traced",
        fits=False,
        limit_bytes=40,
        peak_memory_bytes=size_bytes,
        torch_peak_allocated_bytes=size_bytes,
        torch_peak_reserved_bytes=size_bytes,
    )


def space(task: Task, **settings: Any) -> list[Candidate]:
    trainer = frameworks.trainer("trl", task.workload.method)
    axes: dict[str, list[Any]] = {
        "per_device_train_batch_size": [1, 2, 4, 16],
        "gradient_accumulation_steps": [4, 6],
    }
    if task.workload.method == "grpo":
        axes["max_prompt_length"] = [64, 200]
        axes["max_completion_length"] = [64, 120, 500]
        axes["num_generations"] = [2]
    else:
        axes["max_length"] = [128, 300, 1000]
    candidates = []
    for values in itertools.product(*axes.values()):
        knobs = dict(zip(axes, values, strict=True))
        candidates.append(trainer.complete({**knobs, **settings}, task))
    return candidates


def ids_of(candidates: list[Candidate]) -> set[str]:
    return {candidate.id for candidate in candidates}


def compare_requested(
    tracer: TracerPool,
    family: Family,
    request: Any,
    subject: str,
) -> None:
    """Compare the requested bytes of each phase, by the family's model and by a trace of this
    step.
    """
    traced = phase_peaks(tracer.trace(request))
    sizes = sizes_at(family.model, point_of(request))
    predicted = phase_peaks(family.model.trace, sizes)
    assert predicted.keys() == traced.keys()
    highest = max(traced.values())
    for phase in traced:
        error = (predicted[phase] - traced[phase]) / highest
        assert -WITHIN <= error <= ABOVE, subject


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize(
    ("configuration", "knobs"),
    [
        ({"tuning": "lora"}, {"gradient_checkpointing": True}),
        ({"tuning": "full"}, {"gradient_checkpointing": False}),
        ({"tuning": "full", "vocab_size": 120_000}, {"gradient_checkpointing": True, "beta": 0.1}),
        pytest.param(
            {"tuning": "full", "method": "sft"},
            {"gradient_checkpointing": True},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_screened_peaks_equal_those_of_each_trace(
    tracer: TracerPool,
    configuration: dict[str, Any],
    knobs: dict[str, Any],
) -> None:
    task = task_of(**configuration)
    service = service_of(task, tracer)
    candidates = space(task, **knobs)
    screened = service.screen(candidates)
    assert set(screened) == ids_of(candidates)
    for prediction in screened.values():
        assert "experts" not in " ".join(prediction.assumptions), "a dense model"
    trainer = frameworks.trainer("trl", task.workload.method)
    seed = random.randrange(10**6)
    for candidate in random.Random(seed).sample(candidates, 2):
        compare_requested(
            tracer,
            family_of(service, candidate),
            trainer.trace_request(candidate, task),
            f"seed {seed}: {dict(candidate.knobs)}",
        )
        direct = service.predict(candidate)
        allocated = screened[candidate.id].torch_peak_allocated_bytes.value
        # In a small model the blocks that torch does not split, up to 1 MiB too large each, are
        # percents of the total.
        assert allocated == pytest.approx(
            direct.torch_peak_allocated_bytes.value, rel=0.005, abs=4 * MIB
        ), f"seed {seed}"
        if direct.tokens_per_second is not None:
            speed = screened[candidate.id].tokens_per_second
            assert speed is not None and speed.value == pytest.approx(
                direct.tokens_per_second.value, rel=0.05
            )


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize("gpus", ["A100-40G", "2xA100-40G"])
def test_a_family_reuses_the_formulas_of_another(tracer: TracerPool, gpus: str) -> None:
    task = task_of(gpus=gpus)
    service = service_of(task, tracer)
    reference = space(task, gradient_checkpointing=True)
    variants = space(task, gradient_checkpointing=False)
    service.screen(reference)
    before = tracer.traced
    screened = service.screen([*reference, *variants])
    assert service.families == 4, "of single rows, and of several"
    assert tracer.traced - before <= 8, "two points, one more group of layers, and the check"
    trainer = frameworks.trainer("trl", task.workload.method)
    seed = random.randrange(10**6)
    for candidate in random.Random(seed).sample(variants, 2):
        compare_requested(
            tracer,
            family_of(service, candidate),
            trainer.trace_request(candidate, task),
            f"seed {seed}: {dict(candidate.knobs)}",
        )
        direct, estimated = service.predict(candidate), screened[candidate.id]
        # Blocks that torch does not split are counted as in the reference, which has half as many
        # of them.
        assert estimated.torch_peak_allocated_bytes.value == pytest.approx(
            direct.torch_peak_allocated_bytes.value, rel=0.005, abs=8 * MIB
        ), f"seed {seed}: {dict(candidate.knobs)}"
        assert direct.tokens_per_second is not None and estimated.tokens_per_second is not None
        assert estimated.tokens_per_second.value == pytest.approx(
            direct.tokens_per_second.value, rel=0.05
        ), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_a_time_limit_omits_the_families_not_reached(tracer: TracerPool) -> None:
    task = task_of()
    candidates = space(task, gradient_checkpointing=True)
    candidates += space(task, gradient_checkpointing=False)
    some = service_of(task, tracer).screen(candidates, seconds=0)
    every = service_of(task, tracer).screen(candidates)
    assert 0 < len(some) < len(every) == len(candidates)
    for name, prediction in some.items():
        assert every[name].fits == prediction.fits


def test_nothing_is_predicted_on_a_cpu() -> None:
    task = task_of(gpus="2xcpu")
    job: Any = SimpleNamespace(task=task)
    assert predict_candidates(job, frameworks.trainer("trl", "grpo"), space(task)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_a_screened_family_is_not_traced_again(tracer: TracerPool) -> None:
    service = service_of(task_of(), tracer)
    candidates = space(task_of(), gradient_checkpointing=True)
    service.screen(candidates)
    before = tracer.traced
    assert service.screen(candidates[3:9]).keys() == ids_of(candidates[3:9])
    assert tracer.traced == before


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_an_untraceable_model_is_refused_by_name(tracer: TracerPool) -> None:
    task = task_of(model_type="no_such_architecture")
    with pytest.raises(CannotPredict, match="no_such_architecture"):
        service_of(task, tracer).predict(space(task)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_zero_stages_share_a_trace_while_modules_keep_their_weights(tracer: TracerPool) -> None:
    task = task_of(gpus="2xA100-40G")
    trainer = frameworks.trainer("trl", "grpo")
    plain = {"max_prompt_length": 64, "max_completion_length": 64, "num_generations": 2}
    stages: list[dict[str, object]] = [
        {"sharding": "zero1"},
        {"sharding": "zero2", "offload_optimizer_device": "cpu"},
        {"sharding": "zero3", "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    ]
    requests, shardings, traces = [], set(), []
    for stage in stages:
        candidate = trainer.complete({**plain, **stage}, task)
        request = trainer.trace_request(candidate, task)
        requests.append(traced_request(request))
        shardings.add(str(request["sharding"]))
        traces.append(replace(tracer.trace(request), seconds=0.0))  # without its duration
    assert len(shardings) == len(stages)
    assert requests[0] == requests[1] != requests[2]
    first, second, third = traces
    assert first == second
    assert (
        third.events != first.events
    )  # under ZeRO-3 a linear layer saves its input, with frozen weights too
    copies = trainer.trace_request(trainer.complete({**plain, "sharding": "ddp"}, task), task)
    assert traced_request(copies) == copies
