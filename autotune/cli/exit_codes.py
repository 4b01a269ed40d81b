"""Exit codes, and the message on failure."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import click

from autotune.cli.output import say
from autotune.core.errors import AutotuneError, BadInput, TrainingEnvironmentError
from autotune.core.files import describe_full_disk
from autotune.machine import signals

DONE = 0
FAULT = 1
BAD_INPUT = 2
NOTHING_FITS = 3
NO_ENVIRONMENT = 4
UNDECIDED = 5
INTERRUPTED = 130


@dataclass(frozen=True)
class ExitReport:
    """What ends the command: its exit code, what happened, and the way out."""

    exit_code: int
    sentence: str
    way_out: str = ""


def report_and_exit_code(error: BaseException, *, as_json: bool) -> int:
    """Print the error on stderr and return its exit code. Tracebacks go to a file."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else FAULT
        case click.exceptions.Exit():
            return int(error.exit_code)
    report = _report_of_user(error) or _report_of_program(error)
    _print_report(report, as_json)
    return report.exit_code


def _report_of_user(error: BaseException) -> ExitReport | None:
    """Return what the user can change, or None."""
    match error:
        case KeyboardInterrupt() | click.Abort():
            return ExitReport(INTERRUPTED, "Interrupted.")
        case click.ClickException():
            return ExitReport(
                BAD_INPUT,
                error.format_message(),
                _help_of(error),
            )
        case BadInput():
            return ExitReport(BAD_INPUT, error.what, error.way_out)
        case RecursionError():
            sentence = "A given file or stored study is nested too deeply."
            return ExitReport(BAD_INPUT, sentence, "Give the original one.")
        case TrainingEnvironmentError():
            return ExitReport(NO_ENVIRONMENT, str(error))
    return None


def _report_of_program(error: BaseException) -> ExitReport:
    """Return what the user can't change: a failure of the environment, or a fault of ours."""
    if isinstance(error, AutotuneError):
        file = _write_traceback(error)
        return ExitReport(
            FAULT,
            _sentence(str(error)),
            f"The details are in {file}.",
        )
    if isinstance(error, OSError):
        full_disk = describe_full_disk(error)
        if full_disk is not None:
            return ExitReport(FAULT, full_disk)
    lines = str(error).strip().splitlines() or ["no message"]
    message = lines[0].rstrip(".")
    file = _write_traceback(error)
    return ExitReport(
        FAULT,
        f"internal error of autotune: {type(error).__name__}: {message}.",
        f"The traceback is in {file}.",
    )


def _help_of(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "autotune"
    return f"`{command} --help` shows what it takes."


def _print_report(report: ExitReport, as_json: bool) -> None:
    say(f"Error: {report.sentence} {report.way_out}".rstrip(), sys.stderr)
    if as_json:
        error = {
            "exit_code": report.exit_code,
            "what": report.sentence,
            "way_out": report.way_out,
        }
        print(json.dumps({"schema": 1, "status": "error", "error": error}))


def _sentence(text: str) -> str:
    """Return the text with a full stop at its end, for another sentence behind it."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _write_traceback(error: BaseException) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="autotune-traceback-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
        ) as file:
            file.writelines(traceback.format_exception(error))
        return file.name
    except OSError as unwritten:
        return f"no file, because none can be written ({unwritten.strerror})"


ABANDONED = (
    b"Error: Interrupted. What did not close in time was abandoned; everything recorded before is"
    b" kept.\n"
)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first stop signal into KeyboardInterrupt; end the process if it does not exit by
    itself in time. Workers exit with it."""

    def end_at_once() -> None:
        with contextlib.suppress(OSError):
            os.write(2, ABANDONED)  # without locks, which the main thread may hold
        os._exit(INTERRUPTED)

    with signals.interruptible(end_at_once):
        yield
