"""What the record learns of a guarded run: a configuration that ran out of memory after it was
proven is not proven any more.

The stored proof becomes one that it does not fit, with the line of the failure and its step. The
measurement is stored as well, so that a search on this machine leaves the configuration out.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import UTC, datetime

from autotune.core.answer import Trial
from autotune.core.measurement import Failure, Outcome, judge
from autotune.core.space import fingerprint
from autotune.diagnosis import Diagnosis
from autotune.guard.ending import Ending
from autotune.guard.history import AttemptRecord
from autotune.preflight.check import Preflight
from autotune.preflight.proofs import PROOFS
from autotune.preflight.proofs import SCHEMA as PROOF_SCHEMA
from autotune.search.record import Store, circumstances

OF_OTHERS = "gpu_other_process"
ON_THE_HOST = "host_ram"


def refute(
    proven: Preflight,
    ending: Ending,
    record: AttemptRecord,
) -> None:
    """Store that the proven configuration does not fit, where its own need is what was refused."""
    proof = proven.proof
    if not proven.fits or not _is_by_the_known_limit(proven, ending):
        return
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    trial = _refused_trial(proof.trial, ending, record)
    store = Store()
    key = fingerprint({"schema": PROOF_SCHEMA, "facts": proof.facts})
    store.keep(
        PROOFS,
        key,
        replace(
            proof,
            when=now,
            trial=trial,
            certificate=None,
        ),
    )
    conditions = circumstances(proven.job, trial.measurement.versions)
    store.append(conditions, [trial], when=now)


def _is_by_the_known_limit(proven: Preflight, ending: Ending) -> bool:
    """Return False for memory of other processes, and on a CPU for a limit that only the command's
    shell has (`ulimit`).
    """
    if ending.cause == OF_OTHERS:
        return False
    is_on_gpu = proven.job.task.hardware.kind == "cuda"
    return is_on_gpu or ending.end.signal == signal.SIGKILL


def _refused_trial(
    trial: Trial,
    ending: Ending,
    record: AttemptRecord,
) -> Trial:
    """Return the proof's trial with the outcome of the real run."""
    diagnosis = ending.diagnosis or Diagnosis(known=False)
    outcome = Outcome.OOM_UNKNOWN
    if ending.cause == ON_THE_HOST:
        outcome = Outcome.OOM_HOST
    elif diagnosis.phase is not None:
        outcome = Outcome.out_of_memory_in(diagnosis.phase)
    place = "in its first steps"
    if record.last_step:
        place = f"after step {record.last_step}"
    failure = Failure(
        evidence=f"{ending.evidence} ({place} of a guarded run)",
        phase=diagnosis.phase,
        cause=ending.cause,
        numbers=dict(diagnosis.numbers),
    )
    measured = trial.measurement
    peak = max(measured.memory.peak_bytes or 0, measured.memory.limit_bytes)
    memory = replace(measured.memory, peak_bytes=peak)
    measurement = replace(
        measured,
        outcome=outcome,
        failure=failure,
        memory=memory,
        worst=None,
        typical=None,
    )
    return replace(trial, measurement=measurement, verdict=judge(measurement))
