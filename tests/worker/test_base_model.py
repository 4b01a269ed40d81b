"""Fresh modules around the tensors of a loaded model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker import synthetic  # noqa: E402
from autotune.worker.trl import base_model  # noqa: E402


@dataclasses.dataclass
class QuantState:
    """Scales of 4-bit weights, as bitsandbytes' modules hold them beside the parameter."""

    absmax: Any


def test_fresh_modules_share_all_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    models = base_model.fresh(model)
    assert models[0] is not model[0]
    assert models[0].weight.data_ptr() == model[0].weight.data_ptr()


def test_of_a_module_with_weights_in_4_bits_there_is_one() -> None:
    """Merging an adapter replaces its weights: a second module would keep the old ones."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].quant_state = QuantState(absmax=torch.ones(8))
    assert base_model.fresh(model)[0] is model[0]


def test_scales_of_weights_in_4_bits_are_checked_for_nan() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].quant_state = QuantState(absmax=torch.ones(8))
    assert base_model.is_finite(model)
    model[0].quant_state.absmax[3] = float("nan")
    assert not base_model.is_finite(model)


def test_random_weights_are_made_as_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Each shared tensor once, buffers with their values: a head that is drawn and dropped would
    leave its memory behind.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(
        synthetic.write_model_folder(tmp_path, synthetic.tiny_config())
    )
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = base_model.build_as_loaded(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), "cpu"
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [
        (name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()
    ] == [(name, parameter.shape, parameter.dtype) for name, parameter in plain.named_parameters()]
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {
        name: buffer.tolist() for name, buffer in plain.named_buffers()
    }
    assert base_model.is_finite(model)
