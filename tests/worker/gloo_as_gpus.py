"""TRL adapter on a machine without GPUs, with accelerate treating gloo ranks on the CPU as GPUs.

accelerate shards models (DeepSpeed, FSDP) over GPUs only, and uses plain data parallelism on CPU
ranks. Apart from the patched device type everything is real: DeepSpeed, FSDP2, TRL, over gloo. The
worker loads this file by path in place of the adapter.
"""

from __future__ import annotations

import os
from typing import Any

from autotune_worker.trl import grpo_probe, rank_environment  # type: ignore[import-not-found]
from autotune_worker.trl.grpo_probe import (  # type: ignore[import-not-found]
    measure,  # noqa: F401
    release,  # noqa: F401
    supported,  # noqa: F401
    warm,  # noqa: F401
)


def load(request: Any, stage: Any) -> Any:
    if rank_environment.is_sharded(request):
        take_gloo_for_gpus()
    return grpo_probe.load(request, stage)


def take_gloo_for_gpus() -> None:
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begin_on_a_device(self: Any, cpu: bool = False, **options: Any) -> None:
        begin(self, cpu=False, **{**options, "backend": None})

    def gloo(self: Any, *_: Any, **__: Any) -> Any:
        ranked = int(os.environ.get("LOCAL_RANK", -1)) != -1
        return ("gloo", DistributedType.MULTI_GPU) if ranked else (None, DistributedType.NO)

    PartialState.__init__ = begin_on_a_device  # type: ignore[method-assign]
    PartialState._prepare_backend = gloo  # type: ignore[method-assign]
