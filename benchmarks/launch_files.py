"""Public launch scripts as they are: `python benchmarks/launch_files.py CLONES`.

`CLONES` is a folder with git repositories, each in a folder OWNER+NAME (a git directory, or one
named `repo` in it). `results/launches/rule.yaml` chooses the scripts. Each is predicted as it is,
then with the help that a reader of the refusal would add. An answer is a misreading if a setting
has another value than bash itself gives it: bash runs the script restricted, without any program on
its path, and prints the words of every command.

Scripts are copied into a temporary folder, never into this repository. Outcomes are in
results/launches/.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402

from autotune.core.units import format_bytes  # noqa: E402
from autotune.frameworks.launch_kinds import launch_kinds  # noqa: E402
from autotune.request.assignments import parse_value  # noqa: E402

FOLDER = ROOT / "benchmarks" / "results" / "launches"
RULE = yaml.safe_load((FOLDER / "rule.yaml").read_text())
SECONDS = 300

PRINT_WORDS = r"""
command_not_found_handle() {
  if [ "$1" = tee ]; then
    while IFS= read -r -d '' word; do printf '%s\0' "$word"; done; return 0
  fi
  printf '%s\0' "$@"; printf '\1\0'; return 0
}
cd() { :; }
exec() { "$@"; }
set -r
. run.sh
"""
"""Restricted bash: every program is missing, and its words are printed instead."""

HARDWARE = frozenset(name for kind in launch_kinds() for name in kind.follows_hardware)
"""Settings that follow --gpus, whatever the script states."""

VERDICTS = {"fits:": True, "does not fit:": False, "can't be decided:": None}
ANSWERED, HELPED, REFUSED = "as given", "after one flag", "refused"


@dataclass(frozen=True)
class Script:
    """Script of a repository, in a folder without the rest."""

    repository: str
    commit: str
    path: str
    text: str


@dataclass
class Row:
    """What became of one script."""

    repository: str
    commit: str
    path: str
    outcome: str = REFUSED
    added: str = ""  # the help with which it was answered
    reason: str = ""  # of the refusal of the script as given
    verdict: str = ""
    misread: tuple[str, ...] = ()
    seconds: float = 0.0


# Scripts by the rule.


def chosen_scripts(clones: Path) -> Iterator[Script]:
    for repository in RULE["repositories"]:
        git_folder = _git_folder(clones, repository["name"])
        commit = repository["commit"]
        paths = []
        for path in _git(git_folder, "ls-tree", "-r", "--name-only", commit).splitlines():
            is_excluded = any(part in path for part in repository["without"])
            is_script = path.startswith(f"{repository['folder']}/") and path.endswith(".sh")
            if is_script and not is_excluded:
                paths.append(path)
        matching = []
        for path in sorted(paths):
            text = _git(git_folder, "show", f"{commit}:{path}")
            if repository["contains"] in text:
                matching.append(Script(repository["name"], commit, path, text))
        yield from matching[:: repository["every"]]


def _git_folder(clones: Path, name: str) -> Path:
    folder = clones / name.replace("/", "+")
    return folder / "repo" if (folder / "repo").is_dir() else folder


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


# One script.


def try_script(script: Script, folder: Path) -> Row:
    file = folder / "run.sh"
    file.write_text(script.text)
    row = Row(script.repository, script.commit, script.path)
    started = time.monotonic()
    answer = predict(file, [])
    row.seconds = round(time.monotonic() - started, 1)
    if isinstance(answer, str):
        row.reason = answer
        added = RULE["help"].get(script.path)
        if added is None:
            return row
        row.added = added
        answer = predict(file, added.split())
        if isinstance(answer, str):
            row.reason = f"{row.reason} With {added}: {answer}"
            return row
        row.outcome = HELPED
    else:
        row.outcome = ANSWERED
    row.verdict = answer.get("verdict") or _verdict(answer)
    variables = [word for word in row.added.split() if _is_variable(word)]
    row.misread = tuple(differences(answer, bash_settings(file, variables), row.added))
    return row


def _verdict(answer: Mapping[str, Any]) -> str:
    size = format_bytes(answer["peak_memory_bytes"]["value"])
    for beginning, fits in VERDICTS.items():
        if fits == answer["fits"]:
            return f"{beginning} {size}"
    return size


def predict(file: Path, added: Sequence[str]) -> dict[str, Any] | str:
    """Return the answer, or the sentence of the refusal."""
    variables, flags = [], []
    for word in added:
        if _is_variable(word):
            variables.append(word)
        else:
            flags.append(word)
    if "--gpus" not in flags:
        flags += ["--gpus", RULE["gpus"]]
    command = ["env", *variables, sys.executable, "-m", "autotune", "predict", "--json"]
    command += [*flags, "--from-command", file.name]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=file.parent,
        )
    except subprocess.TimeoutExpired as slow:
        return _answer_before_its_changes(slow.stderr)
    if run.stdout.strip():
        answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        if "error" not in answer:
            return answer
        error = answer["error"]
        sentence = f"{error['what']} {error['way_out']}".strip()
        folders = (file.parent, Path(sys.prefix).parent)  # of the script, and of the interpreter
        for folder in folders:
            sentence = sentence.replace(f"{folder}/", "")
        return sentence
    return " ".join(run.stderr.split())[-600:] or f"exit code {run.returncode}"


def _answer_before_its_changes(output: bytes | str | None) -> dict[str, Any] | str:
    """Return the verdict, which is printed before the changes that would make it fit."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    for line in text.splitlines():
        for beginning, fits in VERDICTS.items():
            if line.startswith(beginning):
                return {"fits": fits, "verdict": line, "settings": {}}
    return f"no answer in {SECONDS} s"


def _is_variable(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


# The words that bash itself yields.


REDIRECTION = re.compile(r"(?m)\s(?:[12&])?>>?\s*(?:&\d|\"[^\"\n]*\"|[^\s|&;]+)")


def bash_settings(file: Path, variables: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings of every command that bash reaches: `name=value` and `--name value`.

    A restricted bash writes no files: redirections are left out of the text.
    """
    file.write_text(REDIRECTION.sub(" ", file.read_text()))
    command = ["env", "-i", "HOME=/root", "PATH=/none", *variables, "/bin/bash", "-c", PRINT_WORDS]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=20,
        cwd=file.parent,
        errors="replace",
    )
    settings: dict[str, str] = {}
    arguments = run.stdout.split("\0")
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.lstrip("-+").partition("=")
        if equals:
            settings[name] = value
        elif word.startswith("--"):
            settings[name] = "true" if following.startswith(("--", "\1")) else following
    return settings


def differences(
    answer: Mapping[str, Any],
    settings: Mapping[str, str],
    added: str,
) -> Iterator[str]:
    """Yield the settings of the answer that bash gives another value."""
    for name, value in answer["settings"].items():
        text = settings.get(name, settings.get(name.replace("_", "-")))
        is_path = text is not None and "/" in text
        if text is None or name in added or name in HARDWARE or is_path:
            continue
        stated = parse_value(text.strip("'\""))
        if stated != value and str(stated).lower() != str(value).lower():
            yield f"{name}: {text} in bash, {value} in the answer"


# Results.


def table(rows: Sequence[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    summary = ", ".join(f"{counts[name]} {name}" for name in (ANSWERED, HELPED, REFUSED))
    misread = 0
    for row in rows:
        misread += bool(row.misread)
    lines = [
        "# Public launch scripts as they are",
        "",
        f"{len(rows)} scripts by rule.yaml on {RULE['gpus']}: {summary}; {misread} misread.",
        "Seconds are those of the script as given, on a machine with other work.",
        "",
        "| script | outcome | answer, or reason | seconds |",
        "|---|---|---|---:|",
    ]
    for row in rows:
        outcome = row.outcome
        if row.outcome == HELPED:
            outcome += f": `{row.added}`"
        text = row.verdict or row.reason
        if row.misread:
            text += f" **misread: {'; '.join(row.misread)}**"
        place = f"{row.repository}@{row.commit[:7]} {row.path}"
        lines.append(f"| {place} | {outcome} | {text.replace('|', '/')} | {row.seconds:.0f} |")
    return "\n".join([*lines, ""])


def _write(rows: Sequence[Row], folder: Path) -> None:
    document = {"machine": machine.facts({}), "rows": [asdict(row) for row in rows]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launches.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "launches.md").write_text(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the paths of some scripts")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for script in chosen_scripts(options.clones):
            if options.names and not any(name in script.path for name in options.names):
                continue
            row = try_script(script, Path(folder))
            rows.append(row)
            _write(rows, options.out)
            print(f"{row.outcome:15} {row.seconds:5.0f} s  {row.path}", flush=True)
            print(f"{'':22} {row.verdict or row.reason} {' '.join(row.misread)}", flush=True)


if __name__ == "__main__":
    main()
