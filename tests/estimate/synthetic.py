"""Synthetic traces, for tests whose results can be computed by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autotune import catalog
from autotune.catalog import Gpu
from autotune.core.composition import CompletionSource, Composition, EngineSettings, Resident
from autotune.core.job import Hardware
from autotune.core.measurement import Phase
from autotune.core.prediction import TraceBasis
from autotune.core.trace import Inventory, Mark, Part, Trace
from autotune.core.units import GIB, MIB
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.phase_use import Replay
from autotune.estimate.trace_context import PredictionInput
from autotune.estimate.track import Track

PARTS: tuple[Part, ...] = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspaces",
    "inputs",
    "kv_cache",
    "communication",
)

SMALL_QWEN: Mapping[str, object] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def config_of(name: str) -> Mapping[str, object]:
    """Return the configuration of a catalogued model."""
    return next(model.config for model in catalog.models() if name in model.ids)


def gpu_of(name: str) -> Gpu:
    """Return a catalogued GPU."""
    return next(gpu for gpu in catalog.gpus() if gpu.name == name)


class Book:
    """Writer of a trace, event by event."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.events: list[int] = []
        self.marks: list[Mark] = []

    def enter(
        self,
        phase: Phase,
        step: int = 0,
    ) -> None:
        self.marks.append(
            Mark(
                event=len(self.events),
                phase=phase,
                step=step,
            )
        )

    def make(
        self,
        size: int,
        part: Part,
    ) -> int:
        self.sizes.append(size)
        self.parts.append(PARTS.index(part))
        self.events.append(len(self.sizes))
        return len(self.sizes)

    def drop(self, number: int) -> None:
        self.events.append(-number)

    def trace(
        self,
        *,
        basis: TraceBasis = "traced",
        high_extra_bytes: int = 0,
    ) -> Trace:
        return Trace(
            basis=basis,
            versions={"torch": "2.13.0"},
            device="cuda",
            layers=2,
            sizes=tuple(self.sizes),
            parts=tuple(self.parts),
            part_names=PARTS,
            events=tuple(self.events),
            marks=tuple(self.marks),
            work=(),
            inventory=Inventory(
                parameters=10,
                trainable_parameters=10,
                weight_bytes=100 * MIB,
                trainable_bytes=100 * MIB,
                layer_bytes=(40 * MIB, 40 * MIB),
                layer_trainable=(4, 4),
                largest_parameter=2,
            ),
            high_extra_bytes=high_extra_bytes,
        )


def training(
    *,
    micro_batch: int = 1,
    steps: int = 2,
    layers: int = 4,
    basis: TraceBasis = "traced",
    high_extra_bytes: int = 0,
) -> Trace:
    """Full fine-tuning of 100 MiB: per layer 30 MiB of activations and per sample, logits of 50,
    Adam after the first step.
    """
    book = Book()
    book.enter("load")
    for _ in range(4):
        book.make(25 * MIB, "weights")
    for step in range(steps):
        _step(book, step, micro_batch, layers)
    return book.trace(basis=basis, high_extra_bytes=high_extra_bytes)


def _step(
    book: Book,
    step: int,
    micro_batch: int,
    layers: int,
) -> None:
    book.enter("forward", step)
    activations = [book.make(30 * MIB * micro_batch, "activations") for _ in range(layers)]
    logits = book.make(50 * MIB * micro_batch, "logits")
    book.enter("backward", step)
    gradients = []
    book.drop(logits)
    for number in reversed(activations):
        gradients.append(book.make(25 * MIB, "gradients"))
        book.drop(number)
    book.enter("optimizer", step)
    if step == 0:
        for _ in range(2 * len(gradients)):
            book.make(25 * MIB, "optimizer")
    for number in gradients:
        book.drop(number)


A100 = Gpu(
    name="A100-40G",
    memory_mib=40960,
    seen_by="nvidia-smi",
    source="https://example.org",
    names=("a100",),
    compute_capability="8.0",
    multiprocessors=108,
    link="nvlink",
)

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
"""config.json of Qwen2.5-1.5B."""


def replay(
    trace: Trace,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    empty_cache_before: Collection[int] = (),
    resting_before: int | None = None,
) -> Replay:
    """Replay every event with the trace's own sizes."""
    track = Track(trace, empty_cache_before=empty_cache_before, resting_before=resting_before)
    return track.replay(settings=settings, capacity_bytes=capacity_bytes)


def hardware(gpu: Gpu | None = A100, count: int = 1) -> Hardware:
    memory = 40 * GIB if gpu is None else gpu.memory_bytes
    return Hardware(
        kind="cuda",
        name="made" if gpu is None else gpu.name,
        count=count,
        memory_bytes=memory,
        here=False,
    )


def composition(
    *,
    micro_batch: int = 1,
    ranks: int = 1,
    generation: CompletionSource = "none",
    engine: EngineSettings | None = None,
    adapter_rank: int | None = None,
    other_models: tuple[Resident, ...] = (),
) -> Composition:
    everywhere = tuple(range(ranks))
    policy = Resident(
        role="policy",
        model="made",
        ranks=everywhere,
        dtype="bfloat16",
        trains=True,
        adapter_rank=adapter_rank,
    )
    engines = (
        ()
        if engine is None
        else (
            Resident(
                role="engine",
                model="made",
                ranks=everywhere,
                dtype="bfloat16",
                trains=False,
            ),
        )
    )
    return Composition(
        residents=(policy, *engines, *other_models),
        ranks=ranks,
        micro_batch=micro_batch,
        accumulation=1,
        generation_batch=8 * ranks,
        prompt_length=512,
        completion_length=512,
        checkpointing=False,
        optimizer="adamw_torch_fused",
        generation=generation,
        engine=engine,
        sharded_by="none" if ranks == 1 else "ddp",
    )


def situation(**changed: Any) -> PredictionInput:
    facts: dict[str, Any] = {
        "candidate_id": "made",
        "composition": composition(),
        "hardware": hardware(),
        "gpu": A100,
        "limit_bytes": 40 * GIB,
        "config": CONFIG,
        "trace": training(),
    }
    return PredictionInput(**{**facts, **changed})
