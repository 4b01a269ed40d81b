"""Grid of `make bench-emulated`: what is predicted and emulated. Data, no code that runs anything.

Completions are short where transformers generates, because every token of every layer costs host
time; prompts make up for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap

from autotune.request.flags import Flags


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Configuration on one machine."""

    model: str
    gpus: str = "A100-80G"
    method: str = "grpo"
    tuning: str = "lora"
    micro_batch: int = 8
    accumulation: int = 1
    prompt: int = 512
    completion: int = 24
    holds: tuple[str, ...] = ()
    late: bool = False
    """True where the upper end of what is reserved is emulated too: twice the time."""

    @property
    def cards(self) -> int:
        return int(self.gpus.partition("x")[0]) if self.gpus[0].isdigit() else 1

    @property
    def name(self) -> str:
        shape = f"{self.micro_batch}x{self.accumulation} {self.prompt}+{self.completion}"
        return " ".join([self.model, self.gpus, self.method, self.tuning, shape, *self.holds])

    def flags(self, gpus: str, python: str) -> Flags:
        """Return this configuration as a request of `autotune run`."""
        holds: dict[str, object] = {
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
        }
        lengths: dict[str, int] = {
            "max_prompt_length": self.prompt,
            "max_completion_length": self.completion,
        }
        if self.method in ("sft", "dpo"):
            holds["max_length"] = self.prompt + self.completion
            del lengths["max_completion_length"]
        else:
            holds["num_generations"] = min(8, self._batch)
            if "use_vllm=true" not in self.holds:
                holds["use_vllm"] = False
        return Flags(
            model=self.model,
            gpus=gpus,
            method=self.method,
            tuning=self.tuning,
            python=python,
            global_batch=self._batch,
            hold=(*(f"{name}={str(value).lower()}" for name, value in holds.items()), *self.holds),
            **lengths,
        )

    @property
    def has_server(self) -> bool:
        return "vllm_mode=server" in self.holds

    @property
    def tensor_parallel(self) -> int:
        sizes = []
        for hold in self.holds:
            if hold.startswith("vllm_tensor_parallel_size="):
                sizes.append(hold.partition("=")[2])
        return int(sizes[0]) if sizes else 1

    @property
    def _batch(self) -> int:
        return self.micro_batch * self.accumulation * self._ranks

    @property
    def _ranks(self) -> int:
        return self.cards - self.has_server


CHECKPOINTING, PLAIN = "gradient_checkpointing=true", "gradient_checkpointing=false"


def _sharded(kind: str, *holds: str) -> tuple[str, ...]:
    return (f"sharding={kind}", *holds)


def _colocated(
    share: float,
    *,
    sleep: bool,
    tensor_parallel: int = 1,
) -> tuple[str, ...]:
    return (
        "use_vllm=true",
        "vllm_mode=colocate",
        f"vllm_gpu_memory_utilization={share}",
        f"vllm_enable_sleep_mode={str(sleep).lower()}",
        f"vllm_tensor_parallel_size={tensor_parallel}",
    )


SMALL, HOPPER, TWO, FOUR, EIGHT = "A100-40G", "H200", "2xA100-40G", "4xA100-40G", "8xA100-80G"

_FIRST = (
    # One of each kind, small ones first: what is wrong shows early.
    Setup(
        model="Qwen2.5-0.5B",
        gpus=SMALL,
        tuning="full",
        holds=(PLAIN,),
        late=True,
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=SMALL,
        holds=(PLAIN,),
    ),
    Setup(
        model="Qwen2.5-7B",
        gpus=SMALL,
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen2.5-7B",
        gpus=SMALL,
        tuning="qlora",
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen2.5-1.5B",
        gpus=SMALL,
        method="sft",
        tuning="full",
        micro_batch=2,
        completion=512,
        holds=(PLAIN,),
    ),
    Setup(
        model="Qwen2.5-1.5B",
        gpus=SMALL,
        method="dpo",
        micro_batch=2,
        prompt=256,
        completion=256,
        holds=(PLAIN,),
    ),
    Setup(
        model="Qwen2.5-1.5B",
        gpus=SMALL,
        method="rloo",
        tuning="full",
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        tuning="full",
        micro_batch=4,
        holds=_sharded("ddp", PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        tuning="full",
        micro_batch=4,
        holds=_sharded("zero2", PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        tuning="full",
        micro_batch=4,
        holds=_sharded("zero3", PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        tuning="full",
        micro_batch=4,
        holds=_sharded("fsdp1", PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        tuning="full",
        micro_batch=4,
        holds=_sharded("fsdp2", PLAIN),
    ),
    Setup(
        model="gemma-2-2b",
        gpus=SMALL,
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen3-30B-A3B",
        gpus=HOPPER,
        method="sft",
        micro_batch=1,
        prompt=256,
        completion=256,
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Llama-3.1-8B",
        method="sft",
        micro_batch=2,
        prompt=1024,
        completion=1024,
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen2.5-72B",
        gpus=HOPPER,
        method="sft",
        tuning="qlora",
        micro_batch=1,
        completion=512,
        holds=(CHECKPOINTING,),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=SMALL,
        holds=(*_colocated(0.3, sleep=False), PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=SMALL,
        holds=(*_colocated(0.5, sleep=True), PLAIN),
    ),
    Setup(
        model="Qwen2.5-0.5B",
        gpus=TWO,
        micro_batch=4,
        holds=(*_sharded("ddp"), *_colocated(0.3, sleep=False, tensor_parallel=2), PLAIN),
    ),
    Setup(
        model="Qwen2.5-1.5B",
        gpus=TWO,
        method="sft",
        tuning="full",
        micro_batch=2,
        completion=512,
        holds=_sharded("zero2", "offload_optimizer_device=cpu", CHECKPOINTING),
    ),
)


def _given_rows(
    model: str,
    gpus: str,
    tuning: str,
    micro_batch: int,
    checkpointing: str,
    late: bool,
) -> Setup:
    # Given rows cost no generation: many models, one card.
    return Setup(
        model=model,
        gpus=gpus,
        method="sft",
        tuning=tuning,
        micro_batch=micro_batch,
        completion=512,
        holds=(checkpointing,),
        late=late,
    )


_ROWS = tuple(
    starmap(
        _given_rows,
        (
            ("Qwen2.5-0.5B", SMALL, "full", 8, PLAIN, True),
            ("Qwen2.5-0.5B", SMALL, "full", 8, CHECKPOINTING, False),
            ("Qwen2.5-3B", "A100-80G", "full", 2, CHECKPOINTING, False),
            ("Qwen2.5-3B", SMALL, "lora", 2, PLAIN, False),
            ("Qwen2.5-7B", "A100-80G", "full", 1, CHECKPOINTING, False),
            ("Qwen2.5-7B", SMALL, "lora", 2, CHECKPOINTING, True),
            ("Qwen2.5-7B", "RTX4090", "qlora", 1, CHECKPOINTING, False),
            ("Qwen2.5-14B", "A100-80G", "lora", 2, CHECKPOINTING, False),
            ("Qwen2.5-14B", SMALL, "qlora", 1, CHECKPOINTING, False),
            ("Qwen2.5-32B", "A100-80G", "lora", 1, CHECKPOINTING, False),
            ("Qwen2.5-32B", SMALL, "qlora", 1, CHECKPOINTING, False),
            ("Llama-3.2-1B", SMALL, "full", 4, PLAIN, False),
            ("Llama-3.2-3B", SMALL, "lora", 4, CHECKPOINTING, False),
            ("Llama-3.1-70B", HOPPER, "qlora", 1, CHECKPOINTING, False),
            ("gemma-2-2b", SMALL, "full", 1, CHECKPOINTING, False),
            ("gemma-2-9b", SMALL, "lora", 1, CHECKPOINTING, False),
            ("gemma-2-27b", "A100-80G", "qlora", 1, CHECKPOINTING, False),
            ("gemma-3-1b-it", SMALL, "full", 2, PLAIN, False),
            ("Mistral-7B-v0.1", SMALL, "lora", 2, PLAIN, False),
            ("Mistral-Small-24B-Base-2501", "A100-80G", "lora", 1, CHECKPOINTING, False),
            ("phi-4", SMALL, "lora", 1, CHECKPOINTING, False),
            ("Phi-3-mini-4k-instruct", SMALL, "lora", 2, PLAIN, False),
            ("Qwen3-0.6B", "RTX3090", "full", 2, PLAIN, False),
            ("Qwen3-4B", SMALL, "lora", 2, PLAIN, False),
            ("Qwen3-8B", HOPPER, "full", 2, CHECKPOINTING, True),
            ("Qwen3-14B", SMALL, "lora", 1, CHECKPOINTING, False),
            ("Mixtral-8x7B-v0.1", HOPPER, "lora", 1, CHECKPOINTING, False),
            ("DeepSeek-V2-Lite", "A100-80G", "lora", 1, CHECKPOINTING, False),
            ("SmolLM2-360M", "L4", "lora", 4, PLAIN, False),
            ("OLMo-2-1124-7B", "A100-80G", "lora", 2, PLAIN, False),
            ("granite-3.3-2b-instruct", SMALL, "lora", 2, PLAIN, False),
        ),
    )
)


def _pairs(
    model: str,
    gpus: str,
    tuning: str,
    micro_batch: int,
    checkpointing: str,
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method="dpo",
        tuning=tuning,
        micro_batch=micro_batch,
        prompt=256,
        completion=256,
        holds=(checkpointing,),
    )


_PAIRS = tuple(
    starmap(
        _pairs,
        (
            ("Qwen2.5-0.5B", SMALL, "full", 4, PLAIN),
            ("Qwen2.5-3B", SMALL, "lora", 2, CHECKPOINTING),
            ("Qwen2.5-7B", "A100-80G", "lora", 2, CHECKPOINTING),
            ("Qwen2.5-7B", SMALL, "qlora", 2, CHECKPOINTING),
            ("Llama-3.2-1B", SMALL, "full", 2, CHECKPOINTING),
            ("gemma-2-2b", SMALL, "lora", 2, CHECKPOINTING),
            ("Qwen3-14B", "A100-80G", "lora", 1, CHECKPOINTING),
            ("Qwen2.5-32B", "A100-80G", "qlora", 1, CHECKPOINTING),
        ),
    )
)


def _online(
    model: str,
    gpus: str,
    method: str,
    tuning: str,
    micro_batch: int,
    prompt: int,
    holds: tuple[str, ...],
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method=method,
        tuning=tuning,
        micro_batch=micro_batch,
        prompt=prompt,
        completion=16,
        holds=holds,
    )


_ONLINE = tuple(
    starmap(
        _online,
        (
            ("Qwen2.5-0.5B", SMALL, "grpo", "full", 8, 1024, (CHECKPOINTING,)),
            ("Qwen2.5-0.5B", SMALL, "grpo", "full", 4, 512, (PLAIN, "beta=0.04")),
            ("Qwen2.5-0.5B", SMALL, "rloo", "lora", 8, 512, (PLAIN,)),
            ("Qwen2.5-1.5B", SMALL, "grpo", "lora", 16, 512, (CHECKPOINTING,)),
            ("Qwen2.5-1.5B", SMALL, "grpo", "full", 4, 512, (PLAIN, "optim=adamw_torch")),
            ("Qwen2.5-1.5B", SMALL, "grpo", "lora", 8, 512, (PLAIN, "beta=0.04")),
            ("Qwen2.5-3B", SMALL, "rloo", "lora", 8, 512, (CHECKPOINTING,)),
            ("Qwen2.5-7B", "A100-80G", "grpo", "full", 4, 512, (CHECKPOINTING,)),
            ("Qwen2.5-7B", "A100-80G", "grpo", "lora", 8, 512, (PLAIN,)),
            ("Qwen2.5-14B", "A100-80G", "grpo", "lora", 8, 512, (CHECKPOINTING,)),
            ("Qwen2.5-14B", SMALL, "grpo", "qlora", 4, 512, (CHECKPOINTING,)),
            ("Llama-3.1-8B", SMALL, "grpo", "lora", 8, 512, (CHECKPOINTING,)),
            ("Llama-3.2-1B", SMALL, "rloo", "full", 8, 512, (CHECKPOINTING,)),
            ("Qwen3-0.6B", SMALL, "grpo", "full", 8, 512, (PLAIN,)),
            (
                "Qwen3-8B",
                "A100-80G",
                "grpo",
                "lora",
                8,
                512,
                (CHECKPOINTING, "attn_implementation=eager"),
            ),
            ("gemma-3-1b-it", SMALL, "grpo", "lora", 4, 512, (CHECKPOINTING,)),
            ("Mistral-7B-v0.1", SMALL, "grpo", "lora", 4, 512, (CHECKPOINTING,)),
            ("Qwen3-30B-A3B", HOPPER, "grpo", "lora", 4, 256, (CHECKPOINTING,)),
        ),
    )
)


def _on_two_cards(
    model: str,
    gpus: str,
    method: str,
    tuning: str,
    completion: int,
    kind: str,
    holds: tuple[str, ...],
    late: bool,
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method=method,
        tuning=tuning,
        micro_batch=2,
        completion=completion,
        holds=_sharded(kind, *holds),
        late=late,
    )


_TWO_CARDS = tuple(
    starmap(
        _on_two_cards,
        (
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "ddp", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "sft", "lora", 512, "ddp", (PLAIN,), False),
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "zero1", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "zero2", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "zero3", (CHECKPOINTING,), True),
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "fsdp1", (CHECKPOINTING,), True),
            ("Qwen2.5-1.5B", TWO, "sft", "full", 512, "fsdp2", (CHECKPOINTING,), True),
            # What is offloaded is really held by the host, 16 bytes for each parameter: small
            # models.
            (
                "Qwen2.5-0.5B",
                TWO,
                "sft",
                "full",
                512,
                "zero2",
                ("offload_optimizer_device=cpu", CHECKPOINTING),
                False,
            ),
            (
                "Qwen2.5-0.5B",
                TWO,
                "sft",
                "full",
                512,
                "zero3",
                ("offload_optimizer_device=cpu", CHECKPOINTING),
                False,
            ),
            (
                "Qwen2.5-0.5B",
                TWO,
                "sft",
                "full",
                512,
                "fsdp2",
                ("fsdp_offload_params=true", CHECKPOINTING),
                False,
            ),
            ("Qwen2.5-7B", TWO, "sft", "lora", 512, "zero3", (CHECKPOINTING,), False),
            ("Qwen2.5-7B", TWO, "sft", "lora", 512, "fsdp2", (CHECKPOINTING,), False),
            ("Qwen2.5-7B", TWO, "sft", "qlora", 512, "ddp", (CHECKPOINTING,), False),
            ("Llama-3.2-1B", TWO, "dpo", "full", 256, "zero2", (PLAIN,), False),
            ("Llama-3.2-1B", TWO, "dpo", "lora", 256, "zero3", (PLAIN,), False),
            ("gemma-2-2b", TWO, "sft", "lora", 256, "zero3", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "grpo", "lora", 16, "zero2", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "grpo", "full", 16, "zero3", (CHECKPOINTING,), False),
            ("Qwen2.5-1.5B", TWO, "rloo", "full", 16, "fsdp2", (CHECKPOINTING,), False),
        ),
    )
)


def _with_engine(
    model: str,
    gpus: str,
    method: str,
    tuning: str,
    share: float,
    sleep: bool,
    checkpointing: str,
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method=method,
        tuning=tuning,
        micro_batch=4,
        prompt=512,
        completion=32,
        holds=(*_colocated(share, sleep=sleep), checkpointing),
    )


_ENGINES = tuple(
    starmap(
        _with_engine,
        (
            ("Qwen2.5-0.5B", SMALL, "grpo", "full", 0.3, True, PLAIN),
            ("Qwen2.5-0.5B", SMALL, "grpo", "lora", 0.9, True, CHECKPOINTING),
            ("Qwen2.5-0.5B", SMALL, "rloo", "full", 0.4, False, CHECKPOINTING),
            ("Qwen2.5-1.5B", SMALL, "grpo", "full", 0.4, True, CHECKPOINTING),
            ("Qwen2.5-1.5B", SMALL, "grpo", "lora", 0.7, False, CHECKPOINTING),
            ("Qwen2.5-7B", "A100-80G", "grpo", "lora", 0.4, True, CHECKPOINTING),
            ("Qwen2.5-7B", "A100-80G", "grpo", "lora", 0.4, False, CHECKPOINTING),
            ("Qwen2.5-7B", SMALL, "grpo", "qlora", 0.6, True, CHECKPOINTING),
            ("Llama-3.2-1B", SMALL, "grpo", "lora", 0.5, True, PLAIN),
            ("gemma-2-2b", SMALL, "grpo", "lora", 0.5, True, CHECKPOINTING),
        ),
    )
)


def _on_many_cards(
    model: str,
    gpus: str,
    tuning: str,
    kind: str,
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method="sft",
        tuning=tuning,
        micro_batch=1,
        prompt=128,
        completion=128,
        holds=_sharded(kind, CHECKPOINTING),
    )


_MANY_CARDS = (
    *starmap(
        _on_many_cards,
        (
            ("Qwen2.5-0.5B", FOUR, "full", "zero3"),
            ("Qwen2.5-0.5B", FOUR, "full", "fsdp2"),
            ("Qwen2.5-0.5B", FOUR, "lora", "ddp"),
            ("Qwen2.5-0.5B", FOUR, "full", "zero2"),
            ("Qwen2.5-7B", FOUR, "full", "zero3"),
            ("Qwen2.5-7B", FOUR, "full", "fsdp1"),
            ("Qwen2.5-0.5B", EIGHT, "full", "zero3"),
            ("Qwen2.5-72B", EIGHT, "lora", "zero3"),
        ),
    ),
    Setup(
        model="Llama-3.2-1B",
        gpus=FOUR,
        micro_batch=2,
        completion=16,
        holds=(*_sharded("ddp"), *_colocated(0.3, sleep=True, tensor_parallel=4), PLAIN),
    ),
)


# Small models, so that each kind of sharding and engine meets every method.
def _of_kind(
    kind: str,
    method: str,
    tuning: str,
    micro_batch: int,
    completion: int,
    holds: tuple[str, ...],
) -> Setup:
    return Setup(
        model="Llama-3.2-1B",
        gpus=TWO,
        method=method,
        tuning=tuning,
        micro_batch=micro_batch,
        prompt=256,
        completion=completion,
        holds=_sharded(kind, *holds),
        late=kind == "fsdp1",
    )


_KINDS = tuple(
    starmap(
        _of_kind,
        (
            ("zero3", "grpo", "full", 4, 16, (CHECKPOINTING,)),
            ("fsdp2", "grpo", "lora", 4, 16, (CHECKPOINTING,)),
            ("zero2", "grpo", "full", 4, 16, (CHECKPOINTING,)),
            ("fsdp1", "sft", "full", 4, 256, (PLAIN,)),
            ("zero1", "dpo", "full", 2, 256, (CHECKPOINTING,)),
            ("ddp", "rloo", "lora", 4, 16, (PLAIN,)),
            ("fsdp2", "dpo", "full", 2, 256, (CHECKPOINTING,)),
            ("zero3", "rloo", "lora", 4, 16, (CHECKPOINTING,)),
            ("fsdp1", "sft", "lora", 4, 256, (CHECKPOINTING,)),
            ("zero1", "sft", "full", 4, 256, (PLAIN,)),
            ("fsdp2", "sft", "full", 4, 256, (PLAIN,)),
            ("zero3", "sft", "full", 4, 256, (PLAIN,)),
            ("zero2", "sft", "lora", 4, 256, (CHECKPOINTING,)),
            ("zero3", "dpo", "full", 2, 256, (CHECKPOINTING,)),
            ("fsdp1", "dpo", "full", 2, 256, (CHECKPOINTING,)),
            ("ddp", "dpo", "full", 2, 256, (CHECKPOINTING,)),
            ("zero1", "grpo", "lora", 4, 16, (PLAIN,)),
            ("zero2", "rloo", "full", 4, 16, (PLAIN,)),
            ("ddp", "sft", "qlora", 4, 256, (CHECKPOINTING,)),
            ("ddp", "grpo", "full", 4, 16, (CHECKPOINTING,)),
        ),
    )
)


def _with_share(
    model: str,
    gpus: str,
    method: str,
    tuning: str,
    sharded: tuple[str, ...],
    share: float,
    sleep: bool,
    tensor_parallel: int,
    checkpointing: str,
) -> Setup:
    return Setup(
        model=model,
        gpus=gpus,
        method=method,
        tuning=tuning,
        micro_batch=4,
        prompt=256,
        completion=32,
        holds=(
            *sharded,
            *_colocated(share, sleep=sleep, tensor_parallel=tensor_parallel),
            checkpointing,
        ),
    )


_SHARES = tuple(
    starmap(
        _with_share,
        (
            ("Llama-3.2-1B", SMALL, "grpo", "lora", (), 0.3, False, 1, PLAIN),
            ("Llama-3.2-1B", SMALL, "grpo", "full", (), 0.6, True, 1, CHECKPOINTING),
            ("gemma-3-1b-it", SMALL, "grpo", "lora", (), 0.4, True, 1, CHECKPOINTING),
            ("Llama-3.2-1B", TWO, "grpo", "lora", _sharded("ddp"), 0.4, True, 2, CHECKPOINTING),
            ("Llama-3.2-1B", SMALL, "rloo", "lora", (), 0.8, True, 1, PLAIN),
            ("Llama-3.2-1B", TWO, "grpo", "full", _sharded("zero3"), 0.5, True, 1, CHECKPOINTING),
            ("Llama-3.2-1B", SMALL, "grpo", "qlora", (), 0.7, True, 1, CHECKPOINTING),
            ("Qwen3-0.6B", SMALL, "grpo", "full", (), 0.5, False, 1, CHECKPOINTING),
            ("Llama-3.2-1B", TWO, "grpo", "lora", _sharded("zero2"), 0.3, False, 1, CHECKPOINTING),
            ("Llama-3.2-1B", SMALL, "grpo", "lora", (), 0.9, True, 1, PLAIN),
            ("Llama-3.2-1B", TWO, "grpo", "full", _sharded("fsdp2"), 0.4, True, 1, CHECKPOINTING),
        ),
    )
)


def _with_server(
    method: str,
    tuning: str,
    share: float,
    checkpointing: str,
) -> Setup:
    return Setup(
        model="Llama-3.2-1B",
        gpus=TWO,
        method=method,
        tuning=tuning,
        micro_batch=4,
        prompt=256,
        completion=32,
        holds=(
            "use_vllm=true",
            "vllm_mode=server",
            f"vllm_gpu_memory_utilization={share}",
            checkpointing,
        ),
    )


_SERVER = tuple(
    starmap(
        _with_server,
        (
            ("grpo", "full", 0.5, CHECKPOINTING),
            ("rloo", "lora", 0.9, PLAIN),
        ),
    )
)

WINDOW = 12
"""Setups within which those on one machine come together: they share a worker's imports."""


def _mixed(*groups: tuple[Setup, ...]) -> tuple[Setup, ...]:
    """Return all in an order in which any beginning of it has its part of each group."""
    placed = []
    for group in groups:
        for index, setup in enumerate(group):
            placed.append(((index + 0.5) / len(group), setup))
    return tuple(
        setup for _, setup in sorted(placed, key=lambda place_and_setup: place_and_setup[0])
    )


LARGE = ("7B", "8B", "9b", "14B", "24B", "27b", "30B", "32B", "70B", "72B", "phi-4", "OLMo", "Lite")
"""Parts of the names of models whose layers take the host minutes."""


def _ordered(setups: tuple[Setup, ...]) -> tuple[Setup, ...]:
    """Return quick ones first, engines last, and those on one machine together within a window."""

    def slowness(setup: Setup) -> int:
        return (
            2
            if "use_vllm=true" in setup.holds
            else int(any(word in setup.model for word in LARGE) or setup.cards > 2)
        )

    by_time = sorted(setups, key=slowness)
    windows = (by_time[at : at + WINDOW] for at in range(0, len(by_time), WINDOW))
    ordered: list[Setup] = []
    for window in windows:
        ordered += sorted(window, key=lambda setup: (slowness(setup), setup.gpus))
    return tuple(ordered)


SETUPS: tuple[Setup, ...] = _ordered(
    _mixed(
        _FIRST, _ROWS, _PAIRS, _TWO_CARDS, _ONLINE, _ENGINES, _MANY_CARDS, _KINDS, _SHARES, _SERVER
    )
)
