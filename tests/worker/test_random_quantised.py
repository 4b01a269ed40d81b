"""Random weights in 4 bits, compared with a quantised checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.worker.synthetic import tiny_config, write_model_folder
from tests.worker.drive import adapter, events_stage, inside, load_request, measure_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
SHAPE = tiny_config(layers=2, hidden=256)
ADAPTER = {
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": None,
}


def built(folder: Path, weights: str) -> Any:
    model = {"weights": weights, "dtype": "bfloat16", "load_in_4bit": True}
    return inside("trl.base_model").build(
        model,
        folder,
        device="cpu",
        seed=1,
        trust_remote_code=False,
    )


def inventory(model: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (
            type(parameter).__name__,
            tuple(parameter.shape),
            str(parameter.dtype),
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("tied", [False, True])
def test_it_holds_what_a_checkpoint_would(tied: bool, tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path / "model", {**SHAPE, "tie_word_embeddings": tied}, weights=True
    )
    real = built(folder, "real")
    random = built(folder, "random")
    kinds = {kind for kind, *_ in inventory(real).values()}
    assert "Params4bit" in kinds
    assert {name: facts[:3] for name, facts in inventory(random).items()} == {
        n: f[:3] for n, f in inventory(real).items()
    }
    assert random.get_memory_footprint() == real.get_memory_footprint()
    assert random.is_loaded_in_4bit
    assert random.hf_quantizer.is_trainable


def test_an_adapter_is_trained_over_it(tmp_path: Path) -> None:
    request = load_request(tmp_path, config=SHAPE, adapter=ADAPTER)
    request["model"] |= {"load_in_4bit": True, "dtype": "bfloat16"}
    trl = adapter()
    trl.warm(request)
    stage, _ = events_stage()
    loaded = trl.load(request, stage)
    results = []
    for _ in range(2):
        stage, _ = events_stage()
        results.append(
            trl.measure(loaded, measure_request({"use_peft": True, "load_in_4bit": True}), stage)
        )
        assert trl.release(loaded) is True
    assert results[0]["gradient_norm"] > 0
    assert results[0]["gradient_norm"] == results[1]["gradient_norm"]
    assert results[0]["effective"]["use_peft"]
