"""SkyRL's own FSDP2 strategy and model over two gloo ranks: a step of the policy, and a pass of the
reference.

    python skyrl_workers.py MODEL RANK PORT

Its code names CUDA devices, which are CPUs here, and imports flash-attn and vLLM, which only a GPU
machine has: rows are padded and attention is torch's. Its workers are made without Ray, with the
attributes that `init_model` gives them.
"""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

MODEL, RANK, PORT = sys.argv[1:4]
os.environ.update(
    {"RANK": RANK, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
)
# The types of vllm-router need Python 3.12.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def on_a_cpu() -> None:
    """Import it without what is absent, and then take CPUs for its CUDA devices."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.frameworks.accepts import absent

    absent.stand_in()
    import torch
    import torch._dynamo
    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from skyrl.backends.skyrl_train.utils import torch_utils
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # noqa: F401

    torch_utils.FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False

    mesh, empty = fsdp_utils.init_device_mesh, torch.empty

    def empty_here(*of: Any, device: Any = None, **about: Any) -> Any:
        return empty(*of, device="cpu" if device == "cuda" else device, **about)

    fsdp_utils.init_device_mesh = lambda _, *of, **about: mesh("cpu", *of, **about)
    fsdp_utils.torch = SimpleNamespace(**{**vars(torch), "empty": empty_here})
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    for name in ("synchronize", "empty_cache", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_: None)


def main() -> None:
    on_a_cpu()
    import torch
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (
        FSDPPolicyWorkerBase,
        FSDPRefWorkerBase,
    )
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig

    torch.distributed.init_process_group("gloo", rank=int(RANK), world_size=2)

    def prepared(optimizer: Any) -> tuple[Any, Any]:
        about = FSDPConfig(cpu_offload=False, reshard_after_forward=True)
        strategy = FSDPStrategy(about, optimizer, model_config=ModelConfig(), num_training_steps=4)
        strategy.setup_distributed()
        wrapped = HFModelWrapper(
            MODEL,
            use_flash_attention_2=False,
            bf16=False,
            logprobs_chunk_size=16,
        )
        return strategy, strategy.prepare((wrapped, None, None) if optimizer else wrapped)

    def passed(model: Any) -> Any:
        rows = torch.ones((2, 32), dtype=torch.long)
        with torch.autocast(dtype=torch.bfloat16, device_type="cpu"):
            return model(
                rows,
                16,
                attention_mask=rows,
                compute_entropy=True,
                return_output=True,
            )[0]

    strategy, (model, optimizer, scheduler) = prepared(OptimizerConfig())
    policy, reference = (object.__new__(cls) for cls in (FSDPPolicyWorkerBase, FSDPRefWorkerBase))
    policy.model, policy.optimizer, policy.scheduler = model, optimizer, scheduler
    _, reference.model = prepared(None)
    with torch.no_grad():
        passed(reference.model)
    strategy.backward(-passed(policy.model).mean(), policy.model, optimizer)
    strategy.optimizer_step(optimizer, policy.model, scheduler)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
