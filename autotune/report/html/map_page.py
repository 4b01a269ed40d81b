"""Map of a space: one page without network access. A reader chooses settings and sees whether
they fit, with which memory and speed.

predicted space -> map_data.py (columns) -> map.html.jinja with map*.js, which finds the candidate
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from autotune.core.secrets import without_secret_arguments
from autotune.report.html.map_data import map_data
from autotune.report.html.templates import joined_files, open_templates, safe_in_script
from autotune.request.flags import Flags, typed
from autotune.search.predicted_space import PredictedSpace

SCRIPTS = ("map.js", "map_memory.js", "map_heat.js", "map_controls.js", "copy.js")


def render_map(space: PredictedSpace, flags: Flags) -> str:
    """Return the page. `flags`: those of the request, for commands to copy."""
    # 1. The data, and the command to copy.
    data = map_data(space)
    data["command"] = command_parts(flags, data)
    data_text = json.dumps(data, separators=(",", ":"))

    # 2. The page around them.
    task = space.job.task
    prediction = space.predictions[space.start.id]
    templates = open_templates()
    template = templates.get_template("map.html.jinja")
    return template.render(
        workload=task.workload,
        hardware=str(task.hardware),
        candidates=len(space.candidates),
        versions=prediction.versions,
        data=safe_in_script(data_text),
        style=joined_files("page.css", "map.css"),
        script=joined_files(*SCRIPTS),
    )


def command_parts(flags: Flags, data: dict[str, Any]) -> list[str]:
    """Return the command of `predict`, before and after the place for --set of varying knobs."""
    varying = set()
    for knob in data["knobs"]:
        if len(knob["values"]) > 1:
            varying.add(knob["name"])
    constant = []
    for choices in flags.search:
        name, _, _ = choices.partition("=")
        if name not in varying:
            constant.append(choices)

    own_flags = flags.replace(search=tuple(constant), arguments=())
    flag_words = without_secret_arguments(typed(own_flags))
    before = shlex.join(["autotune", "predict", *flag_words])
    if not flags.arguments:
        return [before, ""]
    arguments = without_secret_arguments(flags.arguments)
    after = shlex.join(["--", *arguments])
    return [before, after]
