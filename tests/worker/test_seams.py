"""Table of the hooked names of TRL, compared with each supported release."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from tests.worker.drive import inside

pytest.importorskip("trl")

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
ROOT = Path(__file__).parents[2]


def missing() -> list[str]:
    """Names of the table that the installed release should have and does not."""
    import trl

    seams = inside("trl.seams")
    release = Version(trl.__version__)
    inside("trl.vllm_engines").without_vllm()
    absent = []
    for seam in seams.SEAMS:
        if Version(seam.since) <= release:
            owner: Any = importlib.import_module(seam.module)
            for name in seam.name.split("."):
                owner = getattr(owner, name, None)
            absent += [] if owner is not None else [f"{seam.module}:{seam.name}"]
    return absent


def test_the_installed_release_has_all_names() -> None:
    assert missing() == []


@pytest.mark.slow
@pytest.mark.skipif(not OVERLAYS, reason="needs `make trl-overlays`")
@pytest.mark.parametrize("release", ["1.0.0", "1.8.0"])
def test_an_older_release_has_all_names(release: str) -> None:
    code = (
        "import json, trl; from tests.worker.test_seams import missing;"
        " print(json.dumps([trl.__version__, missing()]))"
    )
    path = os.pathsep.join(
        [f"{OVERLAYS}/trl-{release}", str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [release, []]


@pytest.mark.parametrize("method", ["grpo", "rloo", "sft", "dpo", "online-dpo", "async-grpo"])
def test_each_hook_of_a_run_is_in_the_table(method: str) -> None:
    seams = inside("trl.seams")
    method_class = inside("trl.methods").RUNS_BY_METHOD[method]
    run = object.__new__(method_class)
    run.recorder = run.lengths = run.seen = run.rollouts = None
    required = {
        seam.name
        for seam in seams.SEAMS
        if seam.module == method_class.module and seam.use == "probe"
    }
    hooked = {f"{method_class.names[1]}.{name}" for name in run._hooks()}
    assert hooked == required


def test_a_missing_name_is_an_error_before_any_measurement() -> None:
    seams = inside("trl.seams")
    trainer = type("SFTTrainer", (), {"compute_loss": None})
    engine = SimpleNamespace(VLLMGeneration=SimpleNamespace(sync_weights=None))
    with pytest.raises(
        seams.UnsupportedFramework, match=r"TRL 9 has no SFTTrainer\._prepare_dataset, which"
    ):
        seams.check(trainer, engine, "9")
