"""The question's flags: the same words wherever a question is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autotune.cli.values import FILE, gpu_names, model_names, space_names

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model",
        metavar="NAME|ID|FOLDER",
        shell_complete=model_names,
        help="A name of `autotune show models`, a hub id in the local cache, or a folder.",
    ),
    click.option(
        "--gpus",
        default="local",
        show_default=True,
        metavar="HARDWARE",
        shell_complete=gpu_names,
        help="local, 2xA100-40G, cpu, 2xcpu ...",
    ),
    click.option(
        "--method",
        default="grpo",
        show_default=True,
        metavar="METHOD",
        help="grpo, rloo, sft, dpo or online-dpo; ppo with verl, openrlhf, open-reasoner-zero, and TRL up to 1.12.",
    ),
    click.option(
        "--framework",
        default="trl",
        show_default=True,
        metavar="NAME",
        help="What trains it: trl, swift, verl, openrlhf, open-reasoner-zero, unsloth or command.",
    ),
    click.option("--python", type=FILE, metavar="PATH", help="The training environment's interpreter; autotune's own otherwise."),
    click.option("--tuning", type=click.Choice(["full", "lora", "qlora"]), help="What of the model is trained."),
    click.option("--lora-rank", type=int, metavar="N", help="Rank of the adapter."),
    click.option("--max-prompt-length", type=int, metavar="N", help="Longest prompt, in tokens; held."),
    click.option("--max-completion-length", type=int, metavar="N", help="Longest completion, in tokens; held."),
    click.option(
        "--typical-completion-length", type=int, metavar="N", help="How long completions usually are; speed is ranked by it."
    ),
    click.option("--num-generations", type=int, metavar="N", help="Completions per prompt; held."),
    click.option("--global-batch", type=int, metavar="N", help="Completions per optimizer step, over all GPUs; held."),
    click.option("--dataset", type=FILE, metavar="NAME|FOLDER", help="Your prompts or rows, as the framework would load them."),
    click.option(
        "--config",
        type=FILE,
        metavar="FILE",
        help="Your own YAML of `trl grpo --config`: the baseline; its learning settings are held.",
    ),
    click.option(
        "--script",
        type=FILE,
        metavar="FILE",
        help="Your own training script: the baseline; what it is given goes behind two dashes.",
    ),
    click.option(
        "--rewards",
        type=click.Choice(["real", "skip"]),
        default="real",
        show_default=True,
        help="Of your script: skip calls none of them.",
    ),
    click.option("--hold", multiple=True, metavar="K=V", help="Hold a knob or another setting at a value. May be repeated."),
    click.option("--search", multiple=True, metavar="K=V1,V2", help="Let a knob move over these values. May be repeated."),
    click.option("--memory-limit", metavar="SIZE", help="Fit into this much, like 38G: per GPU, or for all ranks on a CPU."),
    click.option(
        "--weights", type=click.Choice(["random", "real"]), default="random", show_default=True, help="What probes load."
    ),
    click.option("--seed", type=int, default=42, show_default=True, metavar="N", help="Seeds probes and the search."),
    click.option(
        "--space",
        metavar="NAME|FILE",
        shell_complete=space_names,
        help="A name of `autotune show spaces`, or a file; the method's own otherwise.",
    ),
)


def question_options(command: Command) -> Command:
    """All of the question's flags, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def console(*, to_stderr: bool) -> Console:
    """Where words go: to a person's terminal in its width, into a pipe in 120 columns."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # Without a terminal there is no width to ask for, and rich would take 80.
    terminal = stream.isatty()
    return Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not terminal, width=None if terminal else 120
    )
