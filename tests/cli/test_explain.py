"""`predict --explain` prints the origin of each setting behind the answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.request.test_unset_variables import SWIFT


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_explain_lists_settings_and_json_has_them(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{SWIFT} \\\n  --num_generations 8 --per_device_train_batch_size 8\n")
    command = [sys.executable, "-m", "autotune", "predict", "--from-command", str(script)]
    command += ["--gpus", "A100-80G"]
    text = subprocess.run(
        [*command, "--explain"],
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [line for line in text.stdout.splitlines() if line.startswith("num_generations ")]
    assert line.split(maxsplit=2)[1:] == ["8", f"{script}, line 2"]
    assert "use_vllm" in text.stdout and "default: swift 4.6.0" in text.stdout

    as_json = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    origins = json.loads(as_json.stdout)["origins"]
    assert origins["num_generations"] == {"source": "file", "place": str(script), "line": 2}
