"""Trainer subclass with another signature, a model of its own, settings not visible in the call."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class MyTrainer(GRPOTrainer):
    def __init__(self, model, data, scale, **kwargs):
        self.scale = scale
        super().__init__(model, kwargs.pop("rewards"), train_dataset=data, **kwargs)
        self.after = self.model.config.hidden_size

    def compute_loss(self, *args, **kwargs):
        assert self.after
        return self.scale * super().compute_loss(*args, **kwargs)


def good(completions, answer, **kwargs):
    return [
        float(correct in str(completion))
        for correct, completion in zip(answer, completions, strict=True)
    ]


model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
data = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(30)]
)
size = 4
accumulation = {"gradient_accumulation_steps": 4}
args = GRPOConfig(
    "out-own",
    per_device_train_batch_size=size,
    num_generations=4,
    max_completion_length=8,
    use_cpu=True,
    bf16=False,
    **accumulation,
)
args.beta = 0.04
adapter = LoraConfig(r=4, target_modules=["q_proj"])
trainer = MyTrainer(
    model,
    data,
    1.0,
    rewards=[good],
    args=args,
    processing_class=tokenizer,
    peft_config=adapter,
)
trainer.train()
