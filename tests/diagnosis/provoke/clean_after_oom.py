"""A run that met a full GPU, took a smaller batch and finished."""

from __future__ import annotations

from accelerate.utils import find_executable_batch_size
from parts import gpu_memory, out_of_memory, plain_trainer

message = gpu_memory(
    "2.00 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
)


@find_executable_batch_size(starting_batch_size=8)
def train(batch_size):
    print("batch size", batch_size)
    if batch_size > 2:
        print("skipped:", message)
        raise out_of_memory(message)
    plain_trainer(per_device_train_batch_size=batch_size)


train()
