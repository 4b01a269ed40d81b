"""Copies between device and host, and launches of an engine without graphs: worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.catalog import efficiency, gpus
from autotune.core.composition import Composition, EngineSettings
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.core.trace import Inventory
from autotune.estimate.model_shape import shape
from autotune.estimate.throughput import generation
from autotune.estimate.throughput.generation import GenerationLoad
from autotune.estimate.throughput.host_copies import (
    fetched_in_rollout,
    host_link_gb_per_second,
    with_host_copies,
)
from tests.estimate.synthetic import config_of
from tests.estimate.test_throughput import composition

GPUS = {gpu.name: gpu for gpu in gpus()}
H100 = GPUS["H100"]
CONFIG = config_of("Qwen/Qwen2.5-7B")
PHASES: tuple[Phase, ...] = ("score", "forward", "backward", "optimizer", "sync")

# 7 B weights in float32, trained in full: 28 GB, and 56 GB of Adam's moments.
INVENTORY = Inventory(
    parameters=7 * 10**9,
    trainable_parameters=7 * 10**9,
    weight_bytes=28 * 10**9,
    trainable_bytes=28 * 10**9,
    layer_bytes=(1,) * 28,
    layer_trainable=(1,) * 28,
    largest_parameter=1,
)


def copies(shape_of_step: Composition) -> dict[Phase, float]:
    """Return the seconds that copies add to phases of one second each."""
    seconds = dict.fromkeys(PHASES, Estimate.exactly(1.0))
    with_copies = with_host_copies(
        seconds,
        shape_of_step,
        INVENTORY,
        shape(CONFIG),
        H100,
        micro_steps=2,
        optimizer_steps=1,
    )
    return {phase: estimate.value - 1.0 for phase, estimate in with_copies.items()}


def test_without_offloading_nothing_is_copied() -> None:
    assert set(copies(composition()).values()) == {0.0}


def test_offloaded_state_goes_and_comes_back_around_each_phase_that_uses_it() -> None:
    offloading = composition(
        ranks=8,
        sharded_by="fsdp1",
        offloaded_in_rollout=("weights", "optimizer"),
    )
    rate = 64 * efficiency("state_copy_share").value  # PCIe 5
    weights = 2 * 28 / 8 / rate
    moments = 2 * 56 / 8 / rate
    added = copies(offloading)
    assert added["score"] == pytest.approx(weights)
    assert added["sync"] == pytest.approx(weights)
    assert added["optimizer"] == pytest.approx(weights + moments)
    assert added["forward"] == added["backward"] == 0


def test_an_optimizer_that_waits_on_the_host_is_copied_around_its_step() -> None:
    added = copies(
        composition(
            ranks=8,
            sharded_by="fsdp2",
            offloads_optimizer=True,
        )
    )
    pinned = 64 * efficiency("host_link_share").value
    assert added["optimizer"] == pytest.approx(2 * 56 / 8 / pinned)


def test_an_optimizer_on_the_host_is_slower_than_all_copies_for_it() -> None:
    """ZeRO-2 with DeepSpeed's CPUAdam on 8 cards: 28 GB of gradients and weights, 3.5 on each."""
    added = copies(
        composition(
            ranks=8,
            sharded_by="zero2",
            steps_on_host=True,
        )
    )
    pinned = 64 * efficiency("host_link_share").value
    exposed = efficiency("exposed_exchange_share").value
    # Two micro-steps send their gradients, the second fetches the first one's before.
    assert added["backward"] == pytest.approx(3 * 3.5 / pinned * exposed)
    # All ranks share the host: 7 billion parameters, however many cards.
    assert added["optimizer"] == pytest.approx(7 * 0.6 + 3.5 / pinned)
    assert added["forward"] == added["sync"] == 0


def test_a_step_on_the_host_takes_most_of_a_published_step() -> None:
    """DeepSpeed's pull request 7474: Qwen2.5-3B on two A100 with ZeRO-Offload, whole steps of 2.4
    to 3.1 s, which bound the optimizer's part from above.
    """
    three_b = replace(
        INVENTORY,
        parameters=3_085_938_688,
        trainable_parameters=3_085_938_688,
        trainable_bytes=6_171_877_376,
    )
    with_copies = with_host_copies(
        {"optimizer": Estimate.exactly(0.0)},
        composition(
            ranks=2,
            sharded_by="zero2",
            steps_on_host=True,
        ),
        three_b,
        shape(CONFIG),
        GPUS["A100-40G"],
        micro_steps=1,
        optimizer_steps=1,
    )
    step = with_copies["optimizer"]
    assert step.low < 2.4 / 2 < step.value < 3.1


def test_weights_on_the_host_are_fetched_for_each_pass() -> None:
    added = copies(
        composition(
            ranks=4,
            sharded_by="zero3",
            weights_on_host=True,
        )
    )
    shard = 28 / 4 / (64 * efficiency("host_link_share").value)
    exposed = shard * efficiency("exposed_exchange_share").value
    assert added["score"] == pytest.approx(exposed)
    assert added["forward"] == added["backward"] == pytest.approx(2 * exposed)
    assert added["optimizer"] == 0


def test_a_trainer_that_gathers_per_token_fetches_its_shard_for_each() -> None:
    generating = composition(
        ranks=4,
        sharded_by="zero3",
        weights_on_host=True,
        generation="trainer",
        engine=None,
    )
    rollout = load(
        config=CONFIG,
        by_engine=False,
        sequences=8,
        batch=4,
        completion_length=100,
    )
    once = fetched_in_rollout(generating, INVENTORY, rollout, H100)
    assert once.value == pytest.approx(28 / 4 / (64 * efficiency("host_link_share").value))
    per_token = replace(generating, gathers_per_token=True)
    fetched = fetched_in_rollout(per_token, INVENTORY, rollout, H100)
    assert fetched.value == pytest.approx(2 * 100 * once.value)  # two batches of 100 tokens


def test_half_of_the_copies_of_activations_is_exposed_in_each_pass() -> None:
    saving = composition(
        micro_batch=1,
        prompt_length=4096,
        completion_length=12288,
        activations_in_flight=5,
    )
    # 2 micro-steps of 16,384 tokens, 28 layers, 3,584 numbers of 2 bytes
    moved = 2 * 16384 * 28 * 3584 * 2
    pinned = 64e9 * efficiency("host_link_share").value
    exposed = moved / pinned * efficiency("exposed_exchange_share").value
    added = copies(saving)
    assert added["forward"] == added["backward"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("card", "rate"), [("T4", 16), ("A100-40G", 32), ("H100", 64), ("GB300", 450)]
)
def test_the_link_to_the_host_is_the_cards_generation(card: str, rate: float) -> None:
    assert host_link_gb_per_second(GPUS[card]) == rate


# Engines.


def asleep(**changes: object) -> float:
    """Return the seconds that a sleeping engine adds to the sync."""
    engine = EngineSettings(
        utilization=0.5,
        max_model_length=600,
        max_num_seqs=64,
        tensor_parallel=2,
        sleep=True,
    )
    engine = replace(engine, **changes)  # type: ignore[arg-type]
    return copies(composition(ranks=2, engine=engine))["sync"]


def test_an_engine_that_keeps_its_weights_copies_its_own_ones() -> None:
    """Sleep level 1 of a 7B in bfloat16 on two GPUs: 7 GB each way, though the trainer's weights
    are float32. Level 2 drops them.
    """
    pinned = 64 * efficiency("host_link_share").value
    assert asleep(keeps_weights=True) == pytest.approx(2 * 7 / pinned)
    assert asleep(keeps_weights=True, quantised_bits=4) == pytest.approx(2 * 7 / 4 / pinned)
    assert asleep() == 0
    assert asleep(keeps_weights=True, shares_weights=True) == 0
    assert asleep(keeps_weights=True, sleep=False) == 0


def load(**changes: object) -> GenerationLoad:
    fields = GenerationLoad(
        config=config_of("Qwen/Qwen2.5-1.5B"),
        dtype="bfloat16",
        sequences=64,
        prompts=64,
        prompt_length=100,
        completion_length=512,
        batch=64,
        by_engine=True,
        tensor_parallel=2,
    )
    return replace(fields, **changes)  # type: ignore[arg-type]


def test_an_adapter_in_an_eager_engine_takes_what_a_public_log_took() -> None:
    """verl-data, math/Qwen2.5-1.5B with LoRA: 512 steps of 64 rows on two GPUs in 24 s."""
    eager = generation.seconds(load(eager=True, serves_adapter=True), H100)
    assert eager.low <= 24 <= eager.high
    captured = generation.seconds(load(), H100)
    assert captured.high < 24


def test_state_that_moves_is_pinned() -> None:
    """verl-data, gsm8k/Qwen2.5-14B with LoRA on 8 H100: 59 GB of float32 weights are loaded and
    offloaded again within 2.0 s of log-probabilities, 14.8 GB on each card. Pageable memory, at 3
    to 12 GB/s, takes longer than all of the phase but at its best.
    """
    moved = 2 * 59 / 8
    offloading = composition(ranks=8, sharded_by="fsdp1", offloaded_in_rollout=("weights",))
    weights = replace(INVENTORY, weight_bytes=59 * 10**9)
    one_second: dict[Phase, Estimate] = {"score": Estimate.exactly(1.0)}
    with_copies = with_host_copies(
        one_second,
        offloading,
        weights,
        shape(CONFIG),
        H100,
        micro_steps=1,
        optimizer_steps=1,
    )
    spent = with_copies["score"].value - 1.0
    assert 0.3 < spent < 2.0
    assert moved / spent > 12


def test_an_eager_engine_launches_the_exchanges_of_its_ranks_too() -> None:
    """verl-data, gsm8k/Qwen2.5-7B with LoRA, engines of 2 H100 with 80 rows: from 559 to 937 tokens
    of the longest completion the rollout takes 15.5 s longer, 41 ms for each.
    """
    changes = {"config": CONFIG, "eager": True, "serves_adapter": True, "sequences": 8, "batch": 8}
    longer = generation.seconds(load(completion_length=937, **changes), H100)
    shorter = generation.seconds(load(completion_length=559, **changes), H100)
    assert (longer.value - shorter.value) / (937 - 559) == pytest.approx(0.041, rel=0.1)
    one_gpu = generation.step(load(tensor_parallel=1, **changes), H100)
    assert one_gpu.value < generation.step(load(**changes), H100).value


def test_graphs_hide_the_launches_of_an_adapter() -> None:
    """SkyRL's issue 607: 481 s eager with LoRA, 222 s with graphs, 214 s eager without. It states
    no lengths: they have to be long enough for the device to be the slower one without an adapter.
    """

    def seconds(**changes: object) -> float:
        four_b = load(
            config=config_of("Qwen/Qwen3-4B"),
            completion_length=6000,
            sequences=128,
            batch=128,
            tensor_parallel=1,
            **changes,
        )
        return generation.seconds(four_b, GPUS["H100-NVL-94G"]).value

    eager_with_adapter = seconds(eager=True, serves_adapter=True)
    assert 1.5 <= eager_with_adapter / seconds(serves_adapter=True) <= 3.5
    assert seconds(eager=True) / seconds() < 1.3
    assert 1.0 < seconds(serves_adapter=True) / seconds() < 1.15


def test_a_colocated_engine_states_how_it_launches() -> None:
    engine = EngineSettings(
        utilization=0.5,
        max_model_length=600,
        max_num_seqs=64,
        eager=True,
    )
    colocated = composition(engine=engine, syncs_adapter_only=True)
    loaded = generation.load_of(colocated, None, CONFIG, None, 8)
    assert loaded.eager
    assert loaded.serves_adapter
