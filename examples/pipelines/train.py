"""preflight from Python: prove it, train with what fits, and watch memory while it trains."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import autotune

CONFIG = os.environ.get("CONFIG", "train.yaml")


def listen(event: object) -> None:
    """Whatever happens meanwhile; the events are those of `autotune.core.events`."""
    print(type(event).__name__, file=sys.stderr)


def reward(completions: list[object], **_: object) -> list[float]:
    """A stand-in: put your own here."""
    return [float(len(str(completion))) for completion in completions]


def train(config: Path) -> None:
    # Only now: a framework that is loaded already would hold memory that the probe is to find free.
    from datasets import load_dataset
    from trl import (
        GRPOConfig,
        GRPOTrainer,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_peft_config,
    )

    from autotune.integrations.trl import MemoryWatch

    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script, arguments, model, _ = parser.parse_args_and_config(
        ["--config", str(config)], return_remaining_strings=True, fail_with_unknown_args=False
    )
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=arguments,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
        callbacks=[MemoryWatch()],
    )
    trainer.train()


def main() -> int:
    # The same words as on the command line: gpus="2xlocal", memory_limit="38G" ...
    options = dict(word.split("=", 1) for word in shlex.split(os.environ.get("OPTIONS", "")))
    found = autotune.preflight(CONFIG, tune=True, listener=listen, **options)  # type: ignore[arg-type]
    print(found.document["status"], found.proof.trial.verdict.why, file=sys.stderr)
    if found.use is None:
        return 3
    train(found.use)
    return 0


if __name__ == "__main__":
    sys.exit(main())
