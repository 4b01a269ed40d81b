"""Types of recommendation.json: the source of its JSON Schema, and the reader of the HTML page.

The schema is checked in as `recommendation.schema.json`; `write_json_schema` writes it. Nearly
every field may be absent: documents of earlier versions lack some, and a prediction has no measured
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.core.errors import BadInput
from autotune.report.candidate_types import (
    CandidateRow,
    CertificateRow,
    IntervalRow,
    RecommendationRow,
    TradeOffRow,
)

SCHEMA_FILE = "recommendation.schema.json"
SCHEMA = 1
"""Version of the document; increased when a field is renamed or removed. Fields are added
without an increase."""


class LengthsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of completions or prompts that occur, in tokens."""

    source: str = ""
    mean: float | None = None
    p95: int | None = None


class ChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Setting that differs from the baseline."""

    name: str
    baseline: Any = None
    recommended: Any = None
    effect: str = "neutral"
    why: str = ""


class LengthPercentileRow(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of rows and tokens at a length limit."""

    share: int
    length: int
    rows_longer: int
    truncating_drops_tokens: int
    filtering_drops_tokens: int


class DatasetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the user's rows."""

    rows: int
    looked_at: int
    tokens: int
    percentiles: tuple[LengthPercentileRow, ...]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """Job that the document answers."""

    model: str
    method: str
    framework: str
    hardware: str
    memory_limit_bytes: float
    model_from: str | None = None
    tuning: str = ""
    weights: str = ""
    space: str = ""
    budget_seconds: float | None = None
    typical_completion_length: int | None = None
    completion_lengths: LengthsRow | None = None
    prompt_lengths: LengthsRow | None = None
    dataset: DatasetRow | None = None


class DisturbanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Interference of concurrent probes."""

    beside: int | None = None
    tokens_per_second_beside: float | None = None
    tokens_per_second_alone: float | None = None
    slower_share: float | None = None
    uncertainty: float | None = None
    by_phase: Mapping[str, float] = {}
    candidate_id: str | None = None
    says: str = ""


class AdvantageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the recommendation, or of the fastest other candidate, divided by the baseline's."""

    candidate_id: str
    why: str
    ratio: float
    low: float
    high: float
    says: str = ""


class RunSpreadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Standard deviation of a candidate's log speed between runs."""

    deviation: float
    freedom: float
    repeats: int
    step_deviation: float | None = None


class SoakRow(msgspec.Struct, frozen=True, kw_only=True):
    """Long run of one candidate; `cycles` has the columns of `cycle_columns`."""

    verdict: str
    why: str
    seconds: float
    cycles: tuple[tuple[float, ...], ...]
    cycle_columns: tuple[str, ...]
    optimizer_steps: int
    growth_bytes_per_step: IntervalRow | None = None
    projected_steps: int | None = None
    peak_bytes: float | None = None
    limit_bytes: float | None = None


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of an answer that was measured earlier."""

    when: str
    where: str
    versions: Mapping[str, str]
    elapsed_seconds: float


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    storage: str
    name: str


class FileSettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of the written file that the user's does not have, or has otherwise."""

    name: str
    yours: Any = None
    written: Any = None
    kind: str  # `changed`, `assumed` or `moved`


class FileRow(msgspec.Struct, frozen=True, kw_only=True):
    """The user's configuration file and the written one."""

    path: str
    written: str
    settings: tuple[FileSettingRow, ...] = ()


class WayRow(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted change that makes the baseline fit, where nothing that was searched does."""

    change: Mapping[str, Any]
    learning: bool
    margin_bytes: IntervalRow | None = None
    peak_memory_bytes: IntervalRow | None = None
    speed_ratio: float | None = None


class AnswerDocument(msgspec.Struct, frozen=True, kw_only=True):
    """recommendation.json. Measured figures and predicted ones have different fields; `basis`
    names the kind of answer."""

    schema: int
    status: str
    basis: str
    question: JobRow
    recommendation: RecommendationRow | None = None
    baseline: CandidateRow | None = None
    changes: tuple[ChangeRow, ...] = ()
    runner_ups: tuple[CandidateRow, ...] = ()
    trade_offs: tuple[TradeOffRow, ...] = ()
    undecided: CandidateRow | None = None
    nearest_miss: CandidateRow | None = None
    ways_to_fit: tuple[WayRow, ...] = ()
    refuted: tuple[CandidateRow, ...] = ()
    counts: Mapping[str, int] = {}
    script: Mapping[str, Any] | None = None
    file: FileRow | None = None
    trials: tuple[CandidateRow, ...] = ()
    proven: str = ""
    stopped_by: str | None = None
    rows_left_out: int | None = None
    from_record: SourceRow | None = None
    learning: Mapping[str, Any] = {}
    commands: Mapping[str, str] = {}
    caveats: tuple[str, ...] = ()
    busy_machine: str | None = None  # Sentence on repeats that differ too much; None: they agree
    resume_with: str | None = None
    confirm_with: str | None = None
    finished: str | None = None
    study: StudyRow | None = None
    out: str | None = None
    soaks: tuple[SoakRow, ...] = ()
    disturbance: DisturbanceRow | None = None
    advantage: AdvantageRow | None = None
    run_spread: RunSpreadRow | None = None
    elapsed_seconds: float | None = None
    gpu_seconds: float | None = None
    probe_seconds: float | None = None
    seconds_per_candidate: Mapping[str, float | None] = {}
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}

    @property
    def predicted(self) -> bool:
        return self.basis == "predicted"

    @property
    def emulated(self) -> bool:
        return self.basis == "emulated"

    @property
    def probes(self) -> tuple[CandidateRow, ...]:
        """Trials without confirmations, which repeat a candidate."""
        return tuple(row for row in self.trials if row.purpose != "confirm")


def read_answer(document: Mapping[str, Any]) -> AnswerDocument:
    """Return the typed document; BadInput if it is none."""
    if document.get("schema") != SCHEMA:
        raise BadInput(
            f"The document has schema {document.get('schema')!r}; this version reads schema"
            f" {SCHEMA}.",
            way_out=(
                "Create it again with `autotune run`, or use the version of autotune that wrote it."
            ),
        )
    try:
        answer = msgspec.convert(document, AnswerDocument, strict=False)
        _ = (
            answer.recommendation and answer.recommendation.confirmed
        )  # refused here, not by the page
        return answer
    except msgspec.ValidationError as error:
        raise BadInput(
            f"The document is not one of autotune's: {error}.",
            way_out="Name a folder that `autotune run` wrote.",
        ) from None


def json_schema() -> bytes:
    """Return the JSON Schema of recommendation.json."""
    (reference, _), types = msgspec.json.schema_components(
        (AnswerDocument, CertificateRow), ref_template="#/$defs/{name}"
    )
    # The page shows unknown fields of a certificate as well, so its type is declared here alone.
    types["RecommendationRow"]["properties"]["certificate"] = {
        "anyOf": [{"$ref": "#/$defs/CertificateRow"}, {"type": "null"}],
        "default": None,
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "recommendation.json",
        **reference,
        "$defs": types,
    }
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2) + b"\n"


def write_json_schema() -> None:
    """Write the schema beside this module, after a change of the types."""
    Path(__file__).with_name(SCHEMA_FILE).write_bytes(json_schema())
