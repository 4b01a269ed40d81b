"""What to do with a user's own script: the patch, the flags, and what is left for the hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.candidate import Candidate
from autotune.question import Question
from autotune.trainers.trl_own_files import PATCH_NAME, advice_for, how_to_apply

if TYPE_CHECKING:
    from rich.console import Console


def script_section(question: Question, winner: Candidate | None) -> dict[str, Any] | None:
    """The document's part about the script; None where the question is about none."""
    script = question.job.workload.script
    if script is None:
        return None
    section: dict[str, Any] = {
        "path": script.path,
        "arguments": list(script.arguments),
        "rewards": script.rewards,
        "reward_functions": list(script.look.rewards),
        "trainer": script.look.trainer,
    }
    if winner is None:
        return {**section, "changes": None}
    advice = advice_for(winner, question.job, script)
    return {
        **section,
        "changes": dict(advice.changes),
        "keyword_arguments": advice.keyword_arguments,
        "patch": str(question.out / PATCH_NAME) if advice.patch else None,
        "patched_file": advice.patched_file,
        "by_hand": {name: {"value": advice.changes[name], "why": why} for name, why in advice.by_hand.items()},
        "in_objects": dict(advice.in_objects),
        "flags": list(advice.flags) if script.takes_flags else None,
    }


def show_script(console: Console, question: Question, winner: Candidate) -> None:
    """How the script becomes what was measured."""
    script = question.job.workload.script
    if script is None:
        return
    advice = advice_for(winner, question.job, script)
    for line in how_to_apply(script, advice, str(question.out)):
        console.print(line)
    if advice.by_hand:
        console.print(f"To paste: {advice.keyword_arguments}")
    if script.rewards == "skip":
        console.print(f"Rewards were not called: add what {', '.join(script.look.rewards)} take to every cycle.")
