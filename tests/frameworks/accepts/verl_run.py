"""verl's own entry, but for the training: the real `hydra.main` over verl's YAML files, and a
step's figures where verl's file logger puts them. Run by a Python that has verl; arguments are
those of `python -m verl.trainer.main_ppo`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path

import hydra  # type: ignore[import-not-found]

verl = importlib.util.find_spec("verl")
assert verl is not None and verl.origin is not None


@hydra.main(
    config_path=str(Path(verl.origin).parent / "trainer" / "config"),
    config_name="ppo_trainer",
    version_base=None,
)  # type: ignore[untyped-decorator, unused-ignore]
def main(config: object) -> None:
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("a", buffering=1) as file:
        for step in range(1, 20):
            data = {"response_length/mean": 650.5, "perf/time_per_step": 0.2}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
            time.sleep(0.2)


main()
