"""Settings from the command line by TRL's own parser, an adapter, a callback that writes and
stops.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config


@dataclass
class ScriptArguments:
    prompts: int = field(default=40)


class Noisy(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        Path("callback-was-here").touch()
        control.should_training_stop = True


def slow(completions, **kwargs):
    time.sleep(0.05)
    return [float(len(str(completion))) for completion in completions]


if __name__ == "__main__":
    arguments, training, model = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=slow,
        args=training,
        train_dataset=Dataset.from_list(
            [{"prompt": f"{i} + {i} ="} for i in range(arguments.prompts)]
        ),
        peft_config=get_peft_config(model),
        callbacks=[Noisy()],
    )
    trainer.add_callback(Noisy)
    trainer.train()
