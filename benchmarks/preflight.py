"""Preflight benchmark: seconds of `autotune preflight`, measured once and then answered from the
record, as a pipeline starts it.

python benchmarks/preflight.py        # writes benchmarks/results/preflight.json

A tiny synthetic model on this machine's CPU. The time of an answer from the record does not depend
on the model's size, except for reading its config. It needs .venv and two or three minutes of an
idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import yaml

ROOT = Path(__file__).resolve().parent.parent
MADE_UP = ROOT / "autotune" / "worker" / "synthetic.py"
HITS = 10
SETTINGS = {
    "model_name_or_path": "model",
    "dataset_name": "prompts",
    "output_dir": "out",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 32,
    "bf16": False,
    "use_cpu": True,
    "reward_funcs": ["get_soft_overlong_punishment"],
}
ASKED = ["preflight", "train.yaml", "--gpus", "cpu", "--memory-limit", "2G", "--dry-run", "--json"]
IMPORTS = "import autotune.cli, autotune.cli.preflight, autotune.preflight.check"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "preflight.json"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        result = _measure(Path(folder))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["seconds"], indent=1))


def _measure(folder: Path) -> dict[str, Any]:
    _project(folder)
    first_seconds, first = _preflight(folder)
    assert first["fits"] and first["from_record"] is None, first
    seconds_of_hits, seconds_inside = [], []
    for _ in range(HITS):
        seconds, document = _preflight(folder)
        assert document["from_record"]
        seconds_of_hits.append(seconds)
        seconds_inside.append(document["elapsed_seconds"])
    return {
        "schema": 1,
        "machine": machine.facts(first["versions"]),
        "seconds": {
            "measured": round(first_seconds, 2),
            "from the record": _spread(seconds_of_hits),
            "of which inside, asking the training environment for its versions among it": _spread(
                seconds_inside
            ),
            "an interpreter that does nothing": _spread(_interpreter_seconds("pass", folder)),
            "an interpreter that imports what it needs": _spread(
                _interpreter_seconds(IMPORTS, folder)
            ),
        },
    }


def _project(folder: Path) -> None:
    subprocess.run(
        [sys.executable, str(MADE_UP), str(folder / "model")], check=True, capture_output=True
    )
    (folder / "prompts").mkdir()
    rows = (json.dumps({"prompt": " ".join(["one"] * (1 + row % 6))}) + "\n" for row in range(32))
    (folder / "prompts" / "train.jsonl").write_text("".join(rows))
    (folder / "train.yaml").write_text(yaml.safe_dump(SETTINGS))


def _interpreter_seconds(program: str, folder: Path) -> list[float]:
    return [_seconds([sys.executable, "-c", program], folder)[0] for _ in range(HITS)]


def _preflight(folder: Path) -> tuple[float, dict[str, Any]]:
    seconds, output = _seconds([sys.executable, "-m", "autotune", *ASKED], folder)
    document: dict[str, Any] = json.loads(output)
    return seconds, document


def _seconds(command: Sequence[str], folder: Path) -> tuple[float, str]:
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(folder / "data"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.monotonic() - began, done.stdout


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)}


if __name__ == "__main__":
    main()
