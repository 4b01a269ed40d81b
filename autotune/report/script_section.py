"""Section about the user's own script: the patch, the flags, and the manual changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.core.answer import Recommendation
from autotune.core.job import Job
from autotune.frameworks.trl.script_files import PATCH_NAME, advice_for, how_to_apply

if TYPE_CHECKING:
    from rich.console import Console


def script_section(job: Job, answer: Recommendation) -> dict[str, Any] | None:
    """Return the document's section about the script; None without one. A patch needs a confirmed
    winner."""
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
    for line in how_to_apply(script, advice, str(job.out)):
        console.print(line)
    if advice.by_hand:
        console.print(f"To paste: {advice.keyword_arguments}")
    if script.rewards == "skip":
        console.print(f"Rewards were not called: add the time of {', '.join(script.look.rewards)} to every cycle.")
