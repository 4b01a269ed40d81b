"""Environment in which nothing that predicts, probes or rehearses reports to a tracker.

`AUTOTUNE_TRACKERS=1` leaves the user's environment as it is. Settings (`report_to`, `push_to_hub`)
are overridden where the framework's arguments are made; a written file keeps the user's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

KEEP = "AUTOTUNE_TRACKERS"  # variable that keeps trackers on in probes
_OFF = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true",
    "COMET_MODE": "disabled", "COMET_START_ONLINE": "0", "COMET_DISABLE_AUTO_LOGGING": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE", "HF_MLFLOW_LOG_ARTIFACTS": "0",
    "SWANLAB_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1", "DVCLIVE_LOG_MODEL": "false",
}  # fmt: skip

_LOCAL = {"MLFLOW_TRACKING_URI": "mlruns", "TRACKIO_DIR": "trackio", "COMET_OFFLINE_DIRECTORY": "comet", "WANDB_DIR": "wandb"}
"""Variable -> folder in the scratch folder, for libraries that a program calls by itself."""

_DROPPED = frozenset({"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "MLFLOW_RUN_ID"})
"""Addresses of runs. Keys stay: a program may read them for other purposes, and a disabled tracker does not."""


def without_side_effects(ours: Mapping[str, str], folder: Path | None = None) -> dict[str, str]:
    """Return the environment with all trackers off; `folder` receives what they write locally."""
    if ours.get(KEEP) == "1":
        return dict(ours)
    place = folder or Path(tempfile.gettempdir()) / "autotune-trackers"
    local = {name: str(place / part) for name, part in _LOCAL.items()}
    return {**{name: value for name, value in ours.items() if name not in _DROPPED}, **_OFF, **local}
