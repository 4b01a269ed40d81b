"""optuna-dashboard over one study, on a local address.

The server answers requests that only read, addressed to a name of this machine. A page on the web
can send requests to a local port, and read the answers once its own name resolves to 127.0.0.1. Its
requests then carry that name.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

from autotune.core.errors import BadInput, MissingExtra
from autotune.search.dashboard_content import READ_ONLY
from autotune.search.storage import open_storage, the_study_in

READING = frozenset({"GET", "HEAD"})
_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Parts of the answer beyond the study's own records."""

    note: str = ""  # Note of the study, in Markdown
    figures: Mapping[str, str] = field(default_factory=dict)  # plotly figures by title, as JSON
    best_trial: int | None = None  # Number of the recommended trial; None without a recommendation


def application(
    storage_url: str,
    study_name: str | None,
    extras: Extras | None = None,
) -> Any:
    """Return the WSGI application; BadInput without such a study."""
    try:
        import optuna_dashboard
    except ImportError as missing:
        raise MissingExtra("`autotune dashboard`", "dashboard") from missing
    from autotune.search.dashboard_storage import DashboardStorage, RecordedArtifacts

    storage = open_storage(storage_url)
    name = the_study_in(storage, study_name, storage_url)
    extras = extras or Extras()
    shown = DashboardStorage(
        storage,
        name,
        note=extras.note,
        figures=extras.figures,
        best_trial=extras.best_trial,
    )
    artifacts = RecordedArtifacts(storage, name)
    return optuna_dashboard.wsgi(shown, artifact_store=artifacts)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread: a browser keeps connections open, and opens several."""

    daemon_threads = True


class _ServerOf6(_Server):
    address_family = socket.AF_INET6


def serve(
    app: Any,
    host: str,
    port: int,
) -> WSGIServer:
    """Return a guarded server for `serve_forever`; BadInput if the address is unavailable."""
    server_class = _ServerOf6 if ":" in host else _Server
    try:
        guarded_app = guarded(app, host)
        return make_server(host, port, guarded_app, server_class=server_class)
    except OSError as error:
        raise BadInput(
            f"The address {host}:{port} can't be used: {error.strerror}.",
            way_out="Take another port: --port 0 picks a free one.",
        ) from error


def guarded(app: Application, bound: str) -> Application:
    """Return the application for a server bound to this address; other requests are refused."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        if not may_be_addressed(host, bound):
            reason = f"The dashboard is not {host!r}: open it as http://localhost."
            return _refuse(start_response, "403 Forbidden", reason)
        if environ["REQUEST_METHOD"] not in READING:
            methods = ", ".join(sorted(READING))
            allow = ("Allow", methods)
            return _refuse(start_response, "405 Method Not Allowed", READ_ONLY, allow)
        return app(environ, start_response)

    return answer


def may_be_addressed(host: str, bound: str) -> bool:
    """Return True for names of the loopback, and for those of the address that the user bound. A
    server on all addresses is reached by any, or by the machine's own name; an address in figures
    can't be rebound to another machine.
    """
    name = _name_of(host)
    if name == "localhost" or name == bound.lower():
        return bool(name)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        if bound not in _EVERYWHERE:
            return False
        names = (socket.gethostname().lower(), socket.getfqdn().lower())
        return name in names
    return address.is_loopback or bound in _EVERYWHERE


def _name_of(host: str) -> str:
    """Return the name of a Host header without its port and the brackets of IPv6."""
    host = host.strip().lower()
    name, separator, port = host.rpartition(":")
    if not separator or not port.isdecimal():
        name = host
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


def _refuse(
    start_response: Any, status: str, reason: str, *headers: tuple[str, str]
) -> list[bytes]:
    all_headers = [("Content-Type", "application/json"), *headers]
    start_response(status, all_headers)
    body = json.dumps({"reason": reason})
    return [body.encode()]
