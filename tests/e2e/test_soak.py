"""`--soak`: a longer run of the winner, with its memory growth in the report and its phases in the
certificate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.command import autotune
from tests.e2e.demo import demo_model

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("light_environment"),
]

SEARCH = (
    "--gpus",
    "cpu",
    "--space",
    "demo",
    "--memory-limit",
    "1G",
    "--budget",
    "90s",
    "--max-probes",
    "2",
    "--weights",
    "random",
    "--hold",
    "use_vllm=false",
    "--hold",
    "max_completion_length=64",
    "--search",
    "per_device_train_batch_size=4,8",
    "--hold",
    "gradient_checkpointing=true",
)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("soak")
    model = demo_model(folder / "model")
    config = folder / "train.yaml"
    config.write_text(
        f"model_name_or_path: {model}\neval_strategy: steps\neval_steps:"
        " 10\nper_device_eval_batch_size: 8\nmax_steps: 500\nnum_generations: 8\n"
    )
    typed = ("run", "--config", str(config), *SEARCH, "--soak", "20s", "--out", "out", "--json")
    done = autotune(*typed, cwd=folder, timeout=500)
    assert done.code == 0, done.err
    return {"folder": folder, "told": done.document, "err": done.err}


def test_the_soak_lasts_and_is_told(soaked: dict[str, Any]) -> None:
    (soak,) = soaked["told"]["soaks"]
    assert soak["seconds"] >= 20
    assert soak["verdict"] in ("held", "too short")
    assert len(soak["cycles"]) >= 3
    assert soak["optimizer_steps"] == soak["cycles"][-1][0]
    assert soak["projected_steps"] == 500
    assert "Soaked for" in soaked["err"]


def test_the_certificate_is_whole_and_in_the_files(soaked: dict[str, Any]) -> None:
    certificate = soaked["told"]["recommendation"]["certificate"]
    states = {item["name"]: item["state"] for item in certificate["items"]}
    assert certificate["complete"] is True, certificate["items"]
    assert (
        states["evaluation"]
        == states["checkpoint save"]
        == states["optimizer steps"]
        == states["longest lengths"]
        == "done"
    )
    assert states["weight sync"] == states["sleep and wake"] == "not applicable"
    head = (soaked["folder"] / "out" / "recommended.yaml").read_text()
    assert "# Certified: peak" in head
    assert "#   evaluation: done" in head
    assert (
        json.loads((soaked["folder"] / "out" / "recommendation.json").read_text())["soaks"]
        == soaked["told"]["soaks"]
    )
