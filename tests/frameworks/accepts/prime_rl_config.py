"""prime-rl's own configuration package: its parser and its checks. Prints what it understood.

Run by a Python that has its dependencies, with its `packages/prime-rl-configs/src` on PYTHONPATH.
The first argument is `rl`, `sft` or `trainer`, the others are those of that program.
"""

from __future__ import annotations

import json
import sys

from prime_rl.configs.rl import RLConfig  # type: ignore[import-not-found]
from prime_rl.configs.sft import SFTConfig  # type: ignore[import-not-found]
from prime_rl.configs.trainer import TrainerConfig  # type: ignore[import-not-found]
from prime_rl.utils.config import cli  # type: ignore[import-not-found]

kind = sys.argv.pop(1)
print(
    json.dumps(
        cli({"rl": RLConfig, "sft": SFTConfig, "trainer": TrainerConfig}[kind]).model_dump(
            mode="json"
        ),
        default=str,
    )
)
