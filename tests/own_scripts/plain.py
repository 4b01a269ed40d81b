"""Reward from a neighbouring file, a callable object as another, settings in the call."""

import sys
from pathlib import Path

from datasets import Dataset
from lengths import length_reward
from trl import GRPOConfig, GRPOTrainer


class Brevity:
    """Callable object with a state."""

    def __init__(self, target):
        self.target = target
        self.__name__ = "brevity"

    def __call__(self, completions, answer, **kwargs):
        assert len(answer) == len(completions)
        return [-abs(len(str(completion)) - self.target) / 100 for completion in completions]


def main():
    assert Path(__file__).is_absolute()
    data = Dataset.from_list(
        [{"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(40)]
    )
    args = GRPOConfig(
        output_dir="runs",
        per_device_train_batch_size=8,  # as large as fits
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-6,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=sys.argv[1],
        reward_funcs=[length_reward, Brevity(100)],
        args=args,
        train_dataset=data,
    )
    trainer.train()
    Path("trained").write_text(
        f"{args.per_device_train_batch_size} {args.world_size} {trainer.state.global_step}"
    )


if __name__ == "__main__":
    main()
