"""`--log-to`: the record of a real answer, and each tracker in its own local mode where it is
installed.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import MissingExtra
from autotune.report.trackers import check_tracker, log_answer, tracked_run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen2-on-a-cpu"


@pytest.fixture
def answer(tmp_path: Path) -> dict[str, Any]:
    """A measured answer, with its files below a folder."""
    document: dict[str, Any] = json.loads((EXAMPLE / "recommendation.json").read_text())
    out = tmp_path / "out"
    out.mkdir()
    for name in ("recommended.yaml", "recommendation.json"):
        (out / name).write_bytes((EXAMPLE / name).read_bytes())
    document["out"] = str(out)
    document["recommendation"]["files"] = [str(out / "recommended.yaml")]
    return document


def test_the_record_of_an_answer(answer: dict[str, Any]) -> None:
    run = tracked_run("study", answer)
    assert len(run.steps) == len(answer["trials"]) > 0
    first, trial = run.steps[0], answer["trials"][0]
    assert first["tokens_per_second"] == trial["tokens_per_second"]["worst"]
    assert first["peak_memory_bytes"] == trial["peak_memory_bytes"] and first["fits"] == float(
        trial["fits"]
    )
    assert (
        run.summary["status"] == answer["status"]
        and run.summary["limit_bytes"] == answer["recommendation"]["limit_bytes"]
    )
    assert run.configuration["model"] == answer["question"]["model"]
    best = answer["recommendation"]["settings"]["per_device_train_batch_size"]
    assert run.configuration["setting.per_device_train_batch_size"] == best
    assert [file.name for file in run.files] == ["recommended.yaml", "recommendation.json"]


def test_an_answer_without_a_recommendation(answer: dict[str, Any]) -> None:
    run = tracked_run("study", {**answer, "recommendation": None, "trials": []})
    assert run.steps == () and "tokens_per_second" not in run.summary


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--log-to mlflow needs the extra 'mlflow'"):
        check_tracker("mlflow")


def test_a_tracker_that_fails_is_a_sentence(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("no network")

    broken = types.ModuleType("wandb")
    broken.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", broken)
    assert (
        log_answer("wandb", "study", answer)
        == "--log-to wandb: nothing was logged. ConnectionError: no network"
    )


@pytest.mark.slow
def test_mlflow_in_a_file(
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert log_answer("mlflow", "study", answer) is None
    assert capsys.readouterr().out == ""
    run = mlflow.search_runs(experiment_names=["autotune"], output_format="list")[0]
    assert run.info.run_name == "study" and run.data.params["model"] == answer["question"]["model"]
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "peak_memory_bytes")
    expected = [
        trial["peak_memory_bytes"] for trial in answer["trials"] if trial["peak_memory_bytes"]
    ]
    assert [item.value for item in sorted(history, key=lambda item: item.step)] == expected
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {
        "recommended.yaml",
        "recommendation.json",
    }


@pytest.mark.slow
def test_wandb_offline(
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert log_answer("wandb", "study", answer) is None
    assert capsys.readouterr().out == ""
    wandb.teardown()  # its service writes the file to the end
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for word in (b"setting.per_device_train_batch_size", b"peak_memory_bytes", b"autotune-answer"):
        assert word in content


@pytest.mark.slow
def test_trackio_on_this_machine(
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("trackio")
    import trackio

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path, raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path, raising=False)
    assert log_answer("trackio", "study", answer) is None
    assert capsys.readouterr().out == ""
    (database,) = tmp_path.glob("*.db")
    rows = sqlite3.connect(database).execute("select metrics from metrics order by step").fetchall()
    logged = [json.loads(text) for (text,) in rows]
    assert len(logged) == len(answer["trials"]) + 1
    assert logged[0]["tokens_per_second"] == answer["trials"][0]["tokens_per_second"]["worst"]
    assert trackio.__version__
