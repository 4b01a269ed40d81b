"""The TRL adapter on a machine without GPUs where accelerate takes gloo ranks on the CPU for GPUs.

accelerate spreads models (DeepSpeed, FSDP) over GPUs alone, and takes CPU ranks for plain data parallel. Told that these are
GPUs, all that follows is the real thing: DeepSpeed, FSDP2, TRL, over gloo. A file of its own, so that a keeper can load it by
path in place of the adapter.
"""

from __future__ import annotations

import os
from typing import Any

from autotune_inside.adapters import trl_grpo, trl_launch  # type: ignore[import-not-found]
from autotune_inside.adapters.trl_grpo import measure, release, supported, warm  # type: ignore[import-not-found] # noqa: F401


def load(request: Any, stage: Any) -> Any:
    if trl_launch.spreads(request):
        take_gloo_for_gpus()
    return trl_grpo.load(request, stage)


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
