"""A tiny model and a plain training loop, the same for real ranks and for traces of them.

Run as a script it is one real rank: `python -m tests.counted_memory.two_ranks_loop CASE.json`, with
the variables of torchrun, gloo, real tensors and an allocator that counts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "use_cache": False,
}


def build(case: dict[str, Any]) -> Any:
    """Build the model on meta, with adapters if the case trains those."""
    import torch
    import transformers

    config = transformers.Qwen2Config(
        tie_word_embeddings=case.get("tied", False), **{**SHAPE, **case.get("shape", {})}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, case.get("dtype", "float32")), attn_implementation="sdpa"
        )
        if rank := case.get("lora_r"):
            import peft

            adapter = peft.LoraConfig(
                r=rank,
                lora_alpha=16,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(model, adapter)
    return model


def fill(model: Any) -> Any:
    """Allocate every parameter and buffer, real or fake depending on the active modes."""
    import torch

    filled_by_id: dict[int, Any] = {}

    def filled(tensor: Any, parameter: bool) -> Any:
        if id(tensor) not in filled_by_id:
            new = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if new.is_floating_point():
                new.zero_().add_(0.01)
            filled_by_id[id(tensor)] = (
                torch.nn.Parameter(new, requires_grad=tensor.requires_grad) if parameter else new
            )
        return filled_by_id[id(tensor)]

    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None:
                module._parameters[name] = filled(tensor, True)
        for name, tensor in list(module._buffers.items()):
            if tensor is not None:
                module._buffers[name] = filled(tensor, False)
    return model


def ready(model: Any, case: dict[str, Any]) -> Any:
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": bool(case.get("reentrant"))}
        )
        if case.get("lora_r") or case.get("reentrant"):
            model.enable_input_require_grads()
    return model.train()


def batch(case: dict[str, Any]) -> Any:
    import torch

    return torch.zeros(case.get("batch", 2), case.get("length", 128), dtype=torch.long)


def optimizer_of(model: Any, case: dict[str, Any]) -> Any:
    """Make AdamW over all parameters, or with norms and biases in a group of their own, like the
    Trainer.
    """
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not case.get("spares_norms"):
        return torch.optim.AdamW(parameters, lr=1e-5)
    decayed = {"params": [parameter for parameter in parameters if parameter.dim() >= 2]}
    spared = {"params": [parameter for parameter in parameters if parameter.dim() < 2]}
    return torch.optim.AdamW([decayed, spared], lr=1e-5)


def train(
    model: Any,
    case: dict[str, Any],
    enter: Callable[[str, int], None],
) -> Any:
    """Run two optimizer steps of a few micro-steps each; return the optimizer."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(model, case)
    ids, micro_steps = batch(case), case.get("micro_steps", 1)
    for step in range(2):
        for micro in range(micro_steps):
            enter("forward", step)
            with _sync(model, case, last=micro == micro_steps - 1):
                loss = model(input_ids=ids, labels=ids).loss
                enter("backward", step)
                (loss / micro_steps).backward()
            del loss
        enter("optimizer", step)
        if case.get("clip"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@contextlib.contextmanager
def _sync(
    model: Any,
    case: dict[str, Any],
    *,
    last: bool,
) -> Any:
    """Defer FSDP2's and DDP's reductions to the last micro-step, like accelerate."""
    if case.get("hold_back") and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        yield
    elif case.get("hold_back") and hasattr(model, "no_sync") and not last:
        with model.no_sync():
            yield
    else:
        yield


def specification(case: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a trace's specification that sharding reads."""
    return {
        "settings": {"bf16": case.get("bf16", False)},
        "device": "cpu",
        "sharding": {"kind": case["kind"], "ranks": 2, "options": case.get("options", {})},
    }


def real(case: dict[str, Any]) -> dict[str, int]:
    """Return one rank's peaks by phase and step."""
    import torch
    import torch.distributed as dist

    from tests.counted_memory import counting

    torch.set_num_threads(1)
    _synchronise_collectives()
    _imports_first(case)
    allocator = counting.install(Path(case["allocator"]))
    if case["kind"].startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    before = allocator.live()
    run = _RUNS.get(case["kind"], _plain)
    peaks: dict[str, int] = {}

    def enter(phase: str, step: int) -> None:
        key = f"{phase}{step}"
        if peaks.get("phase") is not None:
            last = str(peaks["phase"])
            peaks[last] = max(peaks.get(last, 0), allocator.peak() - before)
        allocator.reset_peak()
        peaks["phase"] = key  # type: ignore[assignment]
        if not peaks.get("whole_started"):
            peaks["whole_started"] = 1

    run(case, enter)
    enter("end", 0)
    dist.destroy_process_group()
    return {name: value for name, value in peaks.items() if name not in ("phase", "whole_started")}


def _synchronise_collectives() -> None:
    """Wait for each collective. gloo runs on overlapping threads, which release tensors shortly
    after the collective ends: without the wait, peaks differ between runs.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in COLLECTIVES:
        if (plain := getattr(dist, name, None)) is not None:
            for module in (dist, distributed_c10d):
                setattr(module, name, _synchronised(plain))


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
    "reduce",
)


def _synchronised(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = plain(*args, **kwargs)
        if work is not None:
            work.wait()
        time.sleep(0.003)
        return work

    return call


def _imports_first(case: dict[str, Any]) -> None:
    """Import libraries first: their tensors are not part of the step."""
    import accelerate  # noqa: F401
    import transformers  # noqa: F401

    if case.get("lora_r"):
        import peft  # noqa: F401
    if case["kind"] in ("zero1", "zero2", "zero3"):
        import deepspeed  # noqa: F401


def _plain(case: dict[str, Any], enter: Callable[[str, int], None]) -> None:
    from autotune.worker.tracing import fsdp2

    enter("load", 0)
    model = ready(fill(build(case)), case)
    if case["kind"] == "fsdp2":
        model = fsdp2.prepare(model, specification(case))
    elif case["kind"] == "ddp":
        import torch

        model = torch.nn.parallel.DistributedDataParallel(model)
    elif case["kind"] == "fsdp1":
        model = _flat(model, case)
    gc.collect()
    train(model, case, enter)


def _flat(model: Any, case: dict[str, Any]) -> Any:
    """Wrap in FSDP1 like accelerate: a unit per decoder layer, the rest in the root."""
    import torch
    from torch.distributed import fsdp as flat
    from torch.distributed.fsdp import wrap

    layers = {
        type(layer)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        for layer in module
    }
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=layers)
    half = torch.bfloat16
    mixed = (
        flat.MixedPrecision(
            param_dtype=half,
            reduce_dtype=half,
            buffer_dtype=half,
        )
        if case.get("bf16")
        else None
    )
    return flat.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        mixed_precision=mixed,
    )


def _deepspeed(case: dict[str, Any], enter: Callable[[str, int], None]) -> None:
    """Train like accelerate: the engine owns model and optimizer, and decides when a step is
    due.
    """
    import deepspeed

    enter("load", 0)
    model = ready(fill(build(case)), case)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model, case),
        config=deepspeed_config(case),
    )
    gc.collect()
    ids, micro_steps = batch(case), case.get("micro_steps", 1)
    for step in range(2):
        for micro in range(micro_steps):
            enter("forward", step)
            loss = engine(input_ids=ids, labels=ids).loss
            enter("backward", step)
            engine.set_gradient_accumulation_boundary(micro == micro_steps - 1)
            engine.backward(loss)
            del loss
            if micro == micro_steps - 1:
                enter("optimizer", step)
            engine.step()


def deepspeed_config(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case.get("batch", 2),
        "gradient_accumulation_steps": case.get("micro_steps", 1),
        "gradient_clipping": 1.0 if case.get("clip") else 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.get("bf16", False)},
        "zero_optimization": {"stage": int(case["kind"][-1]), **case.get("options", {})},
    }


_RUNS: dict[str, Callable[[dict[str, Any], Callable[[str, int], None]], None]] = {
    "zero1": _deepspeed,
    "zero2": _deepspeed,
    "zero3": _deepspeed,
}


def main() -> None:
    import os

    case = json.loads(Path(sys.argv[1]).read_text())
    answer = real(case)
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
