"""Tracing of sharded steps: FSDP2 on a rank of a fake group, and the log of module uses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from autotune.core.trace import Trace  # noqa: E402
from autotune.worker.tracing import parameter_uses  # noqa: E402
from tests.counted_memory import two_ranks, two_ranks_loop  # noqa: E402

SMALL = {"batch": 1, "length": 8, "shape": {"num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def model_bytes() -> int:
    """Bytes of all parameters."""
    return sum(
        p.numel() * p.element_size()
        for p in two_ranks_loop.build({"kind": "none", **SMALL}).parameters()
    )


def weights_at_first_forward(trace: Trace) -> int:
    first = next(mark.event for mark in trace.marks if mark.phase == "forward")
    return trace.live_parts_at(first - 1)["weights"]


def test_fsdp2_keeps_a_shard_of_the_weights_on_each_rank(model_bytes: int) -> None:
    for rank in range(2):
        trace = two_ranks.followed({"kind": "fsdp2", **SMALL}, rank)
        assert weights_at_first_forward(trace) == pytest.approx(model_bytes / 2, rel=0.001)


def test_on_a_gpu_the_whole_model_is_never_on_the_device(model_bytes: int) -> None:
    trace = two_ranks.followed({"kind": "fsdp2", **SMALL}, 0, device="cuda")
    load = max(at for mark, span in trace.stretches() if mark.phase == "load" for at in span)
    embeddings = two_ranks_loop.SHAPE["vocab_size"] * two_ranks_loop.SHAPE["hidden_size"] * 4
    assert (
        embeddings < two_ranks.peaks(trace)["load0"] < 0.6 * model_bytes + embeddings
    )  # one parameter is whole at a time
    assert weights_at_first_forward(trace) == pytest.approx(model_bytes / 2, rel=0.001)
    assert trace.marks[0].event == 0
    assert load < len(trace.events)


def test_on_a_gpu_each_parameter_arrives_whole_and_is_sharded_while_the_next_one_is_there() -> None:
    """accelerate's order: the next whole parameter is requested before the last one is freed."""
    trace = two_ranks.followed({"kind": "fsdp2", **SMALL}, 0, device="cuda")
    parameters = [
        p.numel() * p.element_size()
        for p in two_ranks_loop.build({"kind": "none", **SMALL}).parameters()
    ]
    load = [
        trace.events[at] for mark, span in trace.stretches() if mark.phase == "load" for at in span
    ]
    temporary = [entry for entry in load if entry > 0 and -entry in load]
    assert [trace.sizes[entry - 1] for entry in temporary] == parameters
    for entry, following in itertools.pairwise(temporary):
        assert load.index(following) == load.index(-entry) - 1
    permanent = [trace.sizes[entry - 1] for entry in load if entry > 0 and -entry not in load]
    assert permanent[2 : 2 + len(parameters)] == [
        size // 2 for size in parameters
    ]  # after two buffers


def test_gathered_and_reduced_buffers_are_communication(model_bytes: int) -> None:
    trace = two_ranks.followed({"kind": "fsdp2", **SMALL, "bf16": True}, 0, device="cuda")
    number = trace.part_names.index("communication")
    gathered = sum(
        size for size, part in zip(trace.sizes, trace.parts, strict=True) if part == number
    )
    assert (
        gathered > 4 * model_bytes / 2
    )  # in bfloat16: into a buffer and out of it, forward and backward


def test_an_adapter_is_part_of_its_layers_unit(model_bytes: int) -> None:
    """The Trainer has PEFT's wrap policy for FSDP1 alone: under FSDP2 each decoder layer is
    gathered by itself.
    """
    pytest.importorskip("peft")
    trace = two_ranks.followed(
        {
            "kind": "fsdp2",
            **SMALL,
            "bf16": True,
            "lora_r": 4,
        },
        0,
        device="cuda",
    )
    number = trace.part_names.index("communication")
    gathered = [size for size, part in zip(trace.sizes, trace.parts, strict=True) if part == number]
    assert max(gathered) < 0.6 * model_bytes / 2  # one unit in bfloat16, never the whole model


def test_the_process_group_is_destroyed() -> None:
    two_ranks.followed({"kind": "fsdp2", **SMALL}, 0)
    assert not torch.distributed.is_initialized()


def test_offloading_fsdp2_is_refused_by_name() -> None:
    from autotune.worker.tracing import Untraceable

    with pytest.raises(Untraceable, match="offloaded to the host"):
        two_ranks.followed({"kind": "fsdp2", **SMALL, "options": {"offload_params": True}}, 0)


@pytest.mark.parametrize("kind", ["none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_accelerate_casts_unless_fsdp2_or_zero(kind: str) -> None:
    from autotune.worker.tracing import fsdp2

    assert fsdp2.autocasts({"sharding": {"kind": kind, "ranks": 2}}) == (
        kind in ("none", "ddp", "fsdp1")
    )


def test_deepspeed_trains_in_one_dtype() -> None:
    trace = two_ranks.followed(
        {
            "kind": "zero2",
            **SMALL,
            "bf16": True,
            "lora_r": 4,
        },
        0,
    )
    assert trace.usage is not None
    assert {parameter.size // parameter.count for parameter in trace.usage.parameters} == {2}


def test_every_use_has_its_end_and_every_trained_parameter_its_gradient() -> None:
    trace = two_ranks.followed({"kind": "zero3", **SMALL, "checkpointing": True}, 0)
    usage = trace.usage
    assert usage is not None
    kinds = [use[1] for use in usage.uses]
    assert kinds.count(0) == 2  # two steps of one pass each
    gradients = [use for use in usage.uses if use[1] == 5]
    assert len(gradients) == 2 * len(usage.parameters)
    assert all(trace.part_names[trace.parts[use[3]]] for use in gradients)
    assert [use[0] for use in usage.uses] == sorted(use[0] for use in usage.uses)
    assert {parameter.layer for parameter in usage.parameters} == {None, 0, 1}


def test_hooks_change_no_allocation() -> None:
    """Compare the loop with and without hooks."""
    peaks: dict[str, Any] = {
        kind: two_ranks.followed({"kind": kind, **SMALL}, 0).peak_bytes for kind in ("none", "ddp")
    }
    assert peaks["none"] == peaks["ddp"]


def test_under_zero3_a_linear_layer_always_saves_its_input() -> None:
    case = {
        **SMALL,
        "batch": 2,
        "length": 64,
        "lora_r": 4,
    }
    plain, zero3 = (two_ranks.followed({"kind": kind, **case}, 0) for kind in ("zero2", "zero3"))
    hidden = 2 * 64 * two_ranks_loop.SHAPE["hidden_size"] * 4
    assert (
        two_ranks.peaks(zero3)["backward1"] >= two_ranks.peaks(plain)["backward1"] + hidden
    )  # the projection's, at least


def test_reads_of_an_adapters_matrices_are_recorded() -> None:
    trace = two_ranks.followed(
        {
            "kind": "zero3",
            **SMALL,
            "lora_r": 4,
            "bf16": True,
        },
        0,
    )
    assert trace.usage is not None
    read = {use[2] for use in trace.usage.uses if use[1] == parameter_uses.READ}
    assert read
    assert all(trace.usage.parameters[index].trains for index in read)
    assert (
        len(read) == 2 * 7
    )  # the first of each pair, in every projection of both layers: its dtype is read


def test_of_modules_that_return_one_tensor_the_outermost_begins_its_backward_first() -> None:
    """ZeRO-3 gives each a node of its own in the graph; the decoder returns what its last norm
    returned.
    """
    case = {"kind": "zero3", **SMALL}
    names = [name for name, _ in two_ranks_loop.build(case).named_modules()]
    usage = two_ranks.followed(case, 0).usage
    assert usage is not None
    begun = [names[which] for _, kind, which, *_ in usage.uses if kind == parameter_uses.BACKWARD]
    assert begun[:4] == ["", "lm_head", "model", "model.norm"]


def test_zero3_waits_forever_for_a_module_that_ran_without_gradients_before_its_backward() -> None:
    """DeepSpeed's counter is the module's, not the pass's: weights stay gathered until the
    backward pass is over.
    """

    class Ledger:
        events: tuple[int, ...] = ()

    def ended(*, scores: bool) -> list[int]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        log = parameter_uses.ParameterUses(Ledger(), own_nodes=True)
        log.watch(model, SimpleNamespace(number_of=lambda tensor: None), trains=False)
        output = model(torch.ones(1, 4, requires_grad=True))
        if scores:
            with torch.no_grad():
                model[1](torch.ones(1, 4))
        output.sum().backward()
        return [which for _, kind, which, *_ in log.uses if kind == parameter_uses.BACKWARD_DONE]

    assert ended(scores=False) == [2, 1, 0]
    assert ended(scores=True) == [1, 0]
