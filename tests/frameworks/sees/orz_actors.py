"""Open-Reasoner-Zero's own actors with ZeRO-3 over two gloo ranks: each a process of its own there.

    python orz_actors.py MODEL RANK PORT WHICH
        `Policy`, `Critic`, `Ref` or `Reward`; its repository on PYTHONPATH

Each makes its model by its own `init_model_from_pretrained`, but that the class of its head for
values does not load under transformers 5: transformers' own such model stands in for it.
DeepSpeed's fused Adam wants a GPU: torch's has the same states. What a reference or a reward would
compute (with flash attention) is left out of its pass, after which it is looked at.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accepts"))
import absent  # type: ignore[import-not-found, unused-ignore]

absent.GPU_ONLY = (
    "vllm",
    "flash_attn",
    "cupy",
    "loguru",
    "torch.utils.tensorboard",
    "orz.exp_engine",
)
absent.stand_in()

MODEL, RANK, PORT, WHICH = sys.argv[1:5]
os.environ.update(
    RANK=RANK,
    LOCAL_RANK=RANK,
    WORLD_SIZE="2",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=PORT,
    DS_ACCELERATOR="cpu",
)
ARGS = SimpleNamespace(
    flash_attn=False,
    bf16=True,
    target_modules=None,
    actor_learning_rate=1e-6,
    critic_learning_rate=5e-6,
    adam_betas=(0.9, 0.95),
    l2=0.0,
    num_warmup_steps=1,
    gradient_checkpointing=False,
    ckpt_path="/nowhere",
    load_checkpoint=False,
    eps_clip=0.2,
    value_clip=0.2,
    normalize_reward=False,
    value_head_prefix="value_head",
    pretrain=MODEL,
    critic_pretrain=MODEL,
    ref_reward_offload=False,
    colocate_all=False,
    adam_offload=False,
    zpg=1,
    local_rank=-1,
)


def strategy() -> Any:
    import deepspeed
    import torch
    from orz.ppo.utils import ORZDeepspeedStrategy

    class Here(ORZDeepspeedStrategy):  # type: ignore[misc, unused-ignore]
        def setup_distributed(self, *_: Any) -> None:
            deepspeed.init_distributed("gloo")

        def create_optimizer(self, model: Any, **settings: Any) -> Any:
            return torch.optim.AdamW(model.parameters(), **settings)

    return Here(
        zero_stage=3,
        micro_train_batch_size=1,
        train_batch_size=2,
        max_norm=1.0,
        bf16=True,
        args=ARGS,
    )


def step(engine: Any) -> None:
    """Step on any function of its weights: DeepSpeed gathers them when a layer runs."""
    import torch

    out = engine(input_ids=torch.ones((1, 8), dtype=torch.long))
    engine.backward(out.logits.float().mean())
    engine.step()


def valued() -> Any:
    import torch
    from transformers import AutoModelForTokenClassification as Valued

    return Valued.from_pretrained(
        MODEL,
        num_labels=1,
        attn_implementation="eager",
        dtype=torch.bfloat16,
    )


def main() -> None:
    import torch
    from ray.util import scheduling_strategies

    torch.cuda.current_device = lambda: "cpu"
    # Where the Ray that it asks for had it.
    groups: Any = importlib.import_module("ray.util.placement_group")
    groups.PlacementGroupSchedulingStrategy = scheduling_strategies.PlacementGroupSchedulingStrategy
    from orz.ppo import actors

    actors.get_llm_for_sequence_regression = lambda *_, **__: valued()
    actors.AutoModel = SimpleNamespace(
        from_pretrained=lambda *_, **__: None
    )  # made on no device and let go, which is refused now
    actor = getattr(actors, f"{WHICH}RayActorBase")(2, int(RANK), int(RANK), "127.0.0.1", int(PORT))
    actor.init_model_from_pretrained(strategy(), MODEL)
    if hasattr(actor, "optimizer"):
        step(actor.model.model if WHICH == "Policy" else actor.model)
    else:
        engine = actor.model.model if WHICH == "Ref" else actor.model
        engine.module.forward = lambda *_, **__: torch.zeros(1)
        actor.model.forward = engine.forward
        actor.forward(torch.zeros(1), attention_mask=torch.zeros(1))


if __name__ == "__main__":
    main()
