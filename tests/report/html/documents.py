"""Documents to make pages of: of the real search on a simulated machine, and of a real run that
is committed as an example.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.report.answer_document import document
from tests.report.answers import answered

EXAMPLE = (
    Path(__file__).resolve().parents[3] / "examples" / "tiny-qwen2-on-a-cpu" / "recommendation.json"
)


def of_a_search(limit_mib: int = 900, **options: bool) -> dict[str, Any]:
    case = answered(limit_mib, **options)
    # As a reader of the file gets it: through JSON.
    return json.loads(json.dumps(document(case.job, case.answer, ["recommended.yaml"])))


def of_a_real_run() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text())


def with_predictions(limit_mib: int = 900) -> dict[str, Any]:
    """A search whose candidates had been predicted, as on GPUs: the figures are made up, their
    form is the document's.
    """
    answer = of_a_search(limit_mib)
    for row in answer["trials"]:
        if row["outcome"] == "ok":
            peak, speed = row["peak_memory_bytes"], row["tokens_per_second"]["worst"]
            row["prediction"] = {
                "peak_memory_bytes": {"value": peak * 1.02, "low": peak * 0.97, "high": peak * 1.1},
                "tokens_per_second": {"value": speed * 1.3, "low": speed * 0.6, "high": speed * 2},
            }
    parts = [{"name": "weights", "bytes": 2**30}, {"name": "activations", "bytes": 2**29}]
    phase = {
        "name": "backward",
        "peak_bytes": {"value": 1.5 * 2**30, "low": 2**30, "high": 2**31},
        "breakdown": parts,
    }
    answer["recommendation"]["prediction"] = {"phases": [phase]}
    return answer
