"""Values of public launches, as autotune reads them and as the framework's own parser has them.

    python benchmarks/launch_values.py CLONES WORK --environments .venvs/frameworks

`CLONES` has git repositories (see launch_choice.py). Launches are the shell scripts of these
repositories that start a training of verl, ms-swift, OpenRLHF, SkyRL or TRL, each text once, and
are read where they stand. The words of the training, as autotune's shell reader has them, go to
the framework's own parser (launch_values_side.py, in the environment of the framework): that of the
project's copy where it has one. launch_words.py compares these words with bash.

Compared is every setting of the candidate that the framework has as well. A setting of the
command that is in no candidate and that the answer does not mention is listed as silent. `WORK`
gets one line for each launch, so that a run can go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402
from launch_choice import SUFFIXES, clone_of  # noqa: E402
from launch_reading import write_tree  # noqa: E402
from launch_values_judge import (  # noqa: E402
    DIFFERENT,
    NOT_PARSED,
    OTHER,
    OUTCOMES,
    REFUSED,
    SILENT,
    Row,
    judge,
)
from launch_values_reading import reading_of, starts_training  # noqa: E402
from launch_words import TRAININGS  # noqa: E402

from autotune.frameworks.trl.class_names import CLASS_PREFIXES  # noqa: E402

SIDE = Path(__file__).with_name("launch_values_side.py")
FRAMEWORKS = ("verl", "swift", "openrlhf", "skyrl", "trl")

# Launches.

MOST_FILES = 12
"""YAML files of one repository: each runs its project's own script, which takes ten seconds."""

OF_TRL = re.compile(r"(?m)^model_name_or_path\s*:(?s:.*)^(?:per_device_train_batch_size)\s*:")
"""Files of TRL's own scripts."""


def launches_of(
    clones: Path,
    names: Sequence[str],
) -> Iterator[Row]:
    """Yield the shell scripts that may start a training, each text once."""
    starts = [pattern for name, pattern in TRAININGS.items() if name != "a Python file"]
    training = re.compile("|".join(starts))
    texts_before: set[str] = set()
    for name in names:
        clone = clone_of(clones, name)
        if clone is None or not clone.commit:
            continue
        files = 0
        for path, text in clone.short_texts((*SUFFIXES["shell"], *SUFFIXES["yaml"])):
            is_file = path.endswith(SUFFIXES["yaml"])
            pattern = OF_TRL if is_file else training
            is_launch = pattern.search(text) is not None
            files += is_launch and is_file
            if is_file and files > MOST_FILES:
                continue
            if is_launch and text not in texts_before:
                texts_before.add(text)
                yield Row(
                    name,
                    clone.commit,
                    path,
                )


# The framework's own parser.


class Side:
    """Process in the environment of a framework that answers questions about launches.

    `answers`: file with the answers so far, so that a later reading of autotune's has the same.
    """

    def __init__(
        self,
        framework: str,
        environments: Path,
        answers: Path,
    ) -> None:
        self.file = answers
        self.answers: dict[str, dict[str, Any]] = {}
        if answers.exists():
            for line in answers.read_text().splitlines():
                key, answer = json.loads(line)
                self.answers[key] = answer
        self.process: subprocess.Popen[str] | None = None
        self.start = partial(
            self._start,
            framework,
            environments,
        )

    def _start(
        self,
        framework: str,
        environments: Path,
    ) -> subprocess.Popen[str]:
        python = Path(sys.executable)
        if framework != "trl":
            python = environments / framework / "bin" / "python"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop(
            "PYTHONPATH",
            None,
        )
        return subprocess.Popen(
            [str(python), str(SIDE), framework],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def answer(
        self,
        question: Mapping[str, Any],
    ) -> dict[str, Any]:
        key = json.dumps(
            {**question, "tree": Path(question["tree"]).name},
            sort_keys=True,
        )
        if key not in self.answers:
            self.answers[key] = self._asked(question)
            with self.file.open("a") as log:
                log.write(
                    json.dumps([key, self.answers[key]]) + "\n",
                )
        return self.answers[key]

    def _asked(
        self,
        question: Mapping[str, Any],
    ) -> dict[str, Any]:
        if self.process is None:
            self.process = self.start()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


# One launch.


def compare(
    row: Row,
    tree: Path,
    sides: Mapping[str, Side],
) -> None:
    if not starts_training(row.path):
        row.outcome = OTHER
        return
    reading = reading_of(row.path)
    if isinstance(reading, str):
        row.outcome = REFUSED
        row.details = [reading[:400]]
        return
    row.framework = reading.framework
    row.method = reading.method
    if row.framework not in sides:
        row.outcome = NOT_PARSED
        row.details = ["no parser here"]
        return
    asks = row.framework
    if asks == "skyrl" and _is_former_skyrl(tree / row.path, reading.entry_point):
        asks = "former skyrl"
    answer = sides[PYTHON_OF.get(asks, asks)].answer(
        {
            "asks": asks,
            "arguments": reading.arguments,
            "tree": str(tree),
            "method": row.method,
            "class_prefix": CLASS_PREFIXES.get(row.method, ""),
            "entry_point": reading.entry_point,
            "path": row.path,
            "ranks": reading.ranks,
        }
    )
    judge(
        row,
        reading,
        answer,
    )


PYTHON_OF = {"former skyrl": "verl"}
"""Parser -> the environment that can ask it, where that is another framework's."""


def _is_former_skyrl(
    script: Path,
    entry_point: str,
) -> bool:
    if entry_point.startswith("skyrl_train"):
        return True
    return any((folder / "skyrl_train" / "config").is_dir() for folder in script.parents)


# All launches.


def compare_all(
    rows: Sequence[Row],
    clones: Path,
    out: Path,
    sides: Mapping[str, Side],
) -> list[Row]:
    """Compare the launches that `out` does not have yet, and return all of them."""
    compared: dict[tuple[str, str], Row] = {}
    if out.exists():
        for line in out.read_text().splitlines():
            row = Row(**json.loads(line))
            compared[row.repository, row.path] = row
    missing = [row for row in rows if (row.repository, row.path) not in compared]
    with tempfile.TemporaryDirectory(prefix="launch-values-") as folder, out.open("a") as log:
        for repository, group in groupby(missing, key=lambda row: row.repository):
            clone = clone_of(
                clones,
                repository,
            )
            assert clone is not None
            tree = Path(folder) / repository.replace(
                "/",
                "+",
            )
            tree.mkdir()
            write_tree(
                clone,
                tree,
            )
            with contextlib.chdir(tree):
                for row in group:
                    compare(
                        row,
                        tree,
                        sides,
                    )
                    compared[row.repository, row.path] = row
                    log.write(
                        json.dumps(asdict(row), ensure_ascii=False) + "\n",
                    )
                    log.flush()
    return [compared[row.repository, row.path] for row in rows]


ABOUT = (
    "Compared are the candidate's settings whose names speak of memory or speed, where the",
    "framework has them too. Turns of a row, a project's own script that reads a file, and what",
    "the answer itself says are differences with a reason. Both comparisons are judged by the",
    "same rules, written while the first was read: in sample. Words are those of autotune's own",
    "reader of shell.",
)


def page(
    rows: Sequence[Row],
    first: Sequence[Row],
    choice: str,
    versions: str,
) -> str:
    """Return the results without any launch's text. `first`: those before what was mended."""
    facts = machine.facts({})
    outcomes = (*OUTCOMES, NOT_PARSED, REFUSED)
    compared = [row for row in rows if row.outcome in OUTCOMES]
    settings = sum(row.compared for row in compared)
    repositories = len({row.repository for row in compared})
    lines = [
        "# Values of public launches, as read and as the framework's own parser has them",
        "",
        (
            f"{choice} {len(compared)} launches of {repositories} repositories are compared, with"
            f" {settings} values of settings, {date.today()}."
        ),
        *ABOUT,
        f"{versions}; {facts['system']}, {facts['cores']} processors, autotune {facts['commit']}.",
        "",
    ]
    for title, group in (("First comparison, before mending", first), ("Now", rows)):
        lines += [f"## {title}", "", f"| framework | {' | '.join(outcomes)} |"]
        lines.append(f"|---|{'---:|' * len(outcomes)}")
        for name in (*FRAMEWORKS, "all"):
            counts = Counter(row.outcome for row in group if name in (row.framework, "all"))
            cells = " | ".join(str(counts[outcome]) for outcome in outcomes)
            lines.append(f"| {name} | {cells} |")
        lines.append("")
    lines += ["## What differs or is passed over now", ""]
    for row in rows:
        if row.outcome in (DIFFERENT, SILENT):
            differences = "; ".join([*row.details, *(f"{name} (silent)" for name in row.silent)])
            lines.append(f"- {row.repository}@{row.commit[:7]} {row.path}: {differences}")
    return "\n".join([*lines, ""])


def read_rows(file: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "clones",
        type=Path,
    )
    parser.add_argument(
        "work",
        type=Path,
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".venvs" / "frameworks",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="repositories",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
    )
    parser.add_argument(
        "--page",
        type=Path,
    )
    parser.add_argument("--versions", default="", help="of the frameworks, for the page")
    parser.add_argument(
        "--rows",
        default="rows",
        help="name of the file of rows",
    )
    options = parser.parse_args()
    names = options.only
    if not names:
        names = sorted(folder.name.replace("+", "/", 1) for folder in options.clones.iterdir())
    rows = list(launches_of(options.clones, names))[:: options.every]
    options.work.mkdir(
        parents=True,
        exist_ok=True,
    )
    sides = {}
    for name in FRAMEWORKS:
        answers = options.work.resolve() / f"answers-{name}.jsonl"
        sides[name] = Side(name, options.environments.absolute(), answers)
    out = (options.work / f"{options.rows}.jsonl").resolve()
    rows = compare_all(
        rows,
        options.clones.resolve(),
        out,
        sides,
    )
    print(Counter((row.framework, row.outcome) for row in rows))
    if options.page is not None:
        first = read_rows(options.work / "first.jsonl")
        choice = f"Every {options.every}th shell script or YAML file that may start a training."
        options.page.write_text(
            page(rows, first, choice, options.versions),
        )


if __name__ == "__main__":
    main()
