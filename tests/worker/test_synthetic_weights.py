"""Checkpoint of zeros for an engine that quantises what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.worker import synthetic


@pytest.mark.slow
def test_a_checkpoint_of_zeros_is_the_whole_model_and_takes_no_space(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from autotune.worker.trl.vllm_engines import write_checkpoint

    folder = synthetic.write_model_folder(tmp_path / "model", synthetic.tiny_config())
    write_checkpoint(folder, trust_remote_code=False)
    file = folder / "model.safetensors"
    assert file.stat().st_blocks * 512 < file.stat().st_size / 10
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not any(parameter.any() for parameter in loaded.parameters())
    stated = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert set(stated) == set(loaded.state_dict()) - {"lm_head.weight"}, (
        "tied weights are there once"
    )
