"""Output folder: claimed by one run at a time, checked before any probe, filled completely or
not at all, with every new best.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.core.answer import Recommendation
from autotune.core.errors import BadInput
from autotune.core.events import BestChanged, Event, Listener, Note
from autotune.core.files import TO_BE_RUN, comments, write_atomically
from autotune.core.job import Job
from autotune.core.space import Candidate
from autotune.core.text_diff import unified_diff
from autotune.core.units import MIB, counted, format_bytes
from autotune.frameworks.base import Trainer
from autotune.frameworks.changed_launch import changed_script, changes_of
from autotune.frameworks.configuration_files import unshare
from autotune.frameworks.shares_in_files import for_files, limit_notes
from autotune.frameworks.trl.output_files import YAML_NAME
from autotune.frameworks.trl.written_settings import written_settings
from autotune.report.certificate import certificate_lines
from autotune.report.html.render import PAGE

if TYPE_CHECKING:
    pass


# Free space required before the search; a filtered dataset may take more
MIN_FREE_OUTPUT_BYTES = 32 * MIB

DOCUMENT = "recommendation.json"

FileWriter = Callable[[Path, Path], list[Path]]
"""Write files into a folder, with paths below the second one, to which they are moved; returns
the files written.
"""


def check_folder(out: Path) -> None:
    """Check that `--out` is writable and has space, without a trace in it."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file.", way_out="Give a folder: --out autotune-out.")
    path = out.absolute()
    folders = (path, *path.parents)
    base = next(folder for folder in folders if folder.exists())
    try:
        free = shutil.disk_usage(base).free
        with tempfile.TemporaryFile(dir=base) as trial:
            trial.write(b"\0" * 4096)
    except OSError as error:
        raise unwritable(out, error) from None
    if free < MIN_FREE_OUTPUT_BYTES:
        raise BadInput(
            f"--out {out} has {free // MIB} MiB left; {MIN_FREE_OUTPUT_BYTES // MIB} MiB are"
            " required.",
            way_out="Free some space, or give another folder: --out ~/autotune-out.",
        )


def publish(
    out: Path,
    writer: FileWriter,
    describe: Callable[[list[str]], Mapping[str, Any]],
    page: Callable[[Mapping[str, Any]], str],
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
        names = [
            str(file.resolve().relative_to(staging)) for file in writer(staging, out.resolve())
        ]
        described = dict(describe([str(out / name) for name in names]))
        (staging / DOCUMENT).write_bytes(
            msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"
        )
        (staging / PAGE).write_text(page(described), encoding="utf-8")
        for name in [*dict.fromkeys(Path(name).parts[0] for name in names), PAGE, DOCUMENT]:
            target = out / name
            if (
                target.is_dir() and not target.is_symlink()
            ):  # an older folder, which a rename cannot replace unless it is empty
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


def best_so_far_listener(
    listener: Listener, write: Callable[[Job, Recommendation], object]
) -> Listener:
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
                listener(Note(text=f"  best so far, written into {event.job.out}"))

    return receive


def head_lines(job: Job, answer: Recommendation) -> tuple[str, ...]:
    """Return the header of the recommended configuration: its certificate, or the evidence so
    far.
    """
    winner = answer.winner
    if answer.certificate is not None or winner is None or not answer.interrupted:
        return tuple(certificate_lines(job, answer.certificate))
    peak = winner.measurement.memory.peak_bytes
    memory = ""
    if peak is not None:
        limit = format_bytes(job.memory_limit_bytes)
        memory = f", with a peak of {format_bytes(peak)} of {limit}"
    return (
        (
            f"BEST SO FAR, after {counted(answer.counts.probed, 'probe')}: one short probe at the"
            f" longest lengths fitted{memory}."
        ),
        (
            "The search continued from here, or was ended; the longer probe that confirms a"
            " recommendation is still missing."
        ),
    )


CLAIM = ".running"
"""File name of the claim. The kernel releases its lock however the run ends."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Run that works in a folder."""

    pid: int
    host: str
    since: str


def unwritable(out: Path, error: OSError) -> BadInput:
    """Return the error for a folder that can't be written."""
    return BadInput(
        f"--out {out} can't be written: {error.strerror}.",
        way_out="Give another folder: --out ~/autotune-out.",
    )


@contextlib.contextmanager
def claimed_folder(out: Path) -> Iterator[None]:
    """Create the folder and claim it; BadInput if another run works in it.

    On exit the claim is removed, and so are the folders created here, if they are still empty.
    """
    path = out.absolute()
    missing = []
    for folder in (path, *path.parents):
        if not folder.exists():
            missing.append(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    claim = out / CLAIM
    try:
        descriptor = _lock(claim, out)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if _is_same(claim, descriptor):
                    claim.unlink()
            os.close(descriptor)
    finally:
        for folder in missing:  # deepest first
            with contextlib.suppress(OSError):  # not empty, or deleted
                folder.rmdir()


def _lock(file: Path, out: Path) -> int:
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(out, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                busy = _busy(out, descriptor)
                os.close(descriptor)
                raise busy from None
            # This file system has no locks: nothing to rely on.
        if _is_same(file, descriptor):
            break
        os.close(descriptor)  # the former owner removed the file between the two calls
    owner = Owner(
        pid=os.getpid(),
        host=platform.node(),
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    with contextlib.suppress(OSError):  # a full disk: the lock counts without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(owner), 0)
    return descriptor


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _busy(out: Path, descriptor: int) -> BadInput:
    try:
        owner = msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
        whose = f"process {owner.pid} on {owner.host}, since {owner.since}"
    except (OSError, msgspec.MsgspecError):
        whose = "another run"
    return BadInput(
        f"--out {out} is in use by {whose}.",
        way_out=(
            "Give this run a folder of its own: --out FOLDER. Runs may share a study by --storage"
            " and --resume."
        ),
    )


def write_files(
    job: Job, trainer: Trainer, candidate: Candidate, head: Sequence[str], *folders: Path
) -> tuple[list[Path], dict[str, Any] | None]:
    """Write the winner's files, with `head` as comments in the recommended YAML file; return
    them, and the document's section about the user's own file.
    """
    notes = limit_notes(job, (candidate,))
    head = [*head, *(f"{note}." for note in notes)]
    candidate, task = for_files(candidate, job)
    files = trainer.write_files(candidate, task, *folders)
    for file in files:
        if file.stem == "recommended" and file.suffix in (".yaml", ".yml"):
            file.write_text(comments(head) + file.read_text(encoding="utf-8"), encoding="utf-8")
    launch_files = _launch_files(replace(job, task=task), trainer, candidate, folders[0])
    return [*files, *launch_files], _file_section(job, files)


def _launch_files(
    job: Job,
    trainer: Trainer,
    candidate: Candidate,
    folder: Path,
) -> list[Path]:
    """Write the user's launch script with the changed flags, and the difference."""
    workload = job.task.workload
    launch = workload.launch
    if launch is None:
        return []
    # A knob that does not apply to this candidate can still need another value than the launch has.
    searched = {}
    for knob in job.space.knobs:
        if knob.name in candidate.settings:
            searched[knob.name] = candidate.settings[knob.name]
    changes = changes_of(
        workload.stated, workload.defaults, {**searched, **candidate.knobs}, trainer.fields()
    )
    files, edits = unshare(launch, changes, candidate.settings, folder)
    changed = changed_script(launch, changes, edits)
    script = folder / f"changed-{Path(launch.path).name}"
    patch = folder / "changes.diff"
    write_atomically(script, changed.encode(), mode=TO_BE_RUN)
    difference = unified_diff(launch.text, changed, Path(launch.path).name)
    patch.write_text(difference, encoding="utf-8")
    return [script, patch, *files]


def _file_section(job: Job, files: Sequence[Path]) -> dict[str, Any] | None:
    """Return the document's section about the user's file; None without one."""
    workload = job.task.workload
    written = next((file for file in files if file.name == YAML_NAME), None)
    if (
        written is None
        or workload.framework != "trl"
        or workload.config_file is None
        or workload.script is not None
    ):
        return None
    rows = []
    for setting in written_settings(job.task, written):
        rows.append(
            {
                "name": setting.name,
                "yours": setting.yours,
                "written": setting.written,
                "kind": setting.kind,
            }
        )
    return {
        "path": str(workload.config_file),
        "written": str(job.out / YAML_NAME),
        "settings": rows,
    }
