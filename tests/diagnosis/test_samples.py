"""Samples of every row inside whole logs: the cause stays the same for every printer and
surrounding text.
"""

from __future__ import annotations

import re

import pytest

from autotune.core.measurement import PHASES
from autotune.diagnosis import diagnose
from autotune.failures.remedy_table import BY_CAUSE, BY_ROW
from autotune.failures.table import CAUSES, MEMORY_CAUSES
from tests.diagnosis.around import (
    FORWARD,
    FRAMES,
    LATER,
    NAMES,
    RANKS,
    SHAPES,
    START,
    in_containers,
    prefixed,
    raised,
    sample,
)
from tests.every import for_each

BY_ROW_NAME = {
    "actor_not_found": "hang_or_nccl",
    "driver_out_of_memory": "unknown_memory",
    "watchdog_frames": "hang_or_nccl",
    "weights_of_another_name": "illegal_config",
    "word_in_no_list": "illegal_config",
    "zero_trace": "illegal_config",
    "attribute_of_vllm": "version",
    "device_of_engine": "illegal_config",
    "module_missing_alone": "version",
    "other_collectives": "hang_or_nccl",
    "port_in_use": "hang_or_nccl",
    "watchdog_hang": "hang_or_nccl",
    "weights_of_another_shape": "illegal_config",
    "weights_of_another_shape_where_loaded": "illegal_config",
    "vllm_profiling_disturbed": "gpu_other_process",
    "argument_of_another_version": "version",
    "data_too_long": "data",
    "data_without_prompts": "data",
    "argument_unknown": "illegal_config",
    "data_too_long_where_read": "data",
    "numeric_and_stopped": "numeric",
    "rendezvous_unanswered": "hang_or_nccl",
    "sglang_unbalanced": "gpu_other_process",
    "sglang_graphs": "engine_startup",
    "unsloth_engine": "engine_startup",
    "vllm_pool_cache": "kv_cache",
    "vllm_pool_weights": "weights",
    "expandable_segments": "illegal_config",
    "vllm_reservation": "engine_startup",
    "vllm_kv_reservation": "kv_cache",
    "vllm_no_cache_blocks": "kv_cache",
    "vllm_kv_checked": "kv_cache",
    "vllm_kv_too_small": "kv_cache",
    "vllm_kv_too_small_old": "kv_cache",
    "vllm_sampler_warmup": "engine_startup",
    "vllm_wake_up": "weight_sync",
    "sglang_cache": "kv_cache",
    "weights_beyond_gpu": "weights",
    "kernel_resources": "cuda_fault",
    "shared_memory": "host_ram",
    "ray_host_memory": "host_ram",
    "cuda_other_process": "gpu_other_process",
    "cuda_out_of_memory_old": "unknown_memory",
    "cuda_out_of_memory_plain": "unknown_memory",
    "cpu_out_of_memory": "host_ram",
    "cpu_out_of_memory_elsewhere": "host_ram",
    "limit_foreseen": "unknown_memory",
    "numpy_memory_error": "host_ram",
    "cannot_allocate": "host_ram",
    "host_killed": "host_ram",
    "trl_divisible": "illegal_config",
    "length_refused": "illegal_config",
    "setting_refused": "illegal_config",
    "arguments_refused": "illegal_config",
    "refused_by_a_framework": "illegal_config",
    "nccl_out_of_memory": "unknown_memory",
    "refused_where_settings_are_read": "illegal_config",
    "unexpected_argument_within": "version",
    "rendezvous": "hang_or_nccl",
    "data_where_it_is_read": "data",
    "xid": "cuda_fault",
    "numeric": "numeric",
    "disk": "disk_or_permission",
    "network": "network",
    "server_awaited": "network",
    "data": "data",
    "version": "version",
    "cuda_fault": "cuda_fault",
    "peer_gone": "hang_or_nccl",
    "collective_timeout": "hang_or_nccl",
    "vllm_weights": "weights",
    "limits": "disk_or_permission",
    "json_within": "data",
    "timeout_within": "hang_or_nccl",
    "command_missing": "version",
    "cuda_fault_printed": "cuda_fault",
    "cuda_out_of_memory_printed": "optimizer",
    "trainer_argument": "version",
    "validation": "illegal_config",
    "data_shapes": "data",
    "disk_evicted": "disk_or_permission",
    "vllm_no_length_fits": "kv_cache",
    "pinned_memory": "host_ram",
    "shared_memory_between_processes": "host_ram",
    "locked_memory": "hang_or_nccl",
    "numeric_on_device": "numeric",
    "index_on_device": "data",
    "attribute_within": "version",
    "model_type_within": "version",
    "data_key_within": "data",
    "hub_within": "network",
    "data_checked": "data",
    "data_refused": "data",
    "checked_by_a_framework": "illegal_config",
    "out_of_memory_somewhere": "unknown_memory",
    "not_registered": "version",
    "import_within": "version",
    "devices_apart": "illegal_config",
    "no_gradient": "illegal_config",
    "connection_within": "network",
    "sglang_cache_full": "kv_cache",
    "saved_settings_unknown": "version",
    "settings_asserted": "illegal_config",
    "data_within": "data",
    "media_unreadable": "data",
    "program_missing": "version",
    "settings_file_missing": "illegal_config",
    "file_missing": "data",
    "named_settings": "illegal_config",
    "named_data": "data",
    "divided_by_nothing": "illegal_config",
    "adapter_without_layers": "version",
    "data_none_at_all": "data",
    "word_looked_up": "illegal_config",
    "vllm_wake_up_cache": "kv_cache",
    "no_room_for_a_handle": "unknown_memory",
    "nccl_shared_memory": "hang_or_nccl",
    "unreachable": "network",
    "trl_weight_sync": "hang_or_nccl",
}
"""Expected causes, written by hand."""

EXPECTED = {
    "cuda_out_of_memory": "fragmentation",
    "cuda_out_of_memory.small_neighbour": "unknown_memory",
    "cuda_out_of_memory.container": "unknown_memory",
    "cuda_out_of_memory.itself": "unknown_memory",
}
WRAPPERS = {"engine_wrapper"}
NOT_MEMORY_THOUGH_ITS_CAUSE_IS = {"vllm_profiling_disturbed"}


def expected(name: str) -> str:
    return EXPECTED.get(name) or BY_ROW_NAME[name.partition(".")[0]]


@pytest.mark.parametrize("shape", SHAPES)
@for_each(name for name in NAMES if name.partition(".")[0] not in WRAPPERS)
def test_the_cause_is_found_in_a_whole_log(name: str, shape: str) -> None:
    diagnosis = diagnose(SHAPES[shape](sample(name)))
    assert diagnosis.known, diagnosis
    assert diagnosis.cause == expected(name), diagnosis
    assert diagnosis.is_memory == (
        diagnosis.cause in MEMORY_CAUSES and diagnosis.row not in NOT_MEMORY_THOUGH_ITS_CAUSE_IS
    )
    assert diagnosis.evidence and "\n" not in diagnosis.evidence
    assert diagnosis.phase in (None, *PHASES)
    assert 1 <= len(diagnosis.remedies) <= 3
    assert all(
        advice.change and advice.why and advice.predicted is None for advice in diagnosis.remedies
    )
    if (
        shape in RANKS
        and not sample(name).startswith("[rank")
        and not re.search(r"rank[ :]|task \d", sample(name))
    ):
        assert diagnosis.rank == RANKS[shape]


def test_a_log_cut_in_the_middle_of_a_traceback() -> None:
    log = prefixed("[rank1]: ", raised(sample("cuda_out_of_memory.container"), FRAMES + FORWARD))
    diagnosis = diagnose(log.split("\n", 1)[1])
    assert (diagnosis.cause, diagnosis.phase, diagnosis.rank) == ("logits", "forward", 1)


@pytest.mark.parametrize(
    "name", ["disk", "cuda_out_of_memory.container", "vllm_no_cache_blocks", "trl_divisible"]
)
def test_a_containers_name_before_each_line(name: str) -> None:
    diagnosis = diagnose(in_containers(sample(name)))
    assert diagnosis.cause == expected(name) and not diagnosis.evidence.startswith("trainer-1")


@pytest.mark.parametrize("name", ["engine_wrapper", "engine_wrapper.actor", "engine_wrapper.map"])
@pytest.mark.parametrize("shape", ["alone", "in_ray", "in_engine", "by_default_prefix"])
def test_a_wrapper_alone_is_unknown(shape: str, name: str) -> None:
    diagnosis = diagnose(SHAPES[shape](sample(name)))
    assert (
        not diagnosis.known
        and diagnosis.is_memory is None
        and diagnosis.cause is None
        and not diagnosis.remedies
    )


def test_a_wrapper_and_lost_peers_are_the_peers() -> None:
    diagnosis = diagnose(SHAPES["on_rank_1"](sample("engine_wrapper")))
    assert diagnosis.cause == "hang_or_nccl" and not diagnosis.is_memory


def test_the_numbers_of_the_message_bound_the_remedy() -> None:
    diagnosis = diagnose(SHAPES["in_engine"](sample("vllm_kv_too_small.earlier")))
    assert diagnosis.numbers["longest_length"] == 34736 and diagnosis.phase == "load"
    assert diagnosis.remedies[0].change == {"vllm_max_model_length": "lower, to at most 34736"}


def test_the_engines_causes_pull_in_opposite_directions() -> None:
    def share(name: str, frame: str = "") -> str | None:
        diagnosis = diagnose(raised(sample(name), FRAMES + frame))
        changes = [
            advice.change.get("vllm_gpu_memory_utilization") for advice in diagnosis.remedies
        ]
        return next((change for change in changes if change), None)

    allocating = (
        '  File "/venv/vllm/v1/worker/gpu_model_runner.py", line 1, in _allocate_kv_cache_tensors\n'
        "    torch.zeros(size)\n"
    )
    assert share("vllm_no_cache_blocks") == share("vllm_kv_too_small") == "raise"
    assert share("vllm_reservation") == share("vllm_wake_up") == "lower"
    assert share("cuda_out_of_memory.container", allocating) == "lower"
    assert share("trl_divisible") is None


@pytest.mark.parametrize(
    ("frames", "cause", "phase"),
    [
        (
            FORWARD
            + '  File "/venv/transformers/models/qwen2/modeling_qwen2.py", line 46, in forward\n  '
            "  x\n",
            "activations",
            "forward",
        ),
        (
            FORWARD
            + '  File "/venv/transformers/models/qwen2/modeling_qwen2.py", line 470, in forward\n  '
            "  logits = self.lm_head(x)\n"
            + '  File "/venv/torch/nn/modules/linear.py", line 125, in forward\n    return'
            " F.linear(input, self.weight)\n",
            "logits",
            "forward",
        ),
        (
            (
                '  File "/venv/torch/autograd/graph.py", line 824, in _engine_run_backward\n   '
                " return\n"
            ),
            "activations",
            "backward",
        ),
        (
            (
                '  File "/venv/torch/optim/adamw.py", line 160, in _init_group\n   '
                " torch.zeros_like(p)\n"
            ),
            "optimizer",
            "optimizer",
        ),
        (
            (
                '  File "/venv/trl/trainer/grpo_trainer.py", line 1, in _move_model_to_vllm\n   '
                " param.full_tensor()\n"
            ),
            "weight_sync",
            "sync",
        ),
        (
            (
                '  File "/venv/transformers/modeling_utils.py", line 1, in from_pretrained\n   '
                " cls._load()\n"
            ),
            "weights",
            "load",
        ),
        (
            (
                '  File "/venv/transformers/modeling_utils.py", line 1, in from_pretrained\n   '
                ' model = cls(config)\n  File "/venv/transformers/models/qwen2/modeling_qwen2.py",'
                " line 1, in __init__\n    super().__init__(config)\n"
            ),
            "weights",
            "load",
        ),
        (
            '  File "/job/train.py", line 1, in helper\n    torch.zeros(10)\n',
            "unknown_memory",
            None,
        ),
    ],
)
def test_the_innermost_telling_place_decides(
    frames: str,
    cause: str,
    phase: str | None,
) -> None:
    diagnosis = diagnose(START + raised(sample("cuda_out_of_memory.container"), FRAMES + frames))
    assert (diagnosis.cause, diagnosis.phase) == (cause, phase)


def test_an_out_of_memory_behind_rays_wrapper_has_its_numbers_and_its_place() -> None:
    text = (
        FRAMES + "ray.exceptions.RayTaskError(OutOfMemoryError):"
        " ray::WorkerDict.actor_rollout_update_actor() (pid=4711, ip=10.0.0.2)\n"
        + '  File "/venv/verl/workers/actor/dp_actor.py", line 1, in update_policy\n   '
        " loss.backward()\n"
        + '  File "/venv/torch/_tensor.py", line 1, in backward\n    torch.autograd.backward()\n'
        + sample("cuda_out_of_memory.container")
        + "\n"
    )
    diagnosis = diagnose(text)
    assert (diagnosis.cause, diagnosis.phase) == ("activations", "backward") and diagnosis.numbers[
        "asked_bytes"
    ] > 2**30


def test_the_earliest_root_decides_across_ranks_that_print_at_once() -> None:
    first = prefixed("[rank2]: ", raised(sample("cuda_out_of_memory.container"))).splitlines()
    second = prefixed("[rank5]: ", raised(sample("disk"))).splitlines()
    woven = [line for pair in zip(first, second, strict=True) for line in pair]
    diagnosis = diagnose("\n".join([*woven, LATER.format(other=0, rank=2)]))
    assert (diagnosis.rank, diagnosis.is_memory) == (2, True)


def test_a_lost_peer_is_blamed_only_where_nothing_else_is() -> None:
    before = prefixed("[rank0]: ", raised(sample("peer_gone").removeprefix("[rank0]: ")))
    assert diagnose(before).cause == "hang_or_nccl"
    assert (
        diagnose(before + prefixed("[rank1]: ", raised(sample("disk")))).cause
        == "disk_or_permission"
    )
    assert diagnose(before + "Killed\n").cause == "host_ram"


def test_processes_that_the_launcher_ended_are_not_out_of_memory() -> None:
    assert diagnose(LATER.format(other=0, rank=1)).cause == "hang_or_nccl"


def test_an_error_that_was_dealt_with_is_not_what_ended_it() -> None:
    steps = "".join(f"{{'loss': 0.{step}}}\n" for step in range(5))
    retried = raised(sample("cuda_out_of_memory.container")) + steps
    assert diagnose(retried + raised(sample("disk"))).cause == "disk_or_permission"
    assert diagnose(retried + "{'train_runtime': 12.5}\n").cause == "none"
    assert not diagnose(retried).known, "still running, or cut: no end is told"


def test_logs_of_ranks_one_behind_the_other() -> None:
    steps = "".join(f"{{'loss': 0.{step}}}\n" for step in range(5))
    echo = raised(sample("peer_gone").removeprefix("[rank0]: "))
    assert diagnose(raised(sample("cuda_out_of_memory.container")) + steps + echo).is_memory


def test_the_cause_of_a_chain_is_its_known_member() -> None:
    between = "\nThe above exception was the direct cause of the following exception:\n\n"
    chain = (
        raised(sample("cuda_out_of_memory.container"))
        + between
        + raised("ValueError: the step failed")
    )
    assert diagnose(chain).is_memory
    unknown = raised("KeyError: 'advantage'") + between + raised("ValueError: the step failed")
    assert diagnose(unknown).evidence == "KeyError: 'advantage'"


def of_a_reward(error: str, *frames: str) -> str:
    calling = (
        '  File "/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 1, in'
        " _calculate_rewards\n    f()\n"
    )
    return raised(
        error, FRAMES + calling + "".join(f'  File "{frame}\n    pass\n' for frame in frames)
    )


def test_what_fails_in_a_users_rewards_is_neither_a_setting_nor_a_version() -> None:
    reward_frame = '/job/rewards.py", line 3, in check_answer'
    package = '/venv/lib/python3.11/site-packages/math_verify/parser.py", line 9, in _check_length'
    assert not diagnose(
        of_a_reward("ValueError: invalid literal for int() with base 10: 'x'", reward_frame)
    ).known
    assert not diagnose(
        of_a_reward("ValueError: the answer must be shorter", reward_frame, package)
    ).known
    assert diagnose(of_a_reward(sample("cuda_out_of_memory.container"), reward_frame)).is_memory
    away = '/venv/lib/python3.11/site-packages/openai/_base_client.py", line 9, in request'
    assert diagnose(of_a_reward("RuntimeError: no answer", reward_frame, away)).cause == "network"


def test_words_about_another_process_give_way_to_what_ended_it() -> None:
    lost = raised("RuntimeError: DataLoader worker (pid(s) 8123) exited unexpectedly")
    assert not diagnose(lost).known
    assert diagnose(
        lost
        + "ERROR: Unexpected bus error encountered. This might be caused by insufficient shared"
        " memory (shm).\n"
    ).is_memory


def test_what_only_may_be_memory_is_not_called_that() -> None:
    assert not diagnose(
        raised("RuntimeError: the worker ended; it may have run out of memory")
    ).known
    assert not diagnose(raised("RuntimeError: lost node 3, possibly out of memory")).known
    assert diagnose(raised("RuntimeError: cudaMalloc failed: out of memory")).is_memory


def test_there_are_two_or_three_remedies_at_most() -> None:
    assert all(len(remedies) <= 3 for remedies in [*BY_CAUSE.values(), *BY_ROW.values()])
    assert all(BY_CAUSE[cause] for cause in CAUSES if cause != "none")
