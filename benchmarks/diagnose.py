"""Diagnosis benchmark: share of logs for which `autotune diagnose` names the right cause, with logs
that were not used for patterns listed separately.

python benchmarks/diagnose.py                      # the table
    python benchmarks/diagnose.py --write first_run
        # and keep it in results/diagnose.json under that name
    python benchmarks/diagnose.py --blind logs-third --write third_set_first_run
    python benchmarks/diagnose.py --excerpts excerpts-second.yaml --write second_excerpts_first_run
    python benchmarks/diagnose.py --lines 800000       # the time to read a log of that length

The logs are those of tests/diagnosis/logs, with their causes in labels.yaml; provoke/run.py there
creates them. A blind set is a folder of its own there: written without access to the failure
tables, and read once before anything is corrected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from autotune.diagnosis import Diagnosis, diagnose

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "diagnosis"
RESULTS = ROOT / "benchmarks" / "results" / "diagnose.json"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Log with its label and its diagnosis."""

    label: Mapping[str, Any]
    diagnosis: Diagnosis

    @property
    def cause(self) -> str:
        return _word(self.label["cause"])

    @property
    def answer(self) -> str:
        return _word(self.diagnosis.cause)

    @property
    def right(self) -> bool:
        return self.cause == self.answer and self.diagnosis.is_memory == self.label["is_memory"]

    @property
    def defensible(self) -> bool:
        """Return True for the right cause, or one that the author of the label accepts as well."""
        return self.right or self.answer in map(_word, self.label.get("also_defensible") or ())

    @property
    def false_alarm(self) -> bool:
        """Return True for a failure unrelated to memory that was reported as one."""
        return bool(self.diagnosis.is_memory) and not self.label["is_memory"]

    def agrees(self, fact: str) -> bool | None:
        """Return True if the phase or the rank equals the label; None where the label has none."""
        return None if fact not in self.label else getattr(self.diagnosis, fact) == self.label[fact]


def cases(folder: Path = CORPUS / "logs", labels: Path = CORPUS / "labels.yaml") -> list[Case]:
    listed = yaml.safe_load(labels.read_text())["logs"]
    labelled = []
    for label in listed:
        labelled.append(
            Case(label=label, diagnosis=diagnose((folder / f"{label['name']}.log").read_text()))
        )
    return labelled


def summary(chosen: Sequence[Case]) -> dict[str, Any]:
    """The figures of some logs."""
    labelled = [case for case in chosen if case.label["cause"] is not None]
    return {
        "logs": len(chosen),
        "right": _right(chosen),
        "share_right": round(_right(chosen) / len(chosen), 4),
        "right_or_defensible": sum(case.defensible for case in chosen),
        "known_failures_right": [_right(labelled), len(labelled)],
        "not_memory_called_memory": [case.label["name"] for case in chosen if case.false_alarm],
        "wrong": {
            case.label["name"]: {"is": case.cause, "told": case.answer}
            for case in chosen
            if not case.right
        },
        **{f"{fact}_right": _agreement(chosen, fact) for fact in ("phase", "rank")},
    }


def _right(chosen: Sequence[Case]) -> int:
    return sum(case.right for case in chosen)


def excerpt_figures(file: Path) -> dict[str, Any]:
    """Return how many excerpts are named with their cause, or with one that is right as well, and
    which of those without a failure are reported as one.
    """
    failures = 0
    wrong = {}
    without_failure = 0
    false_alarms = {}
    for excerpt in yaml.safe_load(file.read_text()):
        answer = _word(diagnose(excerpt["text"]).cause)
        quotation = f"{excerpt['source']}: {excerpt['text'][-60:]}"
        if excerpt["cause"] == "none":
            without_failure += 1
            if answer not in ("none", "unknown"):
                false_alarms[quotation] = answer
            continue
        failures += 1
        if answer not in (excerpt["cause"], *excerpt.get("also", ())):
            wrong[quotation] = {"is": excerpt["cause"], "told": answer}
    right = failures - len(wrong)
    return {
        "excerpts": failures,
        "named": right,
        "share_named": round(right / failures, 4),
        "wrong": wrong,
        "without_failure": without_failure,
        "false_alarms": false_alarms,
    }


def confusion(chosen: Sequence[Case]) -> str:
    """Return the confusion matrix: rows are labels, columns diagnoses."""
    pairs = Counter((case.cause, case.answer) for case in chosen)
    lines = [f"{'is':<20} logs  told"]
    for cause in sorted({case.cause for case in chosen}):
        count_by_answer = {}
        for (is_, name), count in sorted(pairs.items()):
            if is_ == cause:
                count_by_answer[name] = count
        lines.append(
            f"{cause:<20} {sum(count_by_answer.values()):>4} "
            f" {', '.join(f'{name} {count}' for name, count in count_by_answer.items())}"
        )
    return "\n".join(lines)


def _agreement(chosen: Sequence[Case], fact: str) -> list[int]:
    answers = [answer for case in chosen if (answer := case.agrees(fact)) is not None]
    return [sum(answers), len(answers)]


def _word(cause: str | None) -> str:
    return "unknown" if cause is None else cause


def _of_corpus() -> tuple[dict[str, Any], list[Case]]:
    every = cases()
    unseen: list[Case] = []
    patterned: list[Case] = []
    for case in every:
        (patterned if case.label["used_for_patterns"] else unseen).append(case)
    return {
        "not_used_for_patterns": summary(unseen),
        "used_for_patterns": summary(patterned),
    }, unseen


def _table() -> str:
    """Return a digest of the failure tables and of the code that reads them."""
    parts = ("failures/*.py", "failures/tables/*.yaml", "diagnosis/*.py")
    files = []
    for part in parts:
        files.extend(sorted((ROOT / "autotune").glob(part)))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def reading_seconds(lines: int) -> float:
    """Return the processor time to read a synthetic log of this length, whose last line is its
    failure.
    """
    kinds = (
        (
            "{{'loss': 0.5, 'grad_norm': 0.1, 'num_tokens': {n}.0, 'completions/mean_length':"
            " 210.5, 'epoch': 0.1}}"
        ),
        " 3%|###       | {n}/800000 [01:12<2:33:11,  1.2s/it]",
        (
            "(WorkerDict pid=1000) INFO [loggers.py:116] Engine 000: Running: {n} reqs, GPU KV"
            " cache usage: 3.1%"
        ),
        "[rank1]: step {n} reward=0.5 kl=0.01",
        "2026-01-01 12:00:00,123 INFO trainer step={n} some words in a line of a usual length",
    )
    log = "\n".join(kinds[number % len(kinds)].format(n=number) for number in range(lines))
    began = time.process_time()
    diagnosis = diagnose(
        f"{log}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    assert diagnosis.is_memory
    return time.process_time() - began


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", metavar="NAME", help="keep the figures under this name")
    parser.add_argument("--note", default="", help="what is to be said beside them")
    parser.add_argument(
        "--blind",
        metavar="FOLDER",
        help="read this set of tests/diagnosis instead, with its own labels.yaml",
    )
    parser.add_argument(
        "--excerpts", metavar="FILE", help="read these excerpts of tests/diagnosis instead"
    )
    parser.add_argument(
        "--lines", type=int, help="measure the time to read a log of this length instead"
    )
    options = parser.parse_args()
    if options.lines:
        print(f"{options.lines} lines: {reading_seconds(options.lines):.1f} s of processor time")
        return 0
    if options.excerpts:
        figures, chosen = excerpt_figures(CORPUS / options.excerpts), []
    elif options.blind:
        chosen = cases(CORPUS / options.blind, CORPUS / options.blind / "labels.yaml")
        figures = summary(chosen)
    else:
        figures, chosen = _of_corpus()
    if chosen:
        print(confusion(chosen))
    print(json.dumps(figures, indent=1))
    if options.write:
        now = datetime.now(UTC).date().isoformat()
        facts = {
            "date": now,
            "commit": _commit(),
            "table": _table(),
            "python": platform.python_version(),
        }
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"schema": 1}
        results[options.write] = {
            **facts,
            **({"note": options.note} if options.note else {}),
            **figures,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
