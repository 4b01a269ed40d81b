"""`autotune rehearse`: any training command on emulated GPUs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from autotune.cli.exit_codes import DONE, FAULT, NOTHING_FITS, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.cli.output import text_columns
from autotune.core.errors import BadInput
from autotune.core.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis
    from autotune.emulator.cards import EmulatedMachine
    from autotune.emulator.launch import Rehearsed
    from autotune.emulator.reports import ProcessReport

SCHEMA = 1
EXITS = {"fits": DONE, "out_of_memory": NOTHING_FITS, "failed": FAULT}
"""Status of the document -> exit code."""

_PYTHON = (
    "Python interpreter of the training environment. Default: the one beside COMMAND's program,"
    " else the first python."
)
_STRIDE = (
    "Tokens that each decoded token stands for. 16: shorter rollouts; a cache of transformers grows"
    " 16 tokens at a time."
)
_LIMIT = "Memory that COMMAND may take on each card, like 20GiB. Default: the whole card."
_VARY = (
    "Run COMMAND once for each value of one of its arguments, and end with a table. Example:"
    " micro=1,2,4."
)
_EDGES = ("start", "end")  # phases outside the command's own work


@click.command(name="rehearse", short_help="run a training command on emulated GPUs")
@click.argument(
    "command_words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
)
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
    "--stride",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="TOKENS",
    help=_STRIDE,
)
@click.option("--limit", metavar="SIZE", help=_LIMIT)
@click.option("--vary", metavar="NAME=V1,V2", help=_VARY)
@as_json_option("Print one JSON document on stdout; COMMAND's output goes to stderr.")
def command(
    command_words: tuple[str, ...],
    gpus: str | None,
    python: str | None,
    late: bool,
    stride: int,
    limit: str | None,
    vary: str | None,
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
      autotune rehearse --gpus L4 --limit 20GiB --vary micro=1,2,4 -- python train.py --micro 1

    """
    # Imported here so that --help answers at once.
    from autotune.cli.varied_runs import table, variation
    from autotune.emulator.cards import LONGEST_LAG, emulated_machine

    if gpus is None:
        raise BadInput(
            "No GPUs were named.", way_out="Say which are emulated, like --gpus 2xA100-40G."
        )
    machine = emulated_machine(gpus, lag=LONGEST_LAG if late else 0)
    if limit is not None:
        machine = machine.limited_to(parse_bytes(limit))
    environment = _interpreter(command_words, python)
    stream = sys.stderr if as_json else sys.stdout

    def run(command: tuple[str, ...]) -> tuple[dict[str, Any], Diagnosis | None]:
        return _rehearsed(command, machine, environment, stream, stride=stride)

    # 1. The command as it is.
    if vary is None:
        document, diagnosis = run(command_words)
        print(json.dumps(document) if as_json else _text(document, diagnosis))
        return EXITS[document["status"]]

    # 2. The command with each value.
    varied = variation(vary)
    documents: dict[str, dict[str, Any]] = {}
    commands = varied.commands(command_words)
    for value, changed_command in zip(varied.values, commands, strict=True):
        documents[value], diagnosis = run(changed_command)
        if not as_json:
            print(f"{varied.name}={value}: {_text(documents[value], diagnosis)}\n")
    if as_json:
        runs = []
        for value, document in documents.items():
            runs.append({"value": value, **document})
        print(json.dumps({"schema": SCHEMA, "varied": varied.name, "runs": runs}))
    else:
        print("\n".join(table(varied.name, documents)))
    return _exit_of_runs({document["status"] for document in documents.values()})


def _exit_of_runs(statuses: Collection[str]) -> int:
    """Return a failure's exit code, else that of the best run."""
    for status in ("failed", "fits", "out_of_memory"):
        if status in statuses:
            return EXITS[status]
    return FAULT


def _rehearsed(
    command: tuple[str, ...],
    machine: EmulatedMachine,
    environment: Path,
    stream: TextIO,
    *,
    stride: int,
) -> tuple[dict[str, Any], Diagnosis | None]:
    """Run the command, whose output goes to `stream`. Return its document and the diagnosis of
    its failure.
    """
    from autotune.diagnosis import diagnose_lines
    from autotune.emulator.launch import rehearse

    with interruptible():
        rehearsed = rehearse(
            command,
            machine,
            environment,
            lambda line: (stream.write(line), stream.flush()),
            stride=stride,
        )
    diagnosis = diagnose_lines(rehearsed.output) if rehearsed.code else None
    return _document(rehearsed, diagnosis), diagnosis


def _interpreter(command_words: tuple[str, ...], python: str | None) -> Path:
    """Return the interpreter of the command, which is next to `torchrun`, `trl` or `accelerate`."""
    from autotune.machine.environment import interpreter

    if not command_words:
        raise BadInput(
            "No command was given.", way_out="Write it behind two dashes: -- torchrun train.py"
        )
    program = shutil.which(command_words[0])
    if program is None:
        raise BadInput(
            f"COMMAND {command_words[0]!r} is no program.",
            way_out="Write what starts the training behind the two dashes.",
        )
    if python is not None:
        return interpreter(python)
    path = Path(program).absolute()
    if not path.name.startswith("python"):
        path = path.parent / "python"
    return path if path.exists() else interpreter(shutil.which("python") or "python3")


def _document(rehearsed: Rehearsed, diagnosis: Diagnosis | None) -> dict[str, Any]:
    from autotune.diagnosis import as_document
    from autotune.emulator.reports import LIMITATIONS

    status = "fits"
    failure = rehearsed.failure
    if diagnosis is not None:
        status = "out_of_memory" if diagnosis.is_memory else "failed"
    cards = []
    for card, peak in rehearsed.report.card_peak_bytes.items():
        cards.append({"card": card, "peak_bytes": peak})
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "emulated",
        "exit_code": rehearsed.code,
        "gpus": [card.gpu.name for card in rehearsed.machine.cards],
        "cards": cards,
        "processes": _process_rows(rehearsed),
        "error": failure and {"words": failure.message, "place": failure.place},
        "diagnosis": diagnosis and as_document(diagnosis),
        "caveats": [*rehearsed.report.sentences(), LIMITATIONS],
    }


def _process_rows(rehearsed: Rehearsed) -> list[dict[str, Any]]:
    """Return one row for each process on each card, in the order of the cards."""
    rows = []
    for process in sorted(rehearsed.report.processes, key=_by_card):
        for card, peak_bytes in process.peak_bytes.items():
            phases = {}
            for phase, peaks in process.phase_peak_bytes.items():
                if card in peaks and phase not in _EDGES:
                    phases[phase] = peaks[card]
            rows.append(
                {
                    "card": card,
                    "rank": process.rank,
                    "role": process.role,
                    "pid": process.pid,
                    "memory_bytes": rehearsed.machine.cards[card].memory_mib * MIB,
                    "peak_bytes": peak_bytes,
                    "torch_allocated_bytes": process.torch_allocated_bytes.get(card),
                    "torch_reserved_bytes": process.torch_reserved_bytes.get(card),
                    "phase_peak_bytes": phases,
                }
            )
    return rows


def _by_card(process: ProcessReport) -> tuple[int, int]:
    return min(process.peak_bytes, default=0), process.pid


def _text(document: Mapping[str, Any], diagnosis: Diagnosis | None) -> str:
    """Return the document as text."""
    from autotune.diagnosis.diagnosis import in_words

    gpus = document["gpus"]
    error = document["error"]
    processes = document["processes"]
    lines = [f"Rehearsed on {len(gpus)} emulated {gpus[0]}: {_ending(document)}"]
    for row in processes:
        lines += _process_lines(row)
    for card in document["cards"]:
        count = sum(row["card"] == card["card"] for row in processes)
        if count > 1:
            peak = format_bytes(card["peak_bytes"])
            lines.append(f"card {card['card']}, its {count} processes together: peak {peak}")
    if not processes:
        lines.append("No process used a card.")
    if error and error["place"]:
        lines.append(f"Raised in {error['place']}.")
    if diagnosis is not None:
        lines.append(in_words(diagnosis, text_columns()))
    return "\n".join([*lines, *document["caveats"]])


def _ending(document: Mapping[str, Any]) -> str:
    code = document["exit_code"]
    error = document["error"]
    if not code:
        return "it ran to its end."
    ending = f"it ended with exit code {code}."
    if code < 0:
        ending = f"it was ended by signal {-code}."
    if error:
        ending += f" {error['words'].partition('. ')[0].rstrip('.')}."
    return ending


def _process_lines(row: Mapping[str, Any]) -> list[str]:
    """Return the peak of a process on a card, and those of its phases."""
    parts = [row["role"], f"process {row['pid']}"]
    if row["rank"] is not None:
        parts.insert(1, f"rank {row['rank']}")
    process = ", ".join(part for part in parts if part)
    peak = f"peak {format_bytes(row['peak_bytes'])} of {format_bytes(row['memory_bytes'])}"
    lines = [f"card {row['card']}, {process}: {peak}{torch_counters(row)}"]
    for phase, peak_bytes in row["phase_peak_bytes"].items():
        lines.append(f"  {phase:12} {format_bytes(peak_bytes)}")
    return lines


def torch_counters(row: Mapping[str, Any]) -> str:
    """Return torch's own figures of a process on a card."""
    allocated = row["torch_allocated_bytes"] or 0
    reserved = row["torch_reserved_bytes"]
    if reserved is None:
        return ""
    # torch goes on counting the pool of an engine that gave its memory back to the driver.
    asleep = ", with what a sleeping engine gave back" if reserved > row["peak_bytes"] else ""
    return (
        f" (torch: {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved{asleep})"
    )
