"""The user's own TRL file: read whole, checked key by key, with the line of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.frameworks.trl.user_config import read_user_config

FILE = """\
# a comment
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/tldr
reward_funcs:
  - think_format_reward
  - my_lib.rewards.custom
learning_rate: 1e-6
per_device_train_batch_size: 4
use_peft: true
lora_target_modules: [q_proj, v_proj]
bf16: null
env:
  ANYTHING: at all
datasets:
  - path: one
    anything: else
num_processes: 2
"""


@pytest.fixture
def written(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(text)
        return path

    return write


def test_its_parts_are_told_apart(written) -> None:  # type: ignore[no-untyped-def]
    config = read_user_config(written(FILE))
    assert dict(config.settings) == {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 4,
        "use_peft": True,
        "bf16": None,
    }
    assert config.model == "Qwen/Qwen2.5-0.5B" and config.dataset == "trl-lib/tldr"
    assert config.rest["reward_funcs"] == ["think_format_reward", "my_lib.rewards.custom"]
    assert config.rest["lora_target_modules"] == ["q_proj", "v_proj"]
    assert config.rest["env"] == {"ANYTHING": "at all"} and config.rest["datasets"] == [
        {"path": "one", "anything": "else"}
    ]
    assert config.rest["num_processes"] == 2


def test_target_modules_may_be_a_word(written) -> None:  # type: ignore[no-untyped-def]
    """TRL's parser passes a text of the file on to PEFT, which takes `all-linear` or a pattern."""
    assert read_user_config(written("lora_target_modules: all-linear\n")).settings == {
        "lora_target_modules": "all-linear"
    }


def test_a_number_that_yaml_reads_as_text_is_a_number(
    written: Callable[[str], Path],
) -> None:
    """`1e-6` has no dot, so YAML calls it text; TRL makes it a number, and so do we."""
    assert read_user_config(written("learning_rate: 1e-6\n")).settings == {"learning_rate": 1e-6}
    assert read_user_config(written("beta: 0\n")).settings == {"beta": 0.0}


@pytest.mark.parametrize(
    ("text", "line", "fragments"),
    [
        ("beta: 0.1\nlearning_rat: 1.0\n", 2, ["learning_rat", "'learning_rate'"]),
        ("beta: 0.1\n  bad: [\n", 2, ["broken YAML"]),
        ("a: [1\nb: 2\n", 2, ["broken YAML"]),
        ("num_generations: eight\n", 1, ["num_generations", "int", "'eight'"]),
        ("use_vllm: 3\n", 1, ["use_vllm", "bool"]),
        ("optim: adamw_torch_fast\n", 1, ["optim", "'adamw_torch_fused'"]),
        (
            "beta: 1.0\n\nmax_prompt_length: long\n",
            3,
            ["max_prompt_length: not a setting of TRL", "whole number"],
        ),
        (
            "torch_dtype: bfloat16\ndtype: float32\n",
            1,
            ["torch_dtype and dtype are the same setting"],
        ),
        ("deepspeed: none-such.json\n", 1, ["none-such.json", "no such file"]),
        ("beta: 1.0\nbeta: 2.0\n", 2, ["'beta' is given twice", "line 1"]),
        ("accelerate_config: my_own.yaml\n", 1, ["my_own.yaml", "multi_gpu", "zero3"]),
        ("just words\n", 1, ["not a YAML mapping"]),
        ("reward_funcs: my_lib.reward\n", 1, ["reward_funcs", "list"]),
    ],
)
def test_what_is_wrong_is_told_by_line(
    written,
    text: str,
    line: int,
    fragments: list[str],
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput) as caught:
        read_user_config(written(text))
    message = str(caught.value)
    assert f"train.yaml, line {line}, column " in message
    for word in fragments:
        assert word in message
    assert caught.value.way_out


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There is no file"):
        read_user_config(tmp_path / "none.yaml")
