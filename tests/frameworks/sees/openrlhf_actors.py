"""OpenRLHF's own actors with ZeRO-3 over two gloo ranks: the policy's trainer, the critic's, and a
reference's Ray class.

    python openrlhf_actors.py MODEL RANK PORT WHICH
        `policy`, `critic` or `reference`: each is a process of its own there

Its `setup_distributed` wants a GPU, and DeepSpeed's fused Adam too: torch's has the same states.
The rest is as its actors make it: its settings by its parser, its models,
`DeepspeedStrategy.prepare`, and the class behind Ray's decorator as Ray ships it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accepts"))
import absent  # type: ignore[import-not-found, unused-ignore]
from openrlhf_command import understood  # type: ignore[import-not-found, unused-ignore]

absent.GPU_ONLY = ("vllm", "flash_attn", "cupy")
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
ROWS = ("--train.batch_size", "2", "--train.micro_batch_size", "1")
COMMAND = (
    "--actor.model_name_or_path",
    MODEL,
    "--ds.zero_stage",
    "3",
    "--reward.remote_url",
    "reward.py",
    *ROWS,
)


def parsed() -> Any:
    before, sys.argv = sys.argv, ["train_ppo_ray", *COMMAND]
    try:
        return understood()
    finally:
        sys.argv = before


def strategy_of(args: Any) -> Any:
    import deepspeed
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    class Here(DeepspeedStrategy):  # type: ignore[misc, unused-ignore]
        def get_ds_train_config(self, *about: Any, **options: Any) -> Any:
            config = super().get_ds_train_config(*about, **options)
            config.get("optimizer", {}).get("params", {}).update(
                {"torch_adam": True} if "optimizer" in config else {}
            )
            return config

    deepspeed.init_distributed("gloo")
    strategy = Here(
        args=args,
        zero_stage=args.ds.zero_stage,
        train_batch_size=args.train.batch_size,
        micro_train_batch_size=args.train.micro_batch_size,
    )
    strategy.world_size, strategy.accumulated_gradient = 2, 1
    return strategy


def optimizer_of(args: Any, which: Any) -> dict[str, Any]:
    """Message in the words of `init_model_from_pretrained`."""
    return {
        "optim": which.optim,
        "muon": vars(which.muon),
        "adam": vars(which.adam),
        "lr_scheduler": which.lr_scheduler,
        "lr_warmup_ratio": which.lr_warmup_ratio,
        "min_lr_ratio": which.min_lr_ratio,
        "max_norm": which.max_norm,
        "scheduler_steps": 4,
    }


def model_of(strategy: Any, config: Any) -> Any:
    from openrlhf.models import Actor

    return Actor(
        MODEL,
        attn_implementation="eager",
        param_dtype="bf16",
        ds_config=config,
    )


def step(engine: Any) -> None:
    import torch

    out = engine(input_ids=torch.ones((1, 8), dtype=torch.long))
    engine.backward((out.logits if hasattr(out, "logits") else out[0]).float().mean())
    engine.step()


def policy(args: Any, strategy: Any) -> None:
    from openrlhf.trainer.ray import ppo_actor

    model, optimizer, scheduler = strategy.prepare(
        (model_of(strategy, strategy.get_ds_train_config()), optimizer_of(args, args.actor))
    )
    trainer = ppo_actor.ActorPPOTrainer(
        strategy,
        model,
        ema_model=None,
        actor_optim=optimizer,
        actor_scheduler=scheduler,
    )
    step(trainer.actor.model)


def critic(args: Any, strategy: Any) -> None:
    from openrlhf.models import get_llm_for_sequence_regression
    from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer

    model = get_llm_for_sequence_regression(
        MODEL,
        "critic",
        attn_implementation="eager",
        param_dtype="bf16",
        ds_config=strategy.get_ds_train_config(),
        init_value_head=True,
        value_head_prefix=args.ds.value_head_prefix,
    )
    model, optimizer, scheduler = strategy.prepare((model, optimizer_of(args, args.critic)))
    trainer = CriticPPOTrainer(
        strategy,
        critic=model,
        critic_optim=optimizer,
        critic_scheduler=scheduler,
    )
    import torch

    values = trainer.critic(
        torch.ones((1, 8), dtype=torch.long),
        torch.ones((1, 7)),
        torch.ones((1, 8), dtype=torch.long),
    )
    trainer.critic.backward(values.float().mean())
    trainer.critic.step()


def reference(args: Any, strategy: Any) -> None:
    """The class goes through a pickle, by its value, as Ray sends it to the process that makes
    an actor of it.
    """
    import torch
    from openrlhf.trainer.ray.launcher import ReferenceModelActor
    from ray import cloudpickle

    torch.cuda.current_device = lambda: "cpu"
    shipped = cloudpickle.loads(
        cloudpickle.dumps(ReferenceModelActor.__ray_metadata__.modified_class)
    )
    actor = shipped(2, int(RANK), "127.0.0.1", int(PORT))
    actor.strategy = strategy
    actor.model = strategy.prepare(model_of(strategy, strategy.get_ds_eval_config()))
    row = torch.ones((1, 8), dtype=torch.long)
    actor.forward(row, row[:, 1:], row)


def without_a_gpu() -> None:
    """A replay buffer asks which GPU is this one's, and all ask it to wait."""
    import torch

    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


if __name__ == "__main__":
    without_a_gpu()
    parsed_arguments = parsed()
    {"policy": policy, "critic": critic, "reference": reference}[WHICH](
        parsed_arguments, strategy_of(parsed_arguments)
    )
