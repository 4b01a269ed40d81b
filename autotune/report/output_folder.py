"""Output folder: checked before any probe, filled completely or not at all, with every new best."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.core.answer import Recommendation
from autotune.core.errors import BadInput
from autotune.core.events import BestChanged, Event, Listener, Note
from autotune.core.job import Job
from autotune.core.units import MIB, format_bytes
from autotune.report.certificate import certificate_lines
from autotune.report.folder_claim import unwritable
from autotune.report.html.render import PAGE

MIN_FREE_BYTES = 32 * MIB  # free space required before the search; a filtered dataset may take more

DOCUMENT = "recommendation.json"

Writer = Callable[[Path, Path], list[Path]]
"""Write files into a folder, with paths below the second one, to which they are moved; returns the files written."""


def check_folder(out: Path) -> None:
    """Check that `--out` is writable and has space, without a trace in it."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file.", way_out="Give a folder: --out autotune-out.")
    base = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    try:
        free = shutil.disk_usage(base).free
        with tempfile.TemporaryFile(dir=base) as trial:
            trial.write(b"\0" * 4096)
    except OSError as error:
        raise unwritable(out, error) from None
    if free < MIN_FREE_BYTES:
        raise BadInput(
            f"--out {out} has {free // MIB} MiB left; {MIN_FREE_BYTES // MIB} MiB are required.",
            way_out="Free some space, or give another folder: --out ~/autotune-out.",
        )


def publish(
    out: Path, writer: Writer, describe: Callable[[list[str]], Mapping[str, Any]], page: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any]:
    """Write the trainer's files, the page and recommendation.json into `out`, each whole; returns
    the document.

    All files are written to a folder on the same file system and then moved in, so a full disk or
    an error while writing leaves `out` unchanged. recommendation.json is last: if it is there, the
    rest is complete.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Absolute, because trainers return absolute paths.
    staging = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out.resolve()))
    try:
        names = [str(file.resolve().relative_to(staging)) for file in writer(staging, out.resolve())]
        described = dict(describe([str(out / name) for name in names]))
        (staging / DOCUMENT).write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
        (staging / PAGE).write_text(page(described), encoding="utf-8")
        for name in [*dict.fromkeys(Path(name).parts[0] for name in names), PAGE, DOCUMENT]:
            target = out / name
            if target.is_dir() and not target.is_symlink():  # an older folder, which a rename cannot replace unless it is empty
                shutil.rmtree(target)
            (staging / name).replace(target)
    except OSError as error:
        raise BadInput(
            f"The results can't be written into {out}: {error.strerror}.",
            way_out="Free some space and repeat with --resume: nothing is measured twice.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return described


def best_so_far_listener(listener: Listener, write: Callable[[Job, Recommendation], object]) -> Listener:
    """Wrap the listener to write every new best into the output folder. A failed write is
    reported and tried again at the end: a full disk must not end the search."""

    def receive(event: Event) -> None:
        listener(event)
        if isinstance(event, BestChanged):
            try:
                write(event.job, event.answer)
            except BadInput as error:
                listener(Note(text=f"The best so far was not written: {error}"))
            else:
                listener(Note(text=f"  written into {event.job.out}: works, and the best so far"))

    return receive


def head_lines(job: Job, answer: Recommendation) -> tuple[str, ...]:
    """Return the header of the recommended configuration: its certificate, or the evidence so far."""
    winner = answer.winner
    if answer.certificate is not None or winner is None or not answer.interrupted:
        return tuple(certificate_lines(job, answer.certificate))
    peak = winner.measurement.memory.peak_bytes
    memory = "" if peak is None else f", with a peak of {format_bytes(peak)} of {format_bytes(job.memory_limit_bytes)}"
    return (
        f"BEST SO FAR, after {answer.counts.probed} probes: one short probe at the longest lengths fitted{memory}.",
        "The search continued from here, or was ended; the longer probe that confirms a recommendation is still missing.",
    )
