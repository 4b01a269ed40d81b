"""Diagnosis of a log, with predicted effects of its remedies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Unpack

from autotune.core.errors import BadInput
from autotune.request.flags import Flags, flags_of
from autotune.request.request_flags import RequestOptions

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis


def diagnose(
    log: str | PathLike[str] | Iterable[str], **options: Unpack[RequestOptions]
) -> Diagnosis:
    """Find the first failure in a training log (a file or its lines), with remedies.

    With `config` (the failed file) and `gpus` (its hardware; default: this machine's) remedies have
    predicted effects, or a remark has the reason that none can be predicted.
    """
    from autotune.diagnosis import diagnose_lines
    from autotune.diagnosis.log_files import lines_of_file

    lines = lines_of_file(str(log)) if isinstance(log, str | PathLike) else log
    diagnosis = diagnose_lines(lines)
    if not options.get("config"):
        return diagnosis
    return _with_predicted_effects(diagnosis, flags_of(options))


def _with_predicted_effects(diagnosis: Diagnosis, flags: Flags) -> Diagnosis:
    from autotune.diagnosis.remedies import with_effects
    from autotune.prediction.service import open_prediction_service
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import failed_file, read_sources

    file = failed_file(flags)
    try:
        request = read_sources(flags, mode="predict").parse(limit_prompts=True)
        candidate = candidate_of_job(request)
        with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
            return with_effects(diagnosis, request, candidate, service)
    except BadInput as error:
        remark = f"nothing could be predicted for {file}: {error}"
        return replace(diagnosis, remarks=(*diagnosis.remarks, remark))
