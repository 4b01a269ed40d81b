"""Parts that are absent where a script is inspected, all replaced at once."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from ..protocol import Request, decode, encode
from ..tracing.patching import all_entered
from . import (
    absent_data,
    absent_fire,
    absent_models,
    absent_packages,
    absent_values,
    composed_config,
    missing_arguments,
    named_gpus,
    named_ranks,
    searched_values,
    time_limit,
    user_source,
)
from .absent_models import ConfigLookup, Replacements
from .script_capture import is_library


class AbsentParts:
    """Parts of the script that were replaced, by kind."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def report(self, kind: str, name: str) -> None:
        names = self.names.setdefault(kind, [])
        if name not in names:
            names.append(name)

    @all_entered
    def replaced(self, request: Request, channel: TextIO) -> Replacements:
        """Replace what is not here, if the request allows it."""
        if not request.get("absent"):
            return
        script = Path(request["script"])
        checks = [user_source.Check(*place) for place in request.get("passed_over", ())]
        yield absent_data.placeholders(self.report)
        yield user_source.without_checks(checks, is_library)
        fills = bool(request.get("fills"))
        yield absent_data.own_files(is_library, self.report, finds=fills)
        yield absent_data.frames(self.report)
        yield absent_models.without_weights(
            _configs_through(channel),
            self.report,
            loads_float32=bool(request.get("loads_float32")),
        )
        yield absent_packages.placeholders(script, is_library, self.report)
        yield absent_packages.former_names(is_library, self.report)
        yield self._completed_arguments(request)
        if request.get("ranks"):
            yield named_ranks.seen_by_user(request["ranks"], is_library)
        yield missing_arguments.secrets(is_library, self.report)
        yield absent_values.zeros()
        yield searched_values.largest(script, self.report)
        yield time_limit.no_pauses(is_library)
        if request.get("gpus"):
            yield named_gpus.seen_by_user(request["gpus"], is_library, self.report)

    def _completed_arguments(self, request: Request) -> AbstractContextManager[None]:
        """Complete the arguments of the script, for each kind of parser that it may use."""
        model = request.get("model")
        if model is None and request.get("stand_in"):
            model = missing_arguments.UnstatedModel(request["stand_in"])
        absent_fire.model[0] = model
        composed_config.report_choice[0] = self.report
        fills = bool(request.get("fills"))
        return missing_arguments.completed(model, fills, self.report)


def _configs_through(channel: TextIO) -> ConfigLookup:
    """Return the look-up of a model's config, which whoever asked for the inspection answers."""

    def config_of(name: str) -> Any:
        question = encode({"config_of": name})
        channel.write(question + "\n")
        channel.flush()
        return decode(sys.stdin.readline())

    return config_of
