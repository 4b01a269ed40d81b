"""Every kind of catalogued model with images, under every sharding: a part of the prediction that
looks for a width at the top of the config fails on the nested ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.10")

from autotune import catalog, frameworks
from autotune.core.errors import CannotPredict
from autotune.core.job import Model, Task, Workload
from autotune.frameworks.trl.settings import SHARDINGS
from autotune.machine.hardware_detection import hardware
from autotune.prediction.service import PredictionService
from autotune.prediction.trace_cache import TraceCache
from autotune.prediction.tracer import Tracer
from autotune.prediction.tracer_pool import TracerPool
from tests.worker.tracing.test_new_models import cut

WITH_IMAGES = [entry for entry in catalog.models() if "vision_config" in entry.config]
FIRST_OF_TYPE = {str(entry.config["model_type"]): entry for entry in reversed(WITH_IMAGES)}
LAYERS = 2
REFUSALS = {
    # accelerate's FSDP looks for layers that these models' encoders do not have, in any order.
    "gemma3": "Could not find the transformer layer class Siglip",
    "gemma4": "Could not find the transformer layer class Gemma4",
    # TRL's load-balancing loss reads a setting that the nested config lacks.
    "llama4": "num_experts",
}
"""Type of model -> words of what the installed releases raise themselves."""


@pytest.fixture(name="tracers", scope="module")
def one_tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracerPool]:
    cache = TraceCache(tmp_path_factory.mktemp("traces"))
    pool = TracerPool(
        lambda versions: Tracer(Path(sys.executable), cache=cache, versions=versions), most=1
    )
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize("model_type", FIRST_OF_TYPE)
def test_a_model_with_images_is_predicted_under_every_sharding(
    model_type: str, tracers: TracerPool
) -> None:
    entry = FIRST_OF_TYPE[model_type]
    model = Model(
        name=entry.ids[0],
        config=cut(entry.config, LAYERS),
        folder=None,
        origin="catalogue",
    )
    workload = Workload(
        model=model,
        python=Path(sys.executable),
        method="sft",
        tuning="full",
    )
    task = Task(workload=workload, hardware=hardware("2xH200"))
    trainer = frameworks.trainer("trl", "sft")
    service = PredictionService(
        task=task,
        trainer=trainer,
        limit_bytes=task.hardware.memory_bytes,
        tracer=tracers,
    )
    for sharding in SHARDINGS:
        candidate = trainer.complete({"max_length": 64, "sharding": sharding}, task)
        try:
            assert service.predict(candidate).peak_memory_bytes.value > 0
        except CannotPredict as refusal:
            assert REFUSALS.get(model_type, "none") in str(refusal), sharding
