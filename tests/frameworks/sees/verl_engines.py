"""verl's own FSDP2 engines over two gloo ranks: a policy and a reference that a worker of its own
keeps, and a critic.

    python verl_engines.py MODEL RANK PORT

Its workers pick an engine by the device and have none for a CPU (`EngineRegistry`): so the engines
are made here by their classes, as `TrainingWorker` makes them, and are put where
`ActorRolloutRefWorker.init_model` puts them. Steps are taken on gradients of ones.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

MODEL, RANK, PORT = sys.argv[1:4]
ENVIRONMENT = {
    "RANK": RANK,
    "LOCAL_RANK": RANK,
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": PORT,
}
os.environ.update(ENVIRONMENT)


def engine(cls: Any, kind: str, **about: Any) -> Any:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    model = HFModelConfig(
        path=MODEL,
        model_type=kind,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    forward_only = about.get("forward_only", False)
    settings = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        reshard_after_forward=True,
        **about,
    )
    optimizer = (
        None
        if forward_only
        else FSDPOptimizerConfig(
            lr=1e-6,
            total_training_steps=4,
            lr_warmup_steps=0,
        )
    )
    instance = cls(
        model_config=model,
        engine_config=settings,
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    instance._build_model_optimizer()
    return instance


def step(instance: Any) -> None:
    import torch

    for parameter in instance.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    instance.optimizer_step()
    instance.optimizer_zero_grad()


def on_a_cpu() -> None:
    """verl takes its device from a platform, and has one for each kind of GPU; pinned memory
    needs a GPU.
    """
    import torch
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):  # type: ignore[misc, unused-ignore]
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

    platform_manager.set_platform(Cpu())
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    # Its other ways through attention need a TRL below 1.0 even to be left alone; they hold
    # nothing.
    transformer_impl.apply_monkey_patch = lambda **_: None
    from transformers import AutoModelForTokenClassification as Valued

    load = Valued.from_pretrained  # a critic's is asked for with flash attention alone
    Valued.from_pretrained = lambda *of, attn_implementation, **options: load(
        *of, attn_implementation="eager", **options
    )
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)


def main() -> None:
    on_a_cpu()
    import torch
    from omegaconf import OmegaConf
    from verl.workers.engine.fsdp.transformer_impl import (
        FSDPEngineWithLMHead,
        FSDPEngineWithValueHead,
    )
    from verl.workers.engine_workers import ActorRolloutRefWorker

    torch.distributed.init_process_group("gloo", rank=int(RANK), world_size=2)
    config = OmegaConf.create({"actor": {"strategy": "fsdp2", "profiler": {}}})
    worker = ActorRolloutRefWorker(config=config, role="actor_rollout_ref")
    worker.ref = SimpleNamespace(
        engine=engine(FSDPEngineWithLMHead, "language_model", forward_only=True)
    )
    worker.actor = SimpleNamespace(engine=engine(FSDPEngineWithLMHead, "language_model"))
    critic = engine(FSDPEngineWithValueHead, "value_model")
    step(critic)
    step(worker.actor.engine)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
