"""The head of a Ray cluster is killed in the middle of `autotune run`: what was measured stays,
the answer so far is written, the resume line is printed, exit code 1; another cluster goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PROGRAM, environment

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from tests.executors.clusters import cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("light_environment"),
]

TRAIN = """
import json, pathlib, sys, time
slow = pathlib.Path(__file__).with_name("slow")
for _ in range(12):
    time.sleep(60 if slow.exists() and sys.argv[1] != "1" else 0.02 * int(sys.argv[1]))
    print(json.dumps({"tokens_per_second": 100 * int(sys.argv[1])}), flush=True)
"""
"""The baseline is quick, others last until the loss of the head is noticed."""

FLAGS = [
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


def command(address: str, folder: Path, *arguments: str) -> list[str]:
    flags = ["--executor", "ray", "--address", address, "--out", str(folder / "out"), *arguments]
    return [*PROGRAM, "run", *FLAGS, *flags, "--", sys.executable, str(folder / "train.py"), "{b}"]


def test_a_killed_head_ends_the_run_with_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "slow").touch()
    store = environment(XDG_DATA_HOME=str(tmp_path / "data"))
    with cluster(nodes=1) as ray_cluster:
        began = subprocess.Popen(
            command(ray_cluster.address, tmp_path),
            env=store,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert began.stderr is not None
        stderr_lines = []
        for line in began.stderr:
            stderr_lines.append(line)
            if line.startswith("probe 2"):
                break
        ray_cluster.head_node.all_processes["gcs_server"][0].process.kill()
        killed = time.monotonic()
        stderr_lines += began.communicate(timeout=120)[1].splitlines(keepends=True)
        seconds = time.monotonic() - killed
        ray_cluster.remove_node(
            ray_cluster.head_node, allow_graceful=False
        )  # to drain it would need the server
    text = "".join(stderr_lines)
    assert began.returncode == 1, text
    assert seconds < 55, "Ray itself ends a process after a minute without a head"
    assert (
        "The head of the Ray cluster does not answer any more" in text and "Traceback" not in text
    )
    assert "Go on with: autotune run" in text and "--resume" in text
    answer = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert (answer["status"], answer["proven"]) == ("interrupted", "stopped by a fault")
    assert {"launch.sh", "report.html", "study.db"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }
    assert measured(answer) == 1

    (tmp_path / "slow").unlink()
    with cluster(nodes=1) as ray_cluster:
        done = subprocess.run(
            command(ray_cluster.address, tmp_path, "--resume"),
            env=store,
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    after = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert after["status"] != "interrupted" and measured(after) > measured(answer)


def measured(answer: dict[str, Any]) -> int:
    return sum(trial["outcome"] == "ok" for trial in answer["trials"])
