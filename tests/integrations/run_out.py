"""A real GRPO run on a CPU that runs out of memory: `FOLDER ROOM_MIB HOW [RANK]`. Only that rank
is limited, if one is named.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from autotune.integrations.trl import MemoryWatch, watch


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def limit(room_mib: int) -> None:
    """This process may map so much more than it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (mapped + room_mib * 2**20, resource.RLIM_INFINITY))


def main() -> None:
    folder, room, how, *rank = sys.argv[1:]
    config = GRPOConfig(
        output_dir=str(Path(folder) / "out"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=64,
        generation_kwargs={"min_new_tokens": 64},
        use_cpu=True,
        bf16=False,
        max_steps=2,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
    )
    watching = [MemoryWatch()] if how == "callback" else []
    trainer = GRPOTrainer(
        model=str(Path(folder) / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["one plus one"] * 64}),
        callbacks=watching,
    )
    if not rank or rank == [os.environ.get("RANK", "0")]:
        limit(int(room))
    with watch(trainer) if how == "watch" else contextlib.nullcontext():
        trainer.train()


if __name__ == "__main__":
    main()
