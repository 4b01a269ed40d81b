"""Answer and measurements of a run in an experiment tracker: `--log-to wandb|trackio|mlflow`.

Every tracker receives the same record: the request and the recommended settings as configuration,
one step per measured candidate, the answer as a summary, and the written files where it stores
files.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.errors import MissingExtra
from autotune.report.html.render import PAGE
from autotune.report.output_folder import DOCUMENT

PROJECT = "autotune"
# Bound of a configuration value: MLflow's, the smallest of the three
MAX_PARAMETER_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Record that is sent to a tracker."""

    name: str
    configuration: Mapping[str, object]
    steps: tuple[Mapping[str, float], ...]  # one per measured candidate, in their order
    summary: Mapping[str, object]
    files: tuple[Path, ...]


def check_tracker(name: str) -> None:
    """Raise MissingExtra if the tracker is not installed here."""
    if importlib.util.find_spec(name) is None:
        raise MissingExtra(f"--log-to {name}", name)


def log_answer(
    tracker: str,
    name: str,
    document: Mapping[str, Any],
) -> str | None:
    """Log the document of a run; the reason if the tracker failed, which changes no answer."""
    # Trackers print on stdout, which belongs to the answer.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            _TRACKERS[tracker](tracked_run(name, document))
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return f"--log-to {tracker}: nothing was logged. {type(error).__name__}: {first}"
    return None


def tracked_run(name: str, document: Mapping[str, Any]) -> TrackedRun:
    """Return the record of `recommendation.json`."""
    best = document["recommendation"] or {}
    settings = _flat(best.get("settings") or {}, "setting.")
    out = Path(document["out"])
    written = (*map(Path, best.get("files") or ()), out / DOCUMENT, out / PAGE)
    speeds = best.get("tokens_per_second") or {}
    figures = {
        "tokens_per_second": speeds.get("worst"),
        "peak_memory_bytes": best.get("peak_memory_bytes"),
        "limit_bytes": best.get("limit_bytes"),
        "elapsed_seconds": document["elapsed_seconds"],
    }
    return TrackedRun(
        name=name,
        configuration={**_flat(document["question"]), **settings},
        steps=tuple(
            _step(number, trial) for number, trial in enumerate(document.get("trials") or (), 1)
        ),
        summary={
            "status": document["status"],
            "basis": document["basis"],
            **{key: value for key, value in figures.items() if value is not None},
        },
        files=tuple(dict.fromkeys(file for file in written if file.is_file())),
    )


def _step(number: int, trial: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the figures of one measured candidate; a failure has no speed."""
    speeds = trial.get("tokens_per_second") or {}
    figures = {
        "tokens_per_second": speeds.get("worst"),
        "peak_memory_bytes": trial.get("peak_memory_bytes"),
    }
    fits = trial.get("fits") is True
    numbers = _numbers(trial["knobs"], "knob.")
    numbers |= _numbers(figures)
    step = {"probe": float(number), "fits": float(fits)}
    for name, value in numbers.items():
        step[name] = float(value)
    return step


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, int | float]:
    numbers = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = value
    return numbers


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _wandb(run: TrackedRun) -> None:
    wandb = importlib.import_module("wandb")
    with wandb.init(
        project=PROJECT,
        name=run.name,
        job_type=PROJECT,
        config=dict(run.configuration),
    ) as opened:
        for number, step in enumerate(run.steps, 1):
            opened.log(dict(step), step=number)
        opened.summary.update(dict(run.summary))
        artifact = wandb.Artifact("autotune-answer", type="autotune")
        for file in run.files:
            artifact.add_file(str(file))
        opened.log_artifact(artifact)


def _trackio(run: TrackedRun) -> None:
    trackio = importlib.import_module("trackio")
    trackio.init(
        project=PROJECT,
        name=run.name,
        config={**run.configuration, **run.summary},
    )
    for number, step in enumerate(run.steps, 1):
        trackio.log(dict(step), step=number)
    trackio.log(_numbers(run.summary, "answer."), step=len(run.steps) + 1)
    trackio.finish()


def _mlflow(run: TrackedRun) -> None:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=run.name):
        parameters = {}
        for name, value in run.configuration.items():
            parameters[name] = str(value)[:MAX_PARAMETER_CHARACTERS]
        mlflow.log_params(parameters)
        for number, step in enumerate(run.steps, 1):
            mlflow.log_metrics(dict(step), step=number)
        numbers = _numbers(run.summary, "answer.")
        mlflow.log_metrics({name: float(number) for name, number in numbers.items()})
        mlflow.set_tags({f"autotune.{name}": str(value) for name, value in run.summary.items()})
        for file in run.files:
            mlflow.log_artifact(str(file))


_TRACKERS: Mapping[str, Callable[[TrackedRun], None]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
"""Value of --log-to -> its function."""
