"""optuna-dashboard over one study, on a local address."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import BadInput, MissingExtra
from autotune.search.dashboard.guard import guarded
from autotune.search.storage import open_storage, the_study_in


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Parts of the answer beyond the study's own records."""

    note: str = ""  # Note of the study, in Markdown
    figures: Mapping[str, str] = field(default_factory=dict)  # plotly figures by title, as JSON
    best_trial: int | None = None  # Number of the recommended trial; None without a recommendation


def application(storage_url: str, study_name: str | None, extras: Extras | None = None) -> Any:
    """Return the WSGI application; BadInput without such a study."""
    try:
        import optuna_dashboard
    except ImportError as missing:
        raise MissingExtra("`autotune dashboard`", "dashboard") from missing
    from autotune.search.dashboard import artifacts, notes
    from autotune.search.dashboard.dashboard_storage import DashboardStorage

    extras = extras or Extras()
    under = open_storage(storage_url)
    name = the_study_in(under, study_name, storage_url)
    study_id = under.get_study_id_from_name(name)

    def of_study(trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        shown = notes.as_attributes(extras.note or _note_while_searching(trials), None) | _drawn(extras.figures)
        for trial in trials:
            shown |= notes.as_attributes(notes.of_trial(trial), trial._trial_id)
        return shown

    shown = DashboardStorage(under, name, of_study=of_study, best=lambda trials: best_that_fits(trials, extras.best_trial))
    recorded = artifacts.RecordedArtifacts(lambda: under.get_all_trials(study_id, deepcopy=False))
    return optuna_dashboard.wsgi(shown, artifact_store=recorded)


class _ServerOf6(WSGIServer):
    address_family = socket.AF_INET6


def serve(app: Any, host: str, port: int) -> WSGIServer:
    """Return a guarded server for `serve_forever`; BadInput if the address is unavailable."""
    try:
        return make_server(host, port, guarded(app, host), server_class=_ServerOf6 if ":" in host else WSGIServer)
    except OSError as error:
        raise BadInput(
            f"The address {host}:{port} can't be used: {error.strerror}.", way_out="Take another port: --port 0 picks a free one."
        ) from error


def best_that_fits(trials: Sequence[FrozenTrial], recommended: int | None) -> FrozenTrial | None:
    """Return the recommended trial, or the fastest whose constraints hold."""
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    fitting = [trial for trial in complete if all(amount <= 0 for amount in trial.constraints.values())]
    chosen = next((trial for trial in fitting if trial.number == recommended), None)
    return chosen or max(fitting, key=lambda trial: trial.value or float("-inf"), default=None)


def _note_while_searching(trials: Sequence[FrozenTrial]) -> str:
    best = best_that_fits(trials, None)
    done = sum(trial.state.is_finished() for trial in trials)
    found = f"the fastest that fits so far is trial {best.number}" if best else "nothing has fitted so far"
    return f"{done} trials on record; {found}. There is no recommendation yet."


def _drawn(figures: Mapping[str, str]) -> dict[str, Any]:
    from optuna_dashboard._custom_plot_data import SYSTEM_ATTR_PLOT_DATA, split_plot_data

    attributes: dict[str, Any] = {}
    for title, figure in figures.items():
        attributes |= split_plot_data(figure, f"{SYSTEM_ATTR_PLOT_DATA}{title}:")
    return attributes
