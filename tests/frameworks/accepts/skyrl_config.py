"""SkyRL's own command line: its parser, its configuration classes and `validate_cfg`. Prints what
it understood.

Run by a Python that has skyrl; arguments are those of `python -m
skyrl.train.entrypoints.main_base`. The configuration is printed as `BasePPOExp.run` logs it, in the
form of a Ray worker's output.
"""

from __future__ import annotations

import json
import sys

import absent  # type: ignore[import-not-found]

absent.GPU_ONLY = (*absent.GPU_ONLY, "ray", "tensordict", "skyrl.tinker")
absent.stand_in()
from skyrl.train.config import (  # type: ignore[import-not-found]  # noqa: E402
    SkyRLTrainConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
)
from skyrl.train.utils import validate_cfg  # type: ignore[import-not-found]  # noqa: E402


def understood(arguments: list[str]) -> SkyRLTrainConfig:
    config = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(config)
    return config


if sys.argv[1:2] == ["--each"]:  # lists of arguments as JSON: the first problem of each, or null
    problems: list[str | None] = []
    for arguments in json.loads(sys.argv[2]):
        try:
            understood(arguments)
            problems.append(None)
        except (AssertionError, ValueError, ZeroDivisionError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    print(json.dumps(problems))
else:
    config = understood(sys.argv[1:])
    lines = get_config_as_yaml_str(config).splitlines()
    print(
        "(skyrl_entrypoint pid=71) 2026-07-20 10:00:01.000 | INFO |"
        f" skyrl.train.entrypoints.main_base:run:258 - {lines[0]}"
    )
    for line in [
        *lines[1:],
        (
            "2026-07-20 10:00:02.000 | INFO | skyrl.train.trainer:train:277 - Started:"
            " 'init_weight_sync_state'"
        ),
    ]:
        print(f"(skyrl_entrypoint pid=71) {line}")
    print(json.dumps(get_config_as_dict(config), default=str))
