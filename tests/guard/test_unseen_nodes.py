"""What a guard at the head of several nodes says that it does not see."""

from __future__ import annotations

import pytest

from autotune.guard.watched import unseen_nodes


@pytest.mark.parametrize(
    "command, variables, nodes",
    [
        ("torchrun --nnodes=4 train.py", {}, 4),
        ("torchrun --nnodes 1:8 train.py", {}, 8),
        ("accelerate launch --num_machines 2 train.py", {}, 2),
        ("python -m verl.trainer.main_ppo trainer.nnodes=3", {}, 3),
        ("trl grpo --config train.yaml", {"SLURM_JOB_NUM_NODES": "2"}, 2),
        ("trl grpo --config train.yaml", {"SLURM_JOB_NUM_NODES": "1"}, None),
        ("torchrun --nnodes=1 train.py", {}, None),
        ("trl grpo --config train.yaml", {}, None),
    ],
)
def test_nodes_are_counted(
    command: str,
    variables: dict[str, str],
    nodes: int | None,
) -> None:
    text = unseen_nodes(command, variables)
    if nodes is None:
        assert text == ""
    else:
        assert text.startswith(f"this run has {nodes} nodes")
