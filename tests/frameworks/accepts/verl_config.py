"""verl's own configuration: Hydra composes it from verl's YAML files, and verl's validation looks
at it. Prints what it came to.

Run by a Python that has verl; arguments are the overrides of `python -m verl.trainer.main_ppo`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import absent  # type: ignore[import-not-found]

absent.stand_in()
import verl  # type: ignore[import-not-found]  # noqa: E402
from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]  # noqa: E402
from omegaconf import OmegaConf  # type: ignore[import-not-found]  # noqa: E402

folder = Path(verl.__file__).parent / "trainer" / "config"
with initialize_config_dir(config_dir=str(folder), version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
from verl.utils.config import validate_config  # type: ignore[import-not-found]  # noqa: E402

estimator = config.algorithm.adv_estimator
validate_config(
    config,
    use_reference_policy=config.actor_rollout_ref.actor.use_kl_loss,
    use_critic=estimator == "gae",
)
print(json.dumps(OmegaConf.to_container(config, resolve=True), default=str))
