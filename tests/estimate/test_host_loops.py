"""What a host does tensor by tensor, and what torch says about it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from autotune.catalog import efficiency
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.estimate.model_shape import shape
from autotune.estimate.throughput.host_loops import with_host_loops
from tests.estimate.synthetic import config_of
from tests.estimate.test_throughput import composition

DENSE = "Qwen/Qwen3-4B"  # 36 layers
MIXTURE = "Qwen/Qwen3-30B-A3B"  # 48 layers

COUNTED_BY_TORCH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


class Counter(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        counts[-1] += 1
        return function(*args, **(kwargs or {}))


counts = []
for tensors in (10, 20):
    parameters = []
    for _ in range(tensors):
        sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        parameter = torch.nn.Parameter(sharded)
        parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    counts.append(0)
    with Counter():
        optimizer.step()
print((counts[1] - counts[0]) / 10)
"""


def added(model: str, *, adapter_rank: int | None = None, **flags: bool) -> dict[Phase, float]:
    """Return the milliseconds that two micro-steps and an optimizer step get."""
    phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
    step = composition(**flags)
    policy = dataclasses.replace(step["policy"], adapter_rank=adapter_rank)
    step = dataclasses.replace(step, residents=(policy,))
    seconds = with_host_loops(
        dict.fromkeys(phases, Estimate.exactly(0)),
        step,
        shape(config_of(model)),
        micro_steps=2,
        optimizer_steps=1,
    )
    return {phase: 1000 * seconds[phase].value for phase in phases}


def test_torch_updates_sharded_tensors_one_after_the_other() -> None:
    """A batched update has as many operations for twenty tensors as for ten."""
    script = [sys.executable, "-c", COUNTED_BY_TORCH]
    result = subprocess.run(script, capture_output=True, text=True, check=True)
    operations_per_tensor = float(result.stdout.split()[-1])
    assert operations_per_tensor >= 10


@pytest.mark.parametrize(
    ("adapter_rank", "tensors"),
    [
        (None, 36 * 9 + 3),
        (16, 36 * 14),
    ],
)
def test_every_trained_tensor_takes_its_time(adapter_rank: int | None, tensors: int) -> None:
    milliseconds = efficiency("sharded_tensor_update_milliseconds").value
    spent = added(DENSE, adapter_rank=adapter_rank, updates_by_tensor=True)
    assert spent == {
        "forward": 0,
        "backward": 0,
        "optimizer": pytest.approx(tensors * milliseconds),
    }


@pytest.mark.parametrize(("model", "reads"), [(DENSE, 36 * 14), (MIXTURE, 48 * 10)])
def test_each_module_with_adapters_waits_twice_a_pass(model: str, reads: int) -> None:
    milliseconds = efficiency("adapter_read_milliseconds").value
    spent = added(model, adapter_rank=16, reads_adapter_counts=True)
    of_pass = pytest.approx(2 * reads * milliseconds)
    assert spent == {"forward": of_pass, "backward": of_pass, "optimizer": 0}
    once = added(model, adapter_rank=16, reads_adapter_counts=True, checkpointing=False)
    assert once["backward"] == 0


def test_full_tuning_and_other_frameworks_wait_for_nothing() -> None:
    nothing = {"forward": 0, "backward": 0, "optimizer": 0}
    assert added(DENSE, reads_adapter_counts=True) == nothing
    assert added(DENSE, adapter_rank=16) == nothing
