"""Names of TRL's classes by method: `GRPOTrainer` and `GRPOConfig` of `grpo`."""

from __future__ import annotations

from collections.abc import Mapping

CLASS_PREFIXES: Mapping[str, str] = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
}
EXPERIMENTAL_PREFIXES: Mapping[str, str] = {"async-grpo": "AsyncGRPO"}
"""Methods of `trl.experimental`, which have no command of TRL's."""
