"""Optimizer step of the real GRPOTrainer on one rank of several, under any sharding: `python -m ...
CASE.json`.

The optimizer is plain gradient descent with a step of 1, so that the change of the weights is the
gradient of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.worker.drive import inside

PROMPTS = [f"count to {number} and back" for number in range(16)]


def sums_of_ids(completion_ids: list[list[int]]) -> list[float]:
    """Reward each completion by its own tokens."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def one_step(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    record: dict[str, Any] = {}

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record["before"] = full_weights(trainer.model)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        record.setdefault("completions", list(map(list, completion_ids)))
        return sums_of_ids(completion_ids)

    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        num_generations=4,
        max_completion_length=16,
        max_grad_norm=0.0,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        seed=7,
        per_device_train_batch_size=4,
        **case.get("settings", {}),
    )
    model = inside("trl.base_model").build_sharded(
        {"weights": "real", "dtype": "float32", **case.get("model", {})},
        Path(case["folder"]),
        device="cpu",
        seed=7,
        trust_remote_code=False,
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        callbacks=[Recorder()],
    )
    trainer.train()
    after = full_weights(trainer.model)
    gradient = {name: record["before"][name] - after[name] for name in after}
    flat = torch.cat([part.flatten() for part in gradient.values()])
    return {
        "gradient": gradient,
        "completions": record["completions"],
        "wrapper": type(trainer.model_wrapped).__name__,
    } | {
        "held": sum(map(resident_numbers, trainer.model.parameters())),
        "all": flat.numel(),
        "finite": bool(torch.isfinite(flat).all()),
    }


def full_weights(model: Any) -> dict[str, Any]:
    """Return every parameter, assembled from all ranks, under its plain name."""
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name.removeprefix("module.")] = full(parameter).detach().double().clone()
    return weights


def full(parameter: Any) -> Any:
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter


def resident_numbers(parameter: Any) -> int:
    return int(inside("trl.trainer_settings").local_numel(parameter))


def main() -> None:
    import torch

    case = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    inside()
    from tests.worker.gloo_as_gpus import take_gloo_for_gpus

    folder = Path(sys.argv[1]).parent / f"rank{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    launch = inside("trl.rank_environment")
    if launch.is_sharded(case):
        take_gloo_for_gpus()
    launch.enter_launch(case, folder)
    answer = one_step(case, folder)
    torch.save(answer, folder / "answer.pt")


if __name__ == "__main__":
    main()
