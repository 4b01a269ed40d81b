"""Section about the user's configuration file: what the written one holds in addition or otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Recommendation, setting_text
from autotune.core.files import TO_BE_RUN, comments, write_atomically
from autotune.core.job import Job
from autotune.core.space import Candidate
from autotune.frameworks.base import Trainer
from autotune.frameworks.configuration_files import unshare
from autotune.frameworks.launch_edit import changed_script, changes_of, difference
from autotune.frameworks.trl.output_files import YAML_NAME, written_settings
from autotune.frameworks.trl.script_files import PATCH_NAME, advice_for, how_to_apply

if TYPE_CHECKING:
    from rich.console import Console


def script_section(job: Job, answer: Recommendation) -> dict[str, Any] | None:
    """Return the document's section about the script; None without one. A patch needs a confirmed winner."""
    script = job.task.workload.script
    if script is None:
        return None
    section: dict[str, Any] = {
        "path": script.path,
        "arguments": list(script.arguments),
        "rewards": script.rewards,
        "reward_functions": list(script.look.rewards),
        "trainer": script.look.trainer,
    }
    if answer.winner is None or answer.certificate is None:
        return {**section, "changes": None}
    advice = advice_for(answer.winner.candidate, job.task, script)
    return {
        **section,
        "changes": dict(advice.changes),
        "keyword_arguments": advice.keyword_arguments,
        "patch": str(job.out / PATCH_NAME) if advice.patch else None,
        "patched_file": advice.patched_file,
        "by_hand": {name: {"value": advice.changes[name], "why": why} for name, why in advice.by_hand.items()},
        "in_objects": dict(advice.in_objects),
        "flags": list(advice.flags) if script.takes_flags else None,
    }


def show_script(console: Console, job: Job, answer: Recommendation) -> None:
    """Print the steps that apply the recommendation to the script."""
    script = job.task.workload.script
    if script is None or answer.winner is None:
        return
    if answer.certificate is None:
        console.print("No patch: one short probe is not enough for it. Go on with --resume and a larger --budget.")
        return
    advice = advice_for(answer.winner.candidate, job.task, script)
    for line in how_to_apply(advice, str(job.out)):
        console.print(line)
    if advice.by_hand:
        console.print(f"To paste: {advice.keyword_arguments}")
    if script.rewards == "skip":
        console.print(f"Rewards were not called: add the time of {', '.join(script.look.rewards)} to every cycle.")


def write_files(
    job: Job, trainer: Trainer, candidate: Candidate, head: Sequence[str], *folders: Path
) -> tuple[list[Path], dict[str, Any] | None]:
    """Write the winner's files, with `head` as comments in the recommended YAML file; return them, and the document's section
    about the user's own file."""
    files = trainer.write_files(candidate, job.task, *folders)
    for file in files:
        if file.stem == "recommended" and file.suffix in (".yaml", ".yml"):
            file.write_text(comments(head) + file.read_text(encoding="utf-8"), encoding="utf-8")
    return [*files, *_launch_files(job, trainer, candidate, folders[0])], _file_section(job, files)


def _launch_files(job: Job, trainer: Trainer, candidate: Candidate, folder: Path) -> list[Path]:
    """Write the user's launch script with the changed flags, and the difference."""
    workload = job.task.workload
    launch = workload.launch
    if launch is None:
        return []
    # A knob that does not apply to this candidate can still need another value than the launch has.
    searched = {knob.name: candidate.settings[knob.name] for knob in job.space.knobs if knob.name in candidate.settings}
    changes = changes_of(workload.stated, workload.defaults, {**searched, **candidate.knobs}, trainer.fields())
    files, edits = unshare(launch, changes, candidate.settings, folder)
    changed = changed_script(launch, changes, edits)
    script, patch = folder / f"changed-{Path(launch.path).name}", folder / "changes.diff"
    write_atomically(script, changed.encode(), mode=TO_BE_RUN)
    patch.write_text(difference(launch, changed), encoding="utf-8")
    return [script, patch, *files]


def _file_section(job: Job, files: Sequence[Path]) -> dict[str, Any] | None:
    """Return the document's section about the user's file; None without one."""
    workload = job.task.workload
    written = next((file for file in files if file.name == YAML_NAME), None)
    if written is None or workload.framework != "trl" or workload.config_file is None or workload.script is not None:
        return None
    rows = [
        {"name": one.name, "yours": one.yours, "written": one.written, "kind": one.kind}
        for one in written_settings(job.task, written)
    ]
    return {"path": str(workload.config_file), "written": str(job.out / YAML_NAME), "settings": rows}


def show_file(console: Console, section: Mapping[str, Any] | None) -> None:
    """Print the settings of the written file that the user's does not have, or has otherwise."""
    if section is None:
        return
    by_kind: dict[str, list[str]] = {}
    for row in section["settings"]:
        if row["kind"] == "changed":
            text = f"{row['name']}: {setting_text(row['yours'])} -> {setting_text(row['written'])}"
        else:
            text = row["name"] if row["kind"] == "moved" else f"{row['name']}={setting_text(row['written'])}"
        by_kind.setdefault(row["kind"], []).append(text)
    titles = {
        "changed": f"Unlike in {section['path']}",
        "assumed": "Written out, with the value that holds there anyway",
        "moved": "Now in accelerate.yaml",
    }
    for kind, title in titles.items():
        if kind in by_kind:
            console.print(f"{title}: {', '.join(by_kind[kind])}", soft_wrap=True)
