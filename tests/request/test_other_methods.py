"""Files of methods that are not predicted have settings like those of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.request.flags import Flags
from autotune.request.request_parser import parse_request

SETTINGS = """
model_name_or_path: Qwen/Qwen2.5-0.5B
max_length: 512
beta: 0.05
per_device_train_batch_size: 1
"""


def test_a_file_of_orpo_is_not_read_as_dpo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ORPO has no reference model, and DPO's settings."""
    monkeypatch.chdir(tmp_path)
    for folder in ("orpo", "dpo"):
        Path(folder).mkdir()
        Path(folder, "config.yaml").write_text(SETTINGS)
    assert parse_request(_flags("dpo/config.yaml")).job.task.workload.method == "dpo"
    with pytest.raises(BadInput, match="a file of ORPO"):
        parse_request(_flags("orpo/config.yaml"))
    stated = _flags("orpo/config.yaml", method="dpo")
    assert parse_request(stated).job.task.workload.method == "dpo"


def _flags(config: str, **options: str) -> Flags:
    return Flags(mode="predict", config=config, gpus="8xH100", **options)


@pytest.mark.parametrize(
    ("name", "keys", "method"),
    [
        ("sft_config.yaml", "", "sft"),
        ("grpo_after_sft.yaml", "num_generations: 8\n", "grpo"),
        ("config.yaml", "", "grpo"),
    ],
)
def test_the_method_by_the_files_name(name: str, keys: str, method: str, tmp_path: Path) -> None:
    """Keys that every method has leave it to the name, and no key of GRPO's does."""
    file = tmp_path / name
    file.write_text(f"model_name_or_path: Qwen/Qwen2.5-0.5B\nlearning_rate: 1.0e-5\n{keys}")
    request = parse_request(Flags(config=str(file), gpus="8xA100-80G", mode="predict"))
    assert request.job.task.workload.method == method


def test_a_part_of_a_configuration_says_so(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text("max_length: 512\nmax_prompt_length: 64\nbeta: 0.1\n")
    request = parse_request(Flags(config=str(file), gpus="8xA100-80G", mode="predict"))
    assert any("names no model: an adapter, 4 bits" in line for line in request.assumed)
