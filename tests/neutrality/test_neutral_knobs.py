"""Neutral knobs of the search spaces: the gradient of one optimizer step of the real GRPOTrainer
stays the same.

Every trainer here generates the same batch (same seed, same generation batch). Completions have
different lengths, so that a loss that normalises per local batch is detected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog.space_files import load_space, names
from autotune.frameworks.trl.legality import GRPO_LOSSES
from autotune.worker.synthetic import tiny_config, write_model_folder
from tests.neutrality.spread_step import PROMPTS, sums_of_ids

GENERATION_BATCH = 8
SHAPES = [(1, 8), (2, 4), (4, 2), (8, 1)]
ROUNDING = 1e-5
"""float32 sums in another order; a change of meaning is a hundred times that and more."""

PROVEN = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "optim",
}
PROVEN_ON_RANKS = {"sharding", "ds3_gather_for_generation", "attn_implementation"}
"""Knobs proven in test_neutral_topology."""

EXCLUDED = {
    "use_vllm": (
        "another engine draws other samples of the same policy; TRL corrects the difference by"
        " importance sampling"
    ),
    "vllm_gpu_memory_utilization": (
        "sizes the KV cache of an engine that takes no part in the backward pass"
    ),
    "vllm_enable_sleep_mode": "moves the engine's memory while the trainer works; needs a GPU",
    "vllm_mode": "where the same engine runs; it takes no part in the backward pass",
    "token_budget": (
        "rows are full at any budget, so that a mean over a micro-batch's tokens weighs them about"
        " alike"
    ),
    "max_inflight_tasks": (
        "completions that a server generates at a time; how old they may be is max_staleness"
    ),
    "server_gpus": "how an engine that takes no part in the backward pass is split",
    "server_tensor_parallel_size": "how an engine that takes no part in the backward pass is split",
    "vllm_tensor_parallel_size": "how an engine that takes no part in the backward pass is split",
    "PYTORCH_CUDA_ALLOC_CONF": "where torch puts its blocks on a GPU, never what is in them",
    "activation_offloading": (
        "copies saved activations to the host and back, unchanged; needs a GPU"
    ),
    "offload_optimizer_device": (
        "where DeepSpeed keeps and updates the optimizer's state; needs a GPU"
    ),
    "offload_param_device": "where DeepSpeed keeps weights while no layer needs them; needs a GPU",
    "vllm_max_model_length": (
        "a window of at least prompt + completion, which legality demands, cuts nothing"
    ),
}

pytestmark = pytest.mark.slow


def test_every_neutral_knob_is_proven_here_or_excluded_with_a_reason() -> None:
    """Covers TRL. Neutral knobs of other frameworks are taken from their sources
    (docs/frameworks.md).
    """
    neutral = set()
    for space in map(load_space, names()):
        for knob in (*space.knobs, *space.remedies):
            if space.framework == "trl" and knob.effect == "neutral":
                neutral.add(knob.name)
    listed = PROVEN | PROVEN_ON_RANKS | set(EXCLUDED)
    assert neutral == listed, (
        f"in PROVEN with a test, or in EXCLUDED with a reason: {sorted(neutral ^ listed)}"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_model_folder(
        tmp_path_factory.mktemp("neutral") / "model", tiny_config(vocab=512), weights=True
    )
    path = folder / "generation_config.json"
    # A tenth of the vocabulary ends a completion: random weights then stop at all lengths.
    ends = [1, *range(300, 350)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    return str(folder)


Step = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def one_step(model: str, tmp_path_factory: pytest.TempPathFactory) -> Step:
    return lambda **settings: _one_step(model, tmp_path_factory.mktemp("run"), settings)


def _one_step(
    model: str,
    folder: Path,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Gradient, update and sampled completions of one optimizer step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    record: dict[str, Any] = {}

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            record["gradient"] = flat(gradients)

        def on_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            record["update"] = flat(model.parameters()) - record["before"]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        record.setdefault("completions", sorted(map(tuple, completion_ids)))
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
        max_completion_length=24,
        max_grad_norm=0.0,
        learning_rate=1e-2,
        seed=7,
        **settings,
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        callbacks=[Recorder()],
    )
    record["before"] = flat(trainer.model.parameters())
    trainer.train()
    return record


def flat(tensors: Iterable[Any]) -> Any:
    """Return the numbers of all tensors in one."""
    import torch

    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def distance(first: Any, second: Any) -> float:
    """Return the distance of two gradients relative to their size."""
    return float((first - second).norm() / first.norm())


def shape(batch: int, accumulation: int) -> dict[str, int]:
    assert batch * accumulation == GENERATION_BATCH
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


def spread_over_shapes(one_step: Step, **settings: Any) -> float:
    """The largest distance between the whole batch at once and any split of it."""
    unsplit = one_step(**shape(8, 1), **settings)
    lengths = set(map(len, unsplit["completions"]))
    assert len(lengths) > 2 and float(unsplit["gradient"].norm()) > 1e-6, (
        "the batch would show no difference"
    )
    worst = 0.0
    for batch, accumulation in SHAPES[:-1]:
        split = one_step(**shape(batch, accumulation), **settings)
        assert split["completions"] == unsplit["completions"], "not the same generated batch"
        worst = max(worst, distance(unsplit["gradient"], split["gradient"]))
    return worst


@pytest.mark.parametrize("loss_type", [loss for loss in GRPO_LOSSES if loss != "bnpo"])
def test_micro_batch_against_accumulation_is_neutral(one_step: Step, loss_type: str) -> None:
    assert spread_over_shapes(one_step, loss_type=loss_type) < ROUNDING


def test_micro_batch_is_neutral_with_a_reference_model(one_step: Step) -> None:
    assert spread_over_shapes(one_step, beta=0.1) < ROUNDING


LEARNS = [{"loss_type": "bnpo"}, {"entropy_coef": 0.5}, {"top_entropy_quantile": 0.3}]


@pytest.mark.parametrize("settings", LEARNS, ids=str)
def test_micro_batch_learns_where_the_space_says_so(
    one_step: Step, settings: dict[str, Any]
) -> None:
    knob = load_space("grpo")["per_device_train_batch_size"]
    assert knob.effect_under({"loss_type": "dapo", **settings}) == "learning"
    assert spread_over_shapes(one_step, **settings) > 100 * ROUNDING


def test_micro_batch_is_called_neutral_by_default() -> None:
    knob = load_space("grpo")["per_device_train_batch_size"]
    assert (
        knob.effect_under({"loss_type": "dapo", "entropy_coef": 0.0, "top_entropy_quantile": 1.0})
        == "neutral"
    )
    assert knob.effect_under({}) == "neutral"


def test_gradient_checkpointing_is_neutral(one_step: Step) -> None:
    without = one_step(**shape(4, 2), gradient_checkpointing=False)
    with_it = one_step(**shape(4, 2), gradient_checkpointing=True)
    assert without["completions"] == with_it["completions"]
    assert distance(without["gradient"], with_it["gradient"]) < ROUNDING


def test_the_neutral_optimizers_make_the_same_update(one_step: Step) -> None:
    """Equal gradients have to lead to equal updates."""
    plain = one_step(**shape(4, 2), optim="adamw_torch")
    fused = one_step(**shape(4, 2), optim="adamw_torch_fused")
    # Adam's first step divides by the gradient's own size, so rounding shows where that is next to
    # nothing.
    assert distance(plain["update"], fused["update"]) < 1e-3
    adafactor = one_step(**shape(4, 2), optim="adafactor")
    assert distance(plain["update"], adafactor["update"]) > 1e-2
    knob = load_space("grpo")["optim"]
    assert (
        knob.effect_under({"optim": "adamw_torch"}) == "neutral"
        and knob.effect_under({"optim": "adafactor"}) == "learning"
    )


def test_a_staler_generation_learns_something_else() -> None:
    with_it = set()
    for space in map(load_space, names()):
        if "steps_per_generation" in space:
            with_it.add(space.name)
            assert space["steps_per_generation"].effect == "learning"
    assert {"grpo", "grpo-wide", "demo"} <= with_it
