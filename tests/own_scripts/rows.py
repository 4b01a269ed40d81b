"""Supervised fine-tuning on given rows, without rewards."""

import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list([{"prompt": f"{i} + {i}?", "completion": f" {2 * i}"} for i in range(64)])
args = SFTConfig(
    output_dir="sft-out",
    per_device_train_batch_size=4,
    max_length=32,
    use_cpu=True,
    bf16=False,
)
SFTTrainer(sys.argv[1], args=args, train_dataset=data).train()
