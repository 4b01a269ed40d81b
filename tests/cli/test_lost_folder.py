"""A machine fault in the middle of `autotune run`: the answer so far, the line that resumes it,
and exit code 1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

TRAIN = """
import json, sys, time
for _ in range(12):
    time.sleep(0.02 * int(sys.argv[1]))
    print(json.dumps({"tokens_per_second": 100 * int(sys.argv[1])}), flush=True)
"""


@pytest.mark.parametrize("name", ["o \"q\" 's'\t#x: {y}\nz", "o?a=1&b%20c@d:e"])
def test_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    flags = [
        "--framework",
        "command",
        "--gpus",
        "cpu",
        "--memory-limit",
        "500M",
        "--metrics",
        "-",
        "--search",
        "b=1,2",
    ]
    command = [*PROGRAM, "run", *flags, "--out", name, "--", sys.executable, "train.py", "{b}"]
    store = environment(XDG_DATA_HOME=str(tmp_path / "data"))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=store,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert {"study.db", "launch.sh", "recommendation.json"} <= {
        file.name for file in (tmp_path / name).iterdir()
    }
    subprocess.run(["bash", "-n", str(tmp_path / name / "launch.sh")], check=True)


def test_a_deleted_output_folder_is_said_and_created_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    flags = [
        "--framework",
        "command",
        "--gpus",
        "cpu",
        "--memory-limit",
        "500M",
        "--metrics",
        "-",
        "--search",
        "b=1,2,3,4,5,6",
    ]
    command = [*PROGRAM, "run", *flags, "--out", "out", "--", sys.executable, "train.py", "{b}"]
    store = environment(XDG_DATA_HOME=str(tmp_path / "data"))
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=store,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        begun = []
        for line in process.stderr:
            begun.append(line)
            if line.startswith("probe 2"):
                break
        shutil.rmtree(tmp_path / "out")
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, "".join(begun) + stderr
    assert "--out out was deleted meanwhile; it is created again." in stderr
    assert (
        "was deleted. Its trials are lost with it" in stderr
        and "Go on with: autotune run" in stderr
        and "--resume" in stderr
    )
    assert "Traceback" not in stderr and "budget spent" not in stderr
    answer = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert (
        answer["status"] == "interrupted"
        and answer["proven"] == "stopped by a fault"
        and any("was deleted" in warning for warning in answer["warnings"])
    )
    assert (tmp_path / "out" / "launch.sh").exists()
