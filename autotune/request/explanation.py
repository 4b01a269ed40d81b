"""Origins of a candidate's settings, for `predict --explain` and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.space import Candidate
from autotune.frameworks.base import Field
from autotune.frameworks.launch_kinds import launch_kinds
from autotune.request.job_builder import ParsedRequest
from autotune.request.origins import Source

SOURCE_NAMES: Mapping[Source, str] = {
    Source.FRAMEWORK: "default",
    Source.SPACE: "space",
    Source.DATA: "data",
    Source.FILE_DEFAULT: "default",
    Source.VARIABLE: "variable",
    Source.FILE: "file",
    Source.TUNING: "tuning",
    Source.SEARCH: "flag",
    Source.HOLD: "flag",
    Source.SET: "flag",
    Source.FLAG: "flag",
}
DERIVED = "derived"
"""Source of a setting that the framework computes from others, or from the GPUs."""


def origins(
    request: ParsedRequest,
    candidate: Candidate,
) -> dict[str, dict[str, Any]]:
    """Return the source, place and line of each setting; None: no line is known."""
    rows = dict(_origins_of_settings(request, candidate))
    return dict(sorted(rows.items()))


def _origins_of_settings(
    request: ParsedRequest,
    candidate: Candidate,
) -> Iterator[tuple[str, dict[str, Any]]]:
    trainer = request.trainer
    fields = trainer.fields()
    of_hardware: set[str] = set()
    for kind in launch_kinds():
        if kind.framework == trainer.name:
            of_hardware.update(kind.follows_hardware)
    for name, value in candidate.settings.items():
        origin = request.origin(name)
        source = SOURCE_NAMES[origin.source]
        place = origin.place
        line = origin.line
        if origin.release:
            place = f"{origin.release}, by {origin.place}"
        elif source == "default":
            place = f"{trainer.name} {trainer.release}".strip()
            if name in of_hardware:
                source = DERIVED
                place = "--gpus"
            elif not _is_default(fields.get(name), value):
                source = DERIVED
                place = "other settings"
        yield name, {"source": source, "place": place, "line": line}


def _is_default(field: Field | None, value: object) -> bool:
    return field is not None and field.follows is None and field.default == value


def explained(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting of `predict --json`: its value, and where it comes from."""
    settings = document["settings"]
    width = max(map(len, settings), default=0)
    for name, origin in document["origins"].items():
        place = origin["place"]
        if origin["line"] is not None:
            place += f", line {origin['line']}"
        if origin["source"] in ("default", DERIVED):
            place = f"{origin['source']}: {place}"
        yield f"{name:<{width}}  {settings[name]!s:<12}  {place}"
