"""Probe of one configuration on the cards that this process sees: an emulated machine's.

python benchmarks/emulated_row.py SETUP PYTHON ANSWER.json
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from emulated_setups import SETUPS

from autotune.core.answer import plain
from autotune.core.errors import AutotuneError
from autotune.core.probe_plan import ProbePlan
from autotune.request.job_builder import candidate_of_job, parse_request
from autotune.search.pipeline import open_executor

PLAN = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=1)
"""Two cycles: Adam's state is made in the first step, and both hold every phase."""


def main() -> int:
    name, python, answer = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    setup = next(one for one in SETUPS if one.name == name)
    try:
        found = _measured(setup.flags("local", python))
    except AutotuneError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(found))
    return 0


def _measured(flags: Any) -> dict[str, Any]:
    request = parse_request(flags.replace(mode="probe"))
    candidate = candidate_of_job(request)
    with closing(open_executor(request.job, request.trainer)) as executor:
        measurement = executor.open(candidate).measure(candidate, PLAN)
    told: dict[str, Any] = plain(measurement)
    told["memory"].pop("timeline", None)
    return {"measurement": told, "settings": dict(candidate.settings)}


if __name__ == "__main__":
    raise SystemExit(main())
