"""Scripts that name the classes of quantised layers, inspected where bitsandbytes is installed."""

from __future__ import annotations

import pytest

from tests.frameworks.test_checks_of_scripts import look

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_hub_cache")]

OF_LINEAR_LAYERS = """
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
import bitsandbytes as bnb

model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen2.5-0.5B", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
)
names = {
    name.split(".")[-1]
    for name, module in model.named_modules()
    if isinstance(module, bnb.nn.Linear4bit)
}
adapter = LoraConfig(target_modules=sorted(names - {"lm_head"}))
SFTTrainer(
    model,
    SFTConfig(output_dir="out"),
    train_dataset=Dataset.from_json("a.json"),
    peft_config=adapter,
).train()
"""


def test_targets_of_an_adapter_by_the_class_of_quantised_layers() -> None:
    """Qwen2's blocks have seven linear layers. No weights are loaded, so none is quantised here."""
    adapter = look(OF_LINEAR_LAYERS).adapter
    assert adapter is not None
    assert adapter["lora_target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
