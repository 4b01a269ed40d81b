"""Two checkouts of this repository, compared: does the later one lose anything?

    python benchmarks/before_after.py --before FOLDER --after FOLDER --keep FOLDER

Both answer the same cases: 50 command lines (texts/before_after_lines.txt), 24 of them once more
from the traces that the checkout before has made for them, ten simulated studies on the predictions
of the checkout before, and 25 excerpts of logs. Then the start of the command line, a prediction
that was made before, and the screening of the default space are timed, one checkout after the other
in turn: CPU seconds of the processes, since a machine may be shared.

`--before-python`, `--after-python`: interpreters with the training stack; this one by default.
`--keep` holds all answers, traces and caches: started again, the comparison goes on.
results/before-after.md lists every difference. What intended it is written by hand, in
texts/before_after.md, which is the head of that page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import machine
import yaml

HERE = Path(__file__).resolve().parent
SIDE = HERE / "before_after_side.py"
LINES = HERE / "texts" / "before_after_lines.txt"
ABOUT = HERE / "texts" / "before_after.md"
RESULTS = HERE / "results" / "before-after.md"

SEED = 40
EXCERPTS = 25
TRACES = 24
STUDIES = (
    "qwen2.5-0.5b-full-4090 0",
    "qwen2.5-1.5b-lora-l4 1",
    "qwen2.5-3b-lora-a100-40g 2",
    "qwen2.5-7b-lora-a100-80g 3",
    "qwen2.5-14b-lora-1xh100 4",
    "qwen2.5-7b-full-4xa100-80g 5",
    "llama-3.1-8b-lora-2xa100-40g 6",
    "table_narrow-transformers 7",
    "table_narrow-vllm 8",
    "table_wide-transformers 9",
)
"""Setups of benchmarks/search.py, each with its seed."""

KINDS = ("lines", "traces", "studies", "diagnoses")
TIMED = {
    "start: `autotune --version`": ["--version"],
    "`autotune predict`, again": ["predict", "--model", "Qwen2.5-7B", "--gpus", "2xA100-40G"],
}
SCREENING = "screening of the default space, again"
PAIRS = 3

FIGURES: Mapping[str, str] = {
    "fits": "fits",
    "torch_peak_allocated_bytes.value": "torch's peak",
    "peak_memory_bytes.value": "device peak",
    "tokens_per_second.value": "tokens/s",
    "surely_fits": "surely fits",
    "may_fit": "may fit",
    "cause": "cause",
    "is_memory": "of memory",
    "phase": "phase",
    "rank": "rank",
    "share": "share",
    "probes": "probes",
    "out_of_memory": "out of memory",
    "seconds": "seconds",
    "error.exit_code": "exit code",
    "error.what": "refusal",
}
"""Fields that the page shows, with their titles; other differences are counted."""

Leaf = str | float | int | bool | None
Cases = Mapping[str, str]
Answer = Mapping[str, Any]
Answers = Mapping[str, Answer]
Pairs = dict[str, list[tuple[float, float]]]
"""CPU seconds before and after."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Checkout with its interpreter, and the folder of its caches and answers."""

    name: str
    checkout: Path
    python: str
    folder: Path

    def environment(self) -> dict[str, str]:
        caches = self.folder / f"cache-{self.name}"
        variables = {
            "PYTHONPATH": str(self.checkout),
            "XDG_CACHE_HOME": str(caches),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return {**os.environ, **variables}

    def answers(
        self,
        kind: str,
        cases: Cases,
        place: Path,
        cwd: Path,
    ) -> Answers:
        """Return the answers to these cases, of which only those that are not stored are asked."""
        path = self.folder / f"{kind}-{self.name}.jsonl"
        stored = _read(path)
        missing = {}
        for name, text in cases.items():
            if name not in stored:
                missing[name] = text
        if missing:
            with path.open("a") as file:
                self.run(kind, missing, place, cwd, file)
            stored = _read(path)
        return {name: stored[name] for name in cases if name in stored}

    def run(
        self,
        kind: str,
        cases: Cases,
        place: Path,
        cwd: Path,
        file: IO[str],
    ) -> None:
        command = [self.python, str(SIDE), str(self.checkout), kind, str(place)]
        subprocess.run(
            command,
            input=json.dumps(cases),
            stdout=file,
            text=True,
            cwd=cwd,
            env=self.environment(),
            check=True,
        )

    def cpu_seconds(
        self,
        command: Sequence[str],
        cwd: Path,
        text: str = "",
    ) -> float:
        """Return the CPU seconds of a command and of its processes."""
        began = _seconds_of_children()
        subprocess.run(
            command,
            input=text,
            text=True,
            capture_output=True,
            cwd=cwd,
            env=self.environment(),
            check=False,
        )
        return _seconds_of_children() - began


def _read(path: Path) -> dict[str, Answer]:
    answers = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut off where the run was ended
                answer = json.loads(line)
                answers[answer["name"]] = answer
    return answers


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# 1. Cases.


def lines() -> dict[str, str]:
    """Return the command lines by number."""
    stated = []
    for line in LINES.read_text().splitlines():
        if line and not line.startswith("#"):
            stated.append(line)
    return {f"{number:02}": line for number, line in enumerate(stated, 1)}


def traced_lines(before: Answers) -> dict[str, str]:
    """Return those that the checkout before answered from one trace."""
    traced: dict[str, str] = {}
    for name, line in lines().items():
        if before[name]["traces"] == 1 and len(traced) < TRACES:
            traced[name] = line
    return traced


def excerpts(checkout: Path) -> dict[str, str]:
    """Draw excerpts from those that the checkout before knows."""
    texts = {}
    for file in sorted(checkout.glob("tests/diagnosis/excerpts*.yaml")):
        for excerpt in yaml.safe_load(file.read_text()):
            texts[excerpt["source"]] = excerpt["text"]
    drawn = random.Random(SEED).sample(sorted(texts), EXCERPTS)
    return {source: texts[source] for source in drawn}


def compared_kinds(before: Side, after: Side, kinds: Sequence[str]) -> Iterator[Comparison]:
    """Yield the answers of both to all cases of each kind."""
    checkout = before.checkout
    traces = before.folder / "traces-before"
    if "lines" in kinds:
        place = after.folder / "traces-after"
        yield Comparison(
            kind="lines",
            before=before.answers("lines", lines(), traces, checkout),
            after=after.answers("lines", lines(), place, checkout),
        )
    if "traces" in kinds:
        cases = traced_lines(_read(before.folder / "lines-before.jsonl"))
        yield _compared("traces", cases, (before, after), traces)
    if "studies" in kinds:
        predictions = checkout / "benchmarks" / "results" / "search"
        yield _compared("studies", dict.fromkeys(STUDIES, ""), (before, after), predictions)
    if "diagnoses" in kinds:
        yield _compared("diagnoses", excerpts(checkout), (before, after), before.folder)


def _compared(
    kind: str,
    cases: Cases,
    sides: tuple[Side, Side],
    place: Path,
) -> Comparison:
    before, after = sides
    cwd = before.checkout
    return Comparison(
        kind=kind,
        before=before.answers(kind, cases, place, cwd),
        after=after.answers(kind, cases, place, cwd),
    )


# 2. Differences.


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Answers of both checkouts to the cases of one kind."""

    kind: str
    before: Answers
    after: Answers


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of one case: of the fields that the page shows, and the number of others."""

    case: str
    shown: Sequence[str]
    hidden: int
    added: int


def difference(
    case: str,
    before: Answer,
    after: Answer,
) -> Difference:
    old = dict(leaves(before["document"]))
    new = dict(leaves(after["document"]))
    shown = []
    hidden = 0
    for path, value in old.items():
        if path in new and new[path] == value:
            continue
        if path in FIGURES:
            shown.append(f"{FIGURES[path]} {changed(value, new.get(path))}")
        else:
            hidden += 1
    if before.get("exit_code") != after.get("exit_code"):
        shown.insert(0, f"exit code {before['exit_code']} → {after['exit_code']}")
    added = len(new.keys() - old.keys())
    return Difference(case=case, shown=shown, hidden=hidden, added=added)


def leaves(document: object, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the plain values of a document by their paths."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield from leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from leaves(value, f"{path}[{number}]")
    else:
        yield path, document  # type: ignore[misc]


def changed(before: Leaf, after: Leaf) -> str:
    """Describe a changed value: of numbers the relative change too."""
    if is_number(before) and is_number(after) and before:
        return f"{short(before)} → {short(after)} ({after / before - 1:+.2%})"
    return f"{short(before)} → {short(after)}"


def is_number(value: Leaf) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(value: Leaf) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if is_number(value):
        return f"{value:,}"
    return str(value)


# 3. Times.


def times(before: Side, after: Side) -> Pairs:
    """Return pairs of CPU seconds, of the checkout before and after, in turn."""
    pairs: Pairs = {}
    for name in (*TIMED, SCREENING):
        for side in (before, after):
            _timed(side, name)  # fills the caches
        pairs[name] = []
        for _ in range(PAIRS):
            seconds_before = _timed(before, name)
            seconds_after = _timed(after, name)
            pairs[name].append((seconds_before, seconds_after))
        print(name, pairs[name], flush=True)
    return pairs


def _timed(side: Side, name: str) -> float:
    cwd = side.folder
    if name in TIMED:
        command = [side.python, "-m", "autotune", *TIMED[name]]
        return side.cpu_seconds(command, cwd)
    command = [side.python, str(SIDE), str(side.checkout), "screening", str(side.folder)]
    return side.cpu_seconds(command, cwd, json.dumps({"screening": ""}))


# 4. The page.


def page(
    comparisons: Sequence[Comparison],
    pairs: Pairs,
    facts: str,
) -> str:
    parts = [ABOUT.read_text().rstrip(), "", facts, ""]
    for comparison in comparisons:
        parts += section(comparison)
    if pairs:
        parts += [
            "## CPU seconds, in turn",
            "",
            "| | before | after | ratio |",
            "|---|---|---|---|",
        ]
        parts += [times_row(name, measured) for name, measured in pairs.items()]
    return "\n".join(parts) + "\n"


def section(comparison: Comparison) -> list[str]:
    differences = []
    for case, before in comparison.before.items():
        if case in comparison.after:
            differences.append(difference(case, before, comparison.after[case]))
    equal = sum(not each_case.shown for each_case in differences)
    rows = [
        f"## {comparison.kind.capitalize()}",
        "",
        f"{len(differences)} cases; {equal} are equal in every field listed here.",
        "",
        "| case | differences | other fields that differ | fields added |",
        "|---|---|---|---|",
    ]
    for row in differences:
        text = "; ".join(row.shown) or "none"
        rows.append(f"| {title(comparison.kind, row.case)} | {text} | {row.hidden} | {row.added} |")
    return [*rows, ""]


def title(kind: str, case: str) -> str:
    if kind in ("lines", "traces"):
        return f"`{lines()[case]}`"
    return case


def times_row(name: str, measured: Sequence[tuple[float, float]]) -> str:
    before = statistics.median(pair[0] for pair in measured)
    after = statistics.median(pair[1] for pair in measured)
    ratio = statistics.median(pair[1] / pair[0] for pair in measured)
    return f"| {name} | {before:.2f} | {after:.2f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--before-python", default=sys.executable)
    parser.add_argument("--after-python", default=sys.executable)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[*KINDS, "times"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    folder = options.keep.resolve()

    # 1. Both sides.
    before = Side(
        name="before",
        checkout=options.before.resolve(),
        python=options.before_python,
        folder=folder,
    )
    after = Side(
        name="after",
        checkout=options.after.resolve(),
        python=options.after_python,
        folder=folder,
    )

    # 2. Their answers, and the page.
    comparisons = list(compared_kinds(before, after, options.only))
    pairs: Pairs = {}
    if "times" in options.only:
        pairs = times(before, after)
    commits = f"{_commit(before.checkout)} before, {_commit(after.checkout)} after"
    cores = machine.facts({})["cores"]
    facts = f"Commits: {commits}. Machine: {cores} cores, shared with other work."
    options.out.write_text(page(comparisons, pairs, facts))


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
