"""Common parts of the scripts here: a tiny model, tiny data, and the frameworks' own loops over
them, all on a CPU.

A failure that only a GPU can have is raised at its place (`fail_at`) with torch's own message
(`gpu_memory`), so that everything around the message, tracebacks, launchers and wrappers, is real.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = os.environ.get("PROVOKE_MODEL", "model")
"""A folder with a tiny Qwen2 and its tokenizer; the runner makes it."""


def rows(count: int = 32, **columns: Any) -> Any:
    """Return a data set with this number of equal rows."""
    from datasets import Dataset

    columns = columns or {"prompt": "What is 2 + 2?"}
    return Dataset.from_list([dict(columns)] * count)


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


SMALL: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def grpo(
    *,
    model: Any = MODEL,
    data: Any = None,
    reward: Any = length_reward,
    trainer: Any = None,
    **settings: Any,
) -> None:
    """TRL's GRPO, built and trained."""
    from trl import GRPOConfig, GRPOTrainer

    builder = trainer or {}
    config = GRPOConfig(**{**SMALL, "num_generations": 2, "max_completion_length": 8, **settings})
    GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=rows() if data is None else data,
        **builder,
    ).train()


def sft(*, model: Any = MODEL, data: Any = None, trainer: Any = None, **settings: Any) -> None:
    """TRL's SFT."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**{**SMALL, "max_length": 32, **settings})
    data = rows(text="one two three four five") if data is None else data
    SFTTrainer(
        model=model,
        args=config,
        train_dataset=data,
        **(trainer or {}),
    ).train()


def dpo(*, data: Any = None, **settings: Any) -> None:
    """TRL's DPO."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**{**SMALL, **settings})
    data = (
        rows(
            prompt="2 + 2 =",
            chosen=" 4",
            rejected=" 5",
        )
        if data is None
        else data
    )
    DPOTrainer(
        model=MODEL,
        args=config,
        train_dataset=data,
    ).train()


def causal_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL)


def plain_trainer(*, model: Any = None, data: Any = None, **settings: Any) -> None:
    """transformers' Trainer over token ids."""
    from transformers import Trainer, TrainingArguments

    ids = [3 + number for number in range(16)]
    data = rows(input_ids=ids, labels=ids) if data is None else data
    arguments = TrainingArguments(**{**SMALL, **settings})
    Trainer(
        model=model or causal_model(),
        args=arguments,
        train_dataset=data,
    ).train()


def loop(
    steps: int = 4,
    *,
    at: int = 2,
    then: Callable[[Any], None] | None = None,
    learning_rate: float = 1e-3,
) -> None:
    """A plain torch loop, over gloo where a launcher started several; `then` happens before step
    `at`.
    """
    import torch
    import torch.distributed as dist

    many = "RANK" in os.environ
    if many:
        dist.init_process_group("gloo")
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    )
    model = torch.nn.parallel.DistributedDataParallel(model) if many else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for step in range(steps):
        if step == at and then is not None:
            then(model)
        loss = model(torch.ones(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank() == 0:
            print({"loss": round(loss.item(), 4), "step": step + 1}, flush=True)
    if many:
        # rank 0 holds the store: one that leaves early takes it from those that still ask it
        dist.barrier()
        dist.destroy_process_group()
    # One rank alone: two that print at once may share a line.
    if rank() == 0:
        print("training finished", flush=True)
    if many:
        # gloo's threads may still release Python objects while the interpreter ends, which aborts 1
        # run in about 25 with "terminate called without an active exception" (torch 2.13, Python
        # 3.11).
        os._exit(0)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """A DeepSpeed configuration for the Trainer."""
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        **options,
    }


def on_gloo() -> None:
    """DeepSpeed over gloo, which it does not choose by itself."""
    import deepspeed

    deepspeed.init_distributed("gloo")


def engine(**settings: Any) -> Any:
    """vLLM's engine on a CPU."""
    from vllm import LLM

    return LLM(
        **{
            "model": MODEL,
            "max_model_len": 256,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.05,
            **settings,
        }
    )


def completions(llm: Any, count: int = 2) -> None:
    from vllm import SamplingParams

    llm.generate(["What is 2 + 2?"] * count, SamplingParams(max_tokens=8))


def learning() -> bool:
    """Return True in the training's forward pass, not while completions are generated or scored."""
    import torch

    return torch.is_grad_enabled()


def inside(*functions: str) -> bool:
    """While one of these functions runs."""
    return any(frame.function in functions for frame in inspect.stack())


def fail_at(
    place: str,
    error: BaseException,
    *,
    on_rank: int | None = None,
    call: int = 1,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Make the function at `module:qualified.name` raise the error, at its n-th call that
    counts, on that rank.
    """
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), [0]
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    @functools.wraps(real)
    def failing(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += when()
        if calls[0] >= call and when() and on_rank in (None, rank()):
            raise error
        return real(*arguments, **keywords)

    # Frames show the file and the name of the code that runs: those of what it stands for.
    failing.__code__ = failing.__code__.replace(
        co_filename=real.__code__.co_filename,
        co_name=name,
        co_firstlineno=1,
    )
    setattr(owner, name, staticmethod(failing) if static else failing)


def out_of_memory(text: str) -> BaseException:
    import torch

    return torch.OutOfMemoryError(text)


_HINTS = {
    "2.1": (
        "If reserved but unallocated memory is large try setting max_split_size_mb to avoid"
        " fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
    ),
    "2.6": (
        "If reserved but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See"
        " documentation for Memory Management "
        " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    ),
    "2.11": (
        "If reserved but unallocated memory is large try setting"
        " PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-alloc-conf)"
    ),
}


def gpu_memory(
    request: str,
    *,
    total: str,
    free: str,
    process: str,
    live: str,
    idle: str,
    neighbours: str = "",
    pools: str = "",
    allowed: str = "",
    gpu: int = 0,
    torch: str = "2.6",
) -> str:
    """Return torch's message of a failed allocation: c10/cuda/CUDACachingAllocator.cpp, by
    version.
    """
    if torch.startswith("1."):
        return (
            f"CUDA out of memory. Tried to allocate {request} (GPU {gpu}; {total} total capacity;"
            f" {live} already allocated; {free} free; {process} reserved in total by PyTorch) If"
            " reserved memory is >> allocated memory try setting max_split_size_mb to avoid"
            " fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
        )
    capacity = "capacty" if torch == "2.1" else "capacity"
    in_pools = f", with {pools} allocated in private pools (e.g., CUDA Graphs)," if pools else ","
    limit = f"{allowed} allowed; " if allowed else ""
    return (
        f"CUDA out of memory. Tried to allocate {request}. GPU {gpu} has a total {capacity} of"
        f" {total} of which {free} is free. {neighbours}Including non-PyTorch memory, this process"
        f" has {process} memory in use. {limit}Of the allocated memory {live} is allocated by"
        f" PyTorch{in_pools} and {idle} is reserved by PyTorch but unallocated. {_HINTS[torch]}"
    )


def folder(name: str) -> Path:
    path = Path(name)
    path.mkdir(exist_ok=True)
    return path
