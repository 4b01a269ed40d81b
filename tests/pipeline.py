"""A tiny model, its data and its configuration, as a pipeline has them: everything local, and
trained in seconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.cli.command import environment
from tests.light_environment import light_python_path

MADE_UP = Path(__file__).resolve().parents[1] / "autotune" / "worker" / "synthetic.py"

SETTINGS = {
    "reward_funcs": ["get_soft_overlong_punishment"],
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 32,
    "bf16": False,
    "use_cpu": True,
    "max_steps": 1,
    "report_to": "none",
}


def make_project(folder: Path, **settings: object) -> Path:
    """`train.yaml`, `model/` and `prompts/` in the folder; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(made_up_model(), folder / "model")
    write_prompts(folder, longest=6)
    paths = {"model_name_or_path": "model", "dataset_name": "prompts", "output_dir": "out"}
    (folder / "train.yaml").write_text(yaml.safe_dump({**paths, **SETTINGS, **settings}))
    return folder / "train.yaml"


@functools.cache
def made_up_model() -> Path:
    """Return a model with its tokenizer, made once a process: it takes four CPU seconds."""
    folder = Path(tempfile.mkdtemp(prefix="made-up-model-"))
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, str(MADE_UP), str(folder / "model")]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=200,
        env=environment(PYTHONPATH=light_python_path()),
    )
    return folder / "model"


def write_prompts(folder: Path, *, longest: int) -> None:
    """Rows of 1 to `longest` words."""
    (folder / "prompts").mkdir(exist_ok=True)
    rows = []
    for row in range(32):
        rows.append(json.dumps({"prompt": " ".join(["one"] * (1 + row % longest))}) + "\n")
    (folder / "prompts" / "train.jsonl").write_text("".join(rows))
