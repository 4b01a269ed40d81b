"""The engine's share under a memory limit on emulated cards: what the worker passes on to vLLM is,
of the memory that CUDA reports there, what is predicted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import catalog
from autotune.core.units import GIB
from autotune.estimate.engine_use import shared_bytes
from tests.emulator.on_cards import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = str(Path(__file__).parents[2])
SHARE = 0.5

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from autotune.machine.hardware_detection import hardware
from autotune.probe.gpu_set import Gpus
from autotune.worker.phase_recorder import PhaseRecorder
from autotune.worker.trl.vllm_engines import Engines

limit_bytes = {limit_bytes} or hardware("local").memory_bytes
gpus = Gpus(1, limit_bytes, Path(sys.executable), patience_seconds=0.3)
gpus.settle()
recorder = PhaseRecorder(emit=lambda event: None, device=gpus.for_ranks()[0])
engines = Engines(recorder, cpu=False, random_weights=True)
built = []
engines._real = lambda **arguments: built.append(arguments)
engines.get({{"model": "m", "gpu_memory_utilization": {share}}})
free, total = torch.cuda.mem_get_info()
gpus.close()
print(json.dumps({{"free": free, "total": total, "share": built[0]["gpu_memory_utilization"]}}))
"""


@pytest.mark.parametrize("limit_gib", [16, 24, 40, None])
@pytest.mark.parametrize("card", ["A100-40G", "A100-80G"])
def test_the_engine_of_a_probe_has_the_predicted_bytes(
    python: str,
    card: str,
    limit_gib: int | None,
) -> None:
    limit_bytes = None if limit_gib is None else limit_gib * GIB
    program = PROGRAM.format(limit_bytes=limit_bytes, share=SHARE)
    ran = run(python, card, program, PYTHONPATH=ROOT)
    assert ran.code == 0, ran.output
    claimed = ran.answer["share"] * ran.answer["total"]
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == card)
    predicted = SHARE * shared_bytes(gpu.memory_bytes, limit_bytes, gpu)
    assert claimed == pytest.approx(predicted, rel=0.005)
    assert claimed < ran.answer["free"], "vLLM would refuse to start"
