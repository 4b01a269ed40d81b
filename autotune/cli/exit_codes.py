"""Exit codes, and the message on failure."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator

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


def report_and_exit_code(error: BaseException, *, as_json: bool) -> int:
    """Print the error on stderr and return its exit code. Tracebacks go to a file."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else FAULT
        case click.exceptions.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | click.Abort():
            return _report(INTERRUPTED, "Interrupted.", "", as_json)
        case click.ClickException():
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "autotune"
            return _report(
                BAD_INPUT,
                error.format_message(),
                f"`{command} --help` shows what it takes.",
                as_json,
            )
        case BadInput():
            return _report(BAD_INPUT, error.what, error.way_out, as_json)
        case RecursionError():
            return _report(
                BAD_INPUT,
                "A given file or stored study is nested too deeply.",
                "Give the original one.",
                as_json,
            )
        case TrainingEnvironmentError():
            return _report(NO_ENVIRONMENT, str(error), "", as_json)
        case AutotuneError():
            sentence = _sentence(str(error))
            return _report(
                FAULT, sentence, f"The details are in {_write_traceback(error)}.", as_json
            )
        case OSError() if (full := describe_full_disk(error)) is not None:
            return _report(FAULT, full, "", as_json)
        case _:
            lines = str(error).strip().splitlines() or ["no message"]
            sentence = (
                f"internal error of autotune: {type(error).__name__}: {lines[0].rstrip('.')}."
            )
            return _report(
                FAULT, sentence, f"The traceback is in {_write_traceback(error)}.", as_json
            )


def _report(
    code: int,
    sentence: str,
    way_out: str,
    as_json: bool,
) -> int:
    say(f"Error: {sentence} {way_out}".rstrip(), sys.stderr)
    if as_json:
        error = {"exit_code": code, "what": sentence, "way_out": way_out}
        print(json.dumps({"schema": 1, "status": "error", "error": error}))
    return code


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
