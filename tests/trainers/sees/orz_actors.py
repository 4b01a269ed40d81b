"""Open-Reasoner-Zero's own actors with ZeRO-3 over two gloo ranks: each a process of its own there.

    python orz_actors.py MODEL RANK PORT WHICH        `Policy`, `Critic`, `Ref` or `Reward`; its repository on PYTHONPATH

Each makes its model by its own `init_model_from_pretrained`. DeepSpeed's fused Adam wants a GPU: torch's has the same states; and
what a reference or a reward would compute (with flash attention) is left out of its `forward`, after which it is looked at.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accepts"))
import absent  # type: ignore[import-not-found, unused-ignore]

absent.GPU_ONLY = ("vllm", "flash_attn", "cupy", "loguru", "torch.utils.tensorboard")
absent.stand_in()

MODEL, RANK, PORT, WHICH = sys.argv[1:5]
os.environ.update(RANK=RANK, LOCAL_RANK=RANK, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, DS_ACCELERATOR="cpu")
ARGS = SimpleNamespace(
    flash_attn=False, bf16=True, target_modules=None, actor_learning_rate=1e-6, critic_learning_rate=5e-6,
    adam_betas=(0.9, 0.95), l2=0.0, num_warmup_steps=1, gradient_checkpointing=False, ckpt_path="/nowhere",
    load_checkpoint=False, eps_clip=0.2, value_clip=0.2, normalize_reward=False, value_head_prefix="value_head", pretrain=MODEL,
    critic_pretrain=MODEL, ref_reward_offload=False, colocate_all=False, adam_offload=False, zpg=1, local_rank=-1,
)  # fmt: skip


def strategy() -> Any:
    import deepspeed
    import torch
    from orz.ppo.utils import ORZDeepspeedStrategy

    class Here(ORZDeepspeedStrategy):  # type: ignore[misc, unused-ignore]
        def setup_distributed(self, *_: Any) -> None:
            deepspeed.init_distributed("gloo")

        def create_optimizer(self, model: Any, **settings: Any) -> Any:
            return torch.optim.AdamW(model.model.parameters() if hasattr(model, "model") else model.parameters(), **settings)

    return Here(zero_stage=3, micro_train_batch_size=1, train_batch_size=2, max_norm=1.0, bf16=True, args=ARGS)


def step(engine: Any) -> None:
    """On any function of its weights: DeepSpeed gathers them when a layer runs."""
    import torch

    out = engine(input_ids=torch.ones((1, 8), dtype=torch.long), **asked(engine))
    logits = out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out
    engine.backward(logits.float().mean())
    engine.step()


def asked(engine: Any) -> dict[str, Any]:
    """A head for values has a forward of its own."""
    import torch

    return {"num_actions": 4, "attention_mask": torch.ones((1, 8), dtype=torch.long)} if WHICH == "Critic" else {}


def main() -> None:
    import torch

    torch.cuda.current_device = lambda: "cpu"
    from orz.ppo import actors

    actor = getattr(actors, f"{WHICH}RayActorBase")(2, int(RANK), int(RANK), "127.0.0.1", int(PORT))
    actor.init_model_from_pretrained(strategy(), MODEL)
    if hasattr(actor, "optimizer"):
        step(actor.model.model if WHICH == "Policy" else actor.model)
    else:
        actor.model.forward = lambda *_, **__: torch.zeros(1)
        actor.forward(torch.zeros(1), attention_mask=torch.zeros(1))


if __name__ == "__main__":
    main()
