"""`autotune rehearse`: any training command on emulated GPUs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import DONE, FAULT, NOTHING_FITS, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.core.errors import BadInput
from autotune.core.units import format_bytes

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis
    from autotune.emulator.launch import Rehearsed

SCHEMA = 1
EXITS = {
    "fits": DONE,
    "out_of_memory": NOTHING_FITS,
    "failed": FAULT,
}  # status of the document -> exit code

_PYTHON = (
    "Python interpreter of the training environment. Default: the one beside COMMAND's program,"
    " else the first python."
)
_STRIDE = (
    "Tokens that each decoded token stands for. 16: shorter rollouts; a cache of transformers grows"
    " 16 tokens at a time."
)
_EDGES = ("start", "end")  # phases outside the command's own work


@click.command(name="rehearse", short_help="run a training command on emulated GPUs")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@declared_option(
    "gpus",
    default=None,
    show_default=False,
    help="Emulated GPUs: a model with a count. Example: 4xA100-80G.",
)
@declared_option("python", help=_PYTHON)
@click.option(
    "--late",
    is_flag=True,
    help="Work finishes as late as a GPU allows: the upper end of what torch reserves.",
)
@click.option(
    "--stride", type=click.IntRange(1), default=1, show_default=True, metavar="TOKENS", help=_STRIDE
)
@as_json_option("Print one JSON document on stdout; COMMAND's output goes to stderr.")
def command(
    words: tuple[str, ...],
    gpus: str | None,
    python: str | None,
    late: bool,
    stride: int,
    as_json: bool,
) -> int:
    """Run COMMAND unchanged on GPUs that this machine does not have, with a CUDA build of torch.
    Memory is accounted for as torch and the driver do it; nothing is computed. It ends with the
    peak of every rank and phase, or with the error, its place and remedies.

    Exit codes: 0 it ran to its end, 1 it failed, 2 bad input, 3 it ran out of memory, 4 the
    training environment can't be emulated.

    \b
    Examples:
      autotune rehearse --gpus 4xA100-80G -- torchrun --nproc-per-node 4 train.py
      autotune rehearse --gpus A100-40G --python .venv/bin/python -- bash launch.sh

    """
    # Imported here so that --help answers at once.
    from autotune.diagnosis import diagnose_lines
    from autotune.emulator.cards import LONGEST_LAG, emulated_machine
    from autotune.emulator.launch import rehearse

    if gpus is None:
        raise BadInput(
            "No GPUs were named.", way_out="Say which are emulated, like --gpus 2xA100-40G."
        )
    machine = emulated_machine(gpus, lag=LONGEST_LAG if late else 0)
    environment = _interpreter(words, python)
    stream = sys.stderr if as_json else sys.stdout
    with interruptible():
        found = rehearse(
            words,
            machine,
            environment,
            lambda line: (stream.write(line), stream.flush()),
            stride=stride,
        )
    diagnosis = diagnose_lines(found.output) if found.code else None
    document = _document(found, diagnosis)
    print(json.dumps(document) if as_json else _text(document, diagnosis))
    return EXITS[document["status"]]


def _interpreter(words: tuple[str, ...], named: str | None) -> Path:
    """Return the interpreter of the command, which is next to `torchrun`, `trl` or `accelerate`."""
    from autotune.machine.environment import interpreter

    if not words:
        raise BadInput(
            "No command was given.", way_out="Write it behind two dashes: -- torchrun train.py"
        )
    program = shutil.which(words[0])
    if program is None:
        raise BadInput(
            f"COMMAND {words[0]!r} is no program.",
            way_out="Write what starts the training behind the two dashes.",
        )
    if named is not None:
        return interpreter(named)
    path = Path(program).absolute()
    beside = path if path.name.startswith("python") else path.parent / "python"
    return beside if beside.exists() else interpreter(shutil.which("python") or "python3")


def _document(found: Rehearsed, diagnosis: Diagnosis | None) -> dict[str, Any]:
    from autotune.diagnosis import as_document
    from autotune.emulator.reports import LIMITATIONS

    failure, status = (
        found.failure,
        "fits" if diagnosis is None else "out_of_memory" if diagnosis.is_memory else "failed",
    )
    by_card = sorted(
        found.report.processes,
        key=lambda process: (min(process.peak_bytes, default=0), process.pid),
    )
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "emulated",
        "exit_code": found.code,
        "gpus": [card.gpu.name for card in found.machine.cards],
        "cards": [
            {"card": card, "peak_bytes": peak}
            for card, peak in found.report.card_peak_bytes.items()
        ],
        "processes": [
            {
                "card": card,
                "rank": process.rank,
                "role": process.role,
                "pid": process.pid,
                "memory_bytes": found.machine.cards[card].memory_mib * 2**20,
                "peak_bytes": process.peak_bytes[card],
                "torch_allocated_bytes": process.torch_allocated_bytes.get(card),
                "torch_reserved_bytes": process.torch_reserved_bytes.get(card),
                "phase_peak_bytes": {
                    phase: peaks[card]
                    for phase, peaks in process.phase_peak_bytes.items()
                    if card in peaks and phase not in _EDGES
                },
            }
            for process in by_card
            for card in process.peak_bytes
        ],
        "error": failure and {"words": failure.words, "place": failure.place},
        "diagnosis": diagnosis and as_document(diagnosis),
        "caveats": [*found.report.sentences(), LIMITATIONS],
    }


def _text(document: Mapping[str, Any], diagnosis: Diagnosis | None) -> str:
    """Return the document as text."""
    from autotune.diagnosis.diagnosis import in_words

    code, error, gpus, processes = (
        document[name] for name in ("exit_code", "error", "gpus", "processes")
    )
    ended = f"it was ended by signal {-code}." if code < 0 else f"it ended with exit code {code}."
    ended += f" {error['words'].partition('. ')[0].rstrip('.')}." if error else ""
    lines = [
        f"Rehearsed on {len(gpus)} emulated {gpus[0]}: {ended if code else 'it ran to its end.'}"
    ]
    for row in processes:
        rank = None if row["rank"] is None else f"rank {row['rank']}"
        who = ", ".join(word for word in (row["role"], rank, f"process {row['pid']}") if word)
        peak = f"peak {format_bytes(row['peak_bytes'])} of {format_bytes(row['memory_bytes'])}"
        lines.append(f"card {row['card']}, {who}: {peak}{torch_counters(row)}")
        lines += [
            f"  {phase:12} {format_bytes(held)}" for phase, held in row["phase_peak_bytes"].items()
        ]
    for one in document["cards"]:
        count = sum(row["card"] == one["card"] for row in processes)
        if count > 1:
            lines.append(
                f"card {one['card']}, its {count} processes together: peak"
                f" {format_bytes(one['peak_bytes'])}"
            )
    if not processes:
        lines.append("No process used a card.")
    if error and error["place"]:
        lines.append(f"Raised in {error['place']}.")
    if diagnosis is not None:
        lines.append(
            in_words(diagnosis, min(120, max(60, shutil.get_terminal_size((100, 24)).columns)))
        )
    return "\n".join([*lines, *document["caveats"]])


def torch_counters(row: Mapping[str, Any]) -> str:
    """Return torch's own figures of a process on a card."""
    allocated, reserved = row["torch_allocated_bytes"] or 0, row["torch_reserved_bytes"]
    if reserved is None:
        return ""
    # torch goes on counting the pool of an engine that gave its memory back to the driver.
    asleep = ", with what a sleeping engine gave back" if reserved > row["peak_bytes"] else ""
    return (
        f" (torch: {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved{asleep})"
    )
