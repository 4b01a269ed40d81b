"""A configuration that ran out of memory after it was proven: the record says so from then on."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.job import DeviceKind
from autotune.core.measurement import Outcome
from autotune.core.space import fingerprint
from autotune.diagnosis import diagnose
from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import Ending, Reason
from autotune.guard.history import AttemptRecord
from autotune.guard.refuted_proof import refute
from autotune.preflight.check import Preflight
from autotune.preflight.proofs import PROOFS, SCHEMA, Proof
from autotune.search.record import Store, circumstances
from tests.report.answers import answered

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 39.39 GiB of which 1.00 GiB is free."
)
FACTS = {"versions": {"torch": "2.13"}, "load": {"model": "tiny"}}
KEY = fingerprint({"schema": SCHEMA, "facts": FACTS})


def proven(kind: DeviceKind = "cuda") -> Preflight:
    case = answered(420)
    task = case.job.task
    job = replace(case.job, task=replace(task, hardware=replace(task.hardware, kind=kind)))
    trial = next(trial for trial in case.answer.trials if trial.verdict.fits)
    proof = Proof(
        schema=1,
        when="",
        where="",
        facts=FACTS,
        trial=trial,
        certificate={},
    )
    return Preflight(
        job=job,
        candidate=trial.candidate,
        proof=proof,
        from_record=True,
        missed=None,
        tuned=None,
        use=None,
        elapsed_seconds=0.0,
    )


def ended(output: str, **end: int) -> tuple[Ending, AttemptRecord]:
    diagnosis = diagnose(output)
    ending = Ending(
        reason=Reason.MEMORY,
        end=ProcessEnd(**end),
        cause=diagnosis.cause,
        evidence=diagnosis.evidence,
        diagnosis=diagnosis,
    )
    record = AttemptRecord(
        number=1,
        config=None,
        command=[],
        began=0.0,
        from_step=None,
        checkpoint=None,
    )
    record.last_step = 800
    return ending, record


@pytest.fixture(autouse=True)
def a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_it_is_not_proven_any_more() -> None:
    result = proven()
    refute(result, *ended(OUT_OF_MEMORY, exit=1))
    stored = Store().kept(PROOFS, KEY, Proof)
    assert stored is not None and not stored.trial.verdict.fits
    assert stored.trial.measurement.outcome.is_out_of_memory
    assert "after step 800 of a guarded run" in stored.trial.verdict.why
    assert stored.certificate is None


def test_a_search_knows_it_as_measured() -> None:
    result = proven()
    refute(result, *ended(OUT_OF_MEMORY, exit=1))
    versions = result.proof.trial.measurement.versions
    stored = Store().measured(circumstances(result.job, versions))
    assert [trial.candidate.id for trial in stored.trials] == [result.candidate.id]
    assert stored.trials[0].measurement.outcome is not Outcome.OK


def test_memory_of_other_processes_says_nothing_about_it() -> None:
    ending, record = ended(OUT_OF_MEMORY, exit=1)
    refute(proven(), replace(ending, cause="gpu_other_process"), record)
    assert Store().kept(PROOFS, KEY, Proof) is None


def test_on_a_cpu_a_limit_of_the_shell_says_nothing_about_the_machine() -> None:
    result = proven("cpu")
    refute(result, *ended("RuntimeError: DefaultCPUAllocator: can't allocate memory", exit=1))
    assert Store().kept(PROOFS, KEY, Proof) is None
    refute(result, *ended("", signal=signal.SIGKILL))
    assert Store().kept(PROOFS, KEY, Proof) is not None
