"""Requests at the bounds of a rule: no headroom, one slot, one GPU, and what a flag repeats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from autotune.catalog.space_files import load_space
from autotune.core.errors import BadInput
from autotune.core.job import Hardware, Mode
from autotune.core.space import Knob
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from autotune.request.resources import measuring_mode, target_hardware
from autotune.request.searched_space import space_around
from autotune.request.sources.command_line import _headroom
from autotune.request.values import HardwareChoice
from tests.request.test_launches_as_written import predicted, verl_launch
from tests.request.test_unset_variables import VERL
from tests.request.test_unset_variables import request_of as launched
from tests.simulated import ToyTrainer, toy_space


def request_of(folder: Path, settings: dict[str, Any] | None, **flags: Any) -> ParsedRequest:
    """Return the request of a configuration file with these settings; None: without a file."""
    facts = {"gpus": "2xA100-80G", "mode": "predict", **flags}
    if settings is None:
        return parse_request(Flags(model="Qwen/Qwen2.5-0.5B", **facts))
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": "Qwen/Qwen2.5-0.5B", **settings}))
    return parse_request(Flags(config=str(file), **facts))


# Resources.


@pytest.mark.parametrize(
    ("text", "size_bytes", "share"),
    [
        ("0", 0, 1.0),
        (" 0% ", 0, 1.0),
        ("5%", None, 0.05),
        ("2GiB", 2 * 2**30, 1.0),
    ],
)
def test_headroom_is_none_a_size_or_a_share(
    text: str,
    size_bytes: int | None,
    share: float,
) -> None:
    headroom = _headroom(text)
    assert headroom is not None
    assert (headroom.size_bytes, headroom.share) == (size_bytes, share)


def test_emulated_gpus_take_one_probe_at_a_time() -> None:
    for slots in (None, 1):
        choice = HardwareChoice(
            gpus="2xA100-40G",
            mode="emulate",
            slots=slots,
        )
        hardware = target_hardware(choice)
        assert (hardware.count, hardware.emulated) == (2, True)
    with pytest.raises(BadInput, match="One probe at a time"):
        target_hardware(
            HardwareChoice(
                gpus="2xA100-40G",
                mode="emulate",
                slots=2,
            )
        )


def test_hardware_of_this_machine_is_measured_unless_a_prediction_is_requested() -> None:
    local = Hardware(
        kind="cuda",
        name="H100",
        count=1,
        memory_bytes=2**36,
        here=True,
    )
    modes: dict[Mode, Mode] = {"auto": "probe", "probe": "probe", "predict": "predict"}
    for mode, expected in modes.items():
        choice = HardwareChoice(mode=mode)
        assert measuring_mode(choice, local) == expected
        assert measuring_mode(choice, replace(local, here=False)) == "predict"
    assert measuring_mode(HardwareChoice(), replace(local, emulated=True)) == "emulate"


# A file, and flags beside it.


def test_a_flag_is_no_default_of_the_file(tmp_path: Path) -> None:
    """`beta` is 0.0 by default: with 0.1 by --set, the file does not train with its default."""
    workload = request_of(tmp_path, {}).job.task.workload
    assert workload.defaults["beta"] == 0.0
    changed = request_of(tmp_path, {}, set=("beta=0.1",)).job.task.workload
    assert "beta" not in changed.defaults
    assert changed.held_values["beta"] == 0.1


def test_a_file_that_names_no_weights_leaves_those_of_the_flag(tmp_path: Path) -> None:
    assert request_of(tmp_path, {}, weights="random").job.task.workload.weights == "random"


def test_a_batch_that_nobody_states_is_no_assumption(tmp_path: Path) -> None:
    """The batch of asynchronous GRPO follows from what fills a micro-batch."""
    asynchronous = {"method": "async-grpo"}
    by_file = request_of(tmp_path, {}, **asynchronous)
    assert by_file.job.task.workload.global_batch is None
    assert not [line for line in by_file.assumed if "global batch" in line]
    assumed = load_space("async-grpo").assume["global_batch"]
    by_space = request_of(tmp_path, None, **asynchronous)
    assert by_space.job.task.workload.global_batch == assumed
    assert f"global batch {assumed}" in by_space.assumed


def test_one_gpu_may_be_what_a_file_is_made_for(tmp_path: Path) -> None:
    """A generation batch of 3 is one micro-batch of 3 on one GPU, and half of it on two."""
    settings = {
        "per_device_train_batch_size": 3,
        "generation_batch_size": 3,
        "num_generations": 3,
    }
    assert request_of(tmp_path, settings, gpus="1xA100-80G").job.task.hardware.count == 1
    on_two = request_of(tmp_path, settings)
    assert on_two.job.task.hardware.count == 1
    assert on_two.assumed[0].startswith("training on A100-80G instead of ")


def test_a_refusal_repeats_what_it_says_of_its_own_setting_alone(tmp_path: Path) -> None:
    """Two settings come from variables that are not set; the batch has nothing to do with one."""
    batch = "data.train_batch_size"
    length = "data.max_response_length"
    script = (
        f"{VERL} actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 {batch}=$BATCH"
        f" {length}=$LENGTH actor_rollout_ref.actor.ppo_mini_batch_size=2000\n"
    )
    with pytest.raises(BadInput) as refused:
        launched(tmp_path, script)
    message = str(refused.value)
    assert f"{batch}=" in message and "$BATCH" in message
    assert "$LENGTH" not in message


# What a launch says.


def test_only_names_of_the_run_hint_at_its_model(tmp_path: Path) -> None:
    """Rows that another model made are no model of this run: 28 layers of 3584 are those of 7B."""
    launch = verl_launch(
        more="trainer.experiment_name=qwen2.5-7b-grpo data.val_files=/rows/llama-3.1-8b/val.parquet"
    )
    launch = launch.replace("Qwen/Qwen2.5-7B-Instruct", "$latest")
    model = predicted(tmp_path, "latest=$(find /data | tail -1)\n" + launch).job.task.workload.model
    assert (model.config["num_hidden_layers"], model.config["hidden_size"]) == (28, 3584)


def test_null_is_a_value_where_a_setting_takes_it(tmp_path: Path) -> None:
    """SkyRL returns one log probability by default, and none with null."""
    name = "generator.sampling_params.logprobs"
    skyrl = (
        "python -m skyrl.train.entrypoints.main_base"
        " trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"
    )
    by_default = launched(tmp_path, f"{skyrl}\n").job.task.workload.held_values
    assert name not in by_default
    held_values = launched(tmp_path, f"{skyrl} {name}=null\n").job.task.workload.held_values
    assert held_values[name] is None


def test_only_switches_and_numbers_join_the_choices_of_a_space() -> None:
    """A stated number takes its place among the choices; a word that is none of them does not."""
    space = toy_space(batch=(1, 2, 8), checkpointing=(False,))
    mode = Knob(
        name="mode",
        choices=("a", "b"),
        effect="neutral",
        memory="unclear",
        says="a mode",
    )
    space = replace(space, knobs=(*space.knobs, mode))
    stated: dict[str, Any] = {
        "batch": 4,
        "checkpointing": True,
        "mode": "c",
        "use_vllm": True,
    }
    around = space_around(space, cast(Any, ToyTrainer()), stated, (), {})
    assert around["batch"].choices == (1, 2, 4, 8)
    assert around["checkpointing"].choices == (False, True)
    assert around["use_vllm"].choices == (False, True)
    assert around["mode"].choices == ("a", "b")
