"""`autotune dashboard`: a study in optuna-dashboard, with the memory limit respected."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import DONE, interruptible
from autotune.cli.options import storage_options

if TYPE_CHECKING:
    from autotune.search.dashboard_server import Extras


@click.command(name="dashboard", short_help="show a study in optuna-dashboard")
@click.argument("folder", default="autotune-out", metavar="[FOLDER]")
@storage_options(
    "Optuna storage. Default: the one named in the folder's answer. Example: sqlite:///study.db."
)
@click.option(
    "--study", "name", metavar="NAME", help="Name of the study. Needed if the storage has several."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listening address; others allow access from outside.",
)
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port; 0 selects a free one.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document with the address, then serve."
)
def command(
    folder: str,
    storage: str | None,
    name: str | None,
    host: str,
    port: int,
    as_json: bool,
) -> int:
    """Serve a study in optuna-dashboard until Ctrl-C. The best trial is the best that fits. Trials
    out of memory are infeasible. Notes contain the outcome of each trial and the recommendation.
    Writes are refused, and so are requests to names that are not this machine's.

    \b
    Example:
      autotune dashboard autotune-out

    """
    from autotune.report.html.render import read_document
    from autotune.report.output_folder import DOCUMENT
    from autotune.search.dashboard_server import application, serve

    # 1. The answer in the folder, if there is one: its study, and its notes and figures.
    path = Path(folder)
    source = path / DOCUMENT if path.is_dir() else path
    document = read_document(source) if storage is None or source.exists() else None
    study = (document or {}).get("study") or {}
    database = storage or _storage_of(study, path)
    app = application(database, name or study.get("name"), _extras(document))

    # 2. The server.
    with serve(app, host, port) as server:
        address = f"[{host}]" if ":" in host else host  # IPv6
        url = f"http://{address}:{server.server_port}/dashboard"
        message = f"Serving on {url} (Ctrl-C ends it)"
        if as_json:
            message = json.dumps({"schema": 1, "url": url})
        print(message, flush=True)
        # Separate thread: an interrupt inside a request would count as a failure of the request.
        thread = threading.Thread(
            target=server.serve_forever,
            name="autotune-dashboard",
            daemon=True,
        )
        with contextlib.suppress(KeyboardInterrupt), interruptible():
            thread.start()
            thread.join()
        server.shutdown()
    return DONE


def _extras(document: dict[str, Any] | None) -> Extras:
    """Return what the dashboard shows of an answer besides its study; None: no answer."""
    from autotune.report.html.render import figures_of, markdown
    from autotune.search.dashboard_server import Extras

    if document is None:
        return Extras()
    certificate = (document.get("recommendation") or {}).get("certificate") or {}
    return Extras(
        note=markdown(document),
        figures=figures_of(document),
        best_trial=certificate.get("trial"),
    )


def _storage_of(study: dict[str, Any], folder: Path) -> str:
    """Return the folder's own database, since folders are moved; else the answer's storage."""
    from autotune.core.errors import BadInput
    from autotune.core.files import sqlite_url

    database = folder / "study.db"
    if database.exists():
        return sqlite_url(database)
    if not study.get("storage"):
        raise BadInput(
            f"{folder} holds a predicted answer: nothing was measured, so there is no study.",
            way_out="`autotune report` shows it.",
        )
    return str(study["storage"])
