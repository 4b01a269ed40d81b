"""Contracts of the command line: flags, exit codes and JSON keys equal the checked-in list
(contracts.json).

A deliberate change updates the list: `python -m tests.test_contracts`.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from autotune.cli import autotune_command, exit_codes, main, preflight, rehearse, run
from autotune.diagnosis import as_document, diagnose_lines
from autotune.emulator.cards import emulated_machine
from autotune.emulator.launch import CommandFailure, Rehearsed
from autotune.emulator.reports import ProcessReport, RunReport
from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import Ending, Reason
from autotune.guard.history import AttemptRecord, History
from autotune.guard.watched import AttemptPeaks
from autotune.preflight.check import Preflight
from autotune.preflight.proofs import Proof
from autotune.report.answer_document import document, prediction_document
from tests.report import test_forecast as predicted
from tests.report.answers import answered
from tests.simulated import toy_job, toy_space

CONTRACTS = Path(__file__).with_name("contracts.json")
LOG = Path(__file__).parent / "failures" / "samples" / "disk.txt"
DEPTH = 2
"""Levels of keys that are compared; deeper ones can be data."""


def flags() -> dict[str, Any]:
    """Return flag -> properties for all commands, and the metavars of their arguments."""
    return dict(_flags_of(autotune_command, click.Context(autotune_command), "autotune"))


def _flags_of(
    command: click.Command,
    context: click.Context,
    path: str,
) -> Iterator[tuple[str, Any]]:
    listed = {"--help": {}} if path == "autotune" else {}
    for param in command.params:
        properties: dict[str, Any] = {"required": param.required}
        if isinstance(param, click.Option):
            default = None if param.multiple or param.is_flag else param.default
            properties |= {"default": default if isinstance(default, str | int) else None}
            properties |= {"flag": param.is_flag, "repeated": param.multiple}
            properties |= {
                "number": "int" in param.type.name,
                "choices": list(getattr(param.type, "choices", [])),
            }
        listed[
            (
                " ".join(param.opts)
                if isinstance(param, click.Option)
                else str(param.metavar or param.name)
            )
        ] = properties
    yield path, dict(sorted(listed.items()))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _flags_of(below, context, f"{path} {name}")


def codes() -> dict[str, Any]:
    """Return the exit codes, by name and by status of a document."""
    code_by_name = {}
    for name, code in vars(exit_codes).items():
        if name.isupper() and isinstance(code, int):
            code_by_name[name] = code
    return {
        "names": code_by_name,
        "run": run.EXITS,
        "preflight": dict(preflight.EXIT_CODES),
        "rehearse": rehearse.EXITS,
    }


def keys() -> dict[str, list[str]]:
    """Return the key paths of each JSON document."""
    case = answered(420)
    job = toy_job(Path("out"), toy_space(), 40 * 2**30, mode="predict")
    trial = case.answer.trials[0]
    proof = Proof(
        schema=1,
        when="",
        where="",
        facts={},
        trial=trial,
        certificate={},
    )
    report = Preflight(
        job=case.job,
        candidate=trial.candidate,
        proof=proof,
        from_record=True,
        missed=None,
        tuned=None,
        use=None,
        elapsed_seconds=0.0,
    )
    process = ProcessReport(
        pid=1,
        peak_bytes={0: 1},
        torch_allocated_bytes={},
        torch_reserved_bytes={},
        phase_peak_bytes={},
        refused=0,
        launches=0,
        skipped_copies=0,
        skipped_bytes=0,
        calls={},
        card_peak_bytes={0: 1},
    )
    rehearsed = Rehearsed(
        machine=emulated_machine("L4"),
        code=1,
        report=RunReport(processes=(process,), unjudged={}),
        failure=CommandFailure(message="", place=None),
        output=(),
    )
    documents: dict[str, Mapping[str, Any]] = {
        "run": document(case.job, case.answer, ["out/a.yaml"]),
        "run, predicted": document(job, predicted._forecast(), ["out/a.yaml"], confirm_with="x"),
        "predict": prediction_document(
            job, predicted.CANDIDATE, predicted.PREDICTION, (predicted.WAY,)
        ),
        "preflight": report.document,
        "guard": guarded_run().document(),
        "diagnose": as_document(diagnose_lines(LOG.read_text().splitlines())),
        "rehearse": rehearse._document(rehearsed, diagnose_lines([])),
        "error": printed("predict", "--gpus", "nothing", "--json"),
        **{
            f"show {table}": printed("show", table, "--json")
            for table in ("models", "gpus", "spaces", "knobs")
        },
    }
    return {name: sorted(set(_paths(paths, DEPTH))) for name, paths in documents.items()}


def guarded_run() -> History:
    """Return the history of a run with one attempt."""
    attempt = AttemptRecord(
        number=1,
        config=None,
        command=[],
        began=0.0,
        from_step=None,
        checkpoint=None,
        memory=[{"seconds": 0.1, "bytes": 1}],
        checkpoints=[{"step": 1, "seconds": 0.1}],
    )
    ending = Ending(reason=Reason.FINISHED, end=ProcessEnd(exit=0))
    attempt.ended(ending, seconds=1.0, peaks=AttemptPeaks())
    return History(
        out=Path("out"),
        config=None,
        attempts=[attempt],
    )


def printed(*arguments: str) -> dict[str, Any]:
    """Return the JSON document that a command prints."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.suppress(SystemExit):
        main(arguments)
    result: dict[str, Any] = json.loads(stdout.getvalue())
    return result


def _paths(
    value: object,
    depth: int,
    path: str = "",
) -> Iterator[str]:
    if path:
        yield path
    if isinstance(value, Mapping) and depth:
        for key, part in value.items():
            yield from _paths(part, depth - 1, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and depth:
        for part in value:
            yield from _paths(part, depth, f"{path}[]" if not path.endswith("[]") else path)


def contracts() -> dict[str, Any]:
    current = {"flags": flags(), "exit codes": codes(), "JSON keys": keys()}
    result: dict[str, Any] = json.loads(json.dumps(current))
    return result


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return contracts()


@pytest.mark.parametrize("part", ["flags", "exit codes", "JSON keys"])
def test_contracts_are_unchanged(now: dict[str, Any], part: str) -> None:
    assert now[part] == json.loads(CONTRACTS.read_text())[part]


if __name__ == "__main__":
    CONTRACTS.write_text(json.dumps(contracts(), indent=1, sort_keys=True) + "\n")
