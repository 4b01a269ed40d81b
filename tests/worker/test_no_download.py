"""Synthetic model, tokenizer and engine without weights; the user's with `--weights real`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import engine_request, inside, load_request, measure_request

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM here"),
]

SCRIPT = Path(__file__).parent / "engine_weights.py"


def measure_apart(place: Path, **model: Any) -> dict[str, Any]:
    load = load_request(place / "scratch", engine=engine_request())
    load["model"] |= model
    settings = {
        "use_vllm": True,
        **{name: value for name, value in load["engine"].items() if name.startswith("vllm_")},
    }
    request = place / "request.json"
    request.write_text(json.dumps({"load": load, "measure": measure_request(settings)}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(request)],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def test_a_config_is_enough(tmp_path: Path) -> None:
    report = measure_apart(tmp_path)
    assert report["load_format"] == "dummy"
    assert not [name for name in report["files"] if name.endswith((".safetensors", ".bin"))]
    assert report["equal_before"] is False
    assert report["equal_after"] is True  # the trainer pushed its own before the first completion
    assert report["lengths"] == [8, 8]  # forced: random weights would end anywhere
    assert report["vocabulary"][0] == report["vocabulary"][1]


def test_real_weights_are_the_users(tmp_path: Path) -> None:
    folder = inside("synthetic").write_model_folder(
        tmp_path / "mine", inside("synthetic").tiny_config(), weights=True
    )
    report = measure_apart(tmp_path, folder=str(folder), weights="real")
    assert report["load_format"] is None
    assert report["equal_before"] is True
    assert report["equal_after"] is True
