"""Steps of `make first-light`, most informative first, and the time that each one gets.

Seconds are those of a card. On emulated cards all of them are multiplied: a step there takes as
long as its host code on a busy machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
LONG_MINUTES = 15
"""From here on a program is a long one: its search gets more time. So is one of chosen steps."""

RESERVE_SECONDS = 4  # for ending a step's processes and writing the page
SEARCH_RESERVE_SECONDS = 20  # a search writes its files after its budget


@dataclass(frozen=True, kw_only=True)
class Step:
    """A process with a time limit of its own. Its arguments may name {out}, {work},
    {seconds} and {budget}.
    """

    name: str
    about: str
    arguments: tuple[str, ...]
    expected_seconds: float
    limit_seconds: float
    least_seconds: float  # with less left it is not started
    long_limit_seconds: float | None = None  # in a long program

    def command(
        self,
        python: str,
        out: Path,
        work: Path,
        seconds: float,
        scale: float,
    ) -> list[str]:
        """Return the command line for this many seconds."""
        values = {
            "out": out,
            "work": work / self.name,
            "seconds": round(max(10, seconds - 2 * RESERVE_SECONDS)),
            "budget": f"{max(10, seconds - SEARCH_RESERVE_SECONDS * scale):.0f}s",
        }
        return [python, *(argument.format(**values) for argument in self.arguments)]


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BENCHMARKS / name), *arguments, "--out", "{out}")


def _points(part: str) -> tuple[str, ...]:
    return _script("gpu_points.py", "measure", part, "--seconds", "{seconds}")


def _pytest(*tests: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests)


def _search(model: str, limit: str, *flags: str) -> tuple[str, ...]:
    typed = ("run", "--model", model, "--gpus", "local", "--tuning", "lora", "--mode", "probe")
    stated = ("--memory-limit", limit, "--budget", "{budget}", "--fresh", "--json")
    return ("-m", "autotune", *typed, *stated, "--out", "{work}", *flags)


SEARCH_LIMIT_GIB = 40
SEARCH_HOLDS = ("num_generations=8", "max_prompt_length=256", "max_completion_length=128")
SEARCH_GLOBAL_BATCH = 32
SMOKE_HOLDS = (
    "num_generations=4",
    "use_vllm=false",
    "max_prompt_length=64",
    "max_completion_length=64",
)


def _held(*holds: str) -> tuple[str, ...]:
    flags: list[str] = []
    for hold in holds:
        flags += ["--hold", hold]
    return tuple(flags)


def _search_steps(card_gib: float) -> tuple[Step, Step]:
    """Return both searches. A limit above the card is none: the card's own memory."""
    limit = f"{SEARCH_LIMIT_GIB}G" if card_gib > SEARCH_LIMIT_GIB else "100%"
    smoke = _search("Qwen2.5-0.5B", "16G", "--global-batch", "16", "--max-probes", "2")
    search = _search("Qwen2.5-7B", limit, "--global-batch", str(SEARCH_GLOBAL_BATCH))
    return (
        Step(
            name="smoke",
            about="autotune run: Qwen2.5-0.5B, LoRA, 16 GiB, at most two probes",
            arguments=smoke + _held(*SMOKE_HOLDS),
            expected_seconds=60,
            limit_seconds=80,
            least_seconds=40,
        ),
        Step(
            name="search",
            about=f"autotune run: Qwen2.5-7B, LoRA, at most {SEARCH_LIMIT_GIB} GiB",
            arguments=search + _held(*SEARCH_HOLDS),
            expected_seconds=165,
            limit_seconds=175,
            least_seconds=130,
            long_limit_seconds=300,
        ),
    )


def steps(card_gib: float) -> tuple[Step, ...]:
    """Return all steps for a card of this size, in the order of their value."""
    smoke, search = _search_steps(card_gib)
    return (
        Step(
            name="identity",
            about="memory outside torch, step by step; versions",
            arguments=_script("first_light_card.py"),
            expected_seconds=15,
            limit_seconds=60,
            least_seconds=15,
        ),
        smoke,
        Step(
            name="sft",
            about="peaks of SFT: 15 points of four loads; some must run out of memory",
            arguments=_points("sft"),
            expected_seconds=135,
            limit_seconds=150,
            least_seconds=40,
            long_limit_seconds=200,
        ),
        Step(
            name="rates",
            about="rates of products, attention, memory, Adam, launches and the host link",
            arguments=_script("first_light_rates.py"),
            expected_seconds=40,
            limit_seconds=60,
            least_seconds=15,
        ),
        search,
        Step(
            name="colocated",
            about="vLLM in the training process: asleep, under a limit, awake",
            arguments=_points("colocated"),
            expected_seconds=100,
            limit_seconds=170,
            least_seconds=60,
            long_limit_seconds=240,
        ),
        Step(
            name="shares",
            about="vLLM's share under limits of 16, 24 and 40 GiB and none",
            arguments=_points("shares"),
            expected_seconds=140,
            limit_seconds=200,
            least_seconds=70,
        ),
        Step(
            name="by hand",
            about="the same job as the search's, with the micro-batch doubled by hand",
            arguments=_script("gpu_by_hand.py", "--seconds", "{seconds}"),
            expected_seconds=150,
            limit_seconds=240,
            least_seconds=100,
        ),
        Step(
            name="quantised",
            about="bitsandbytes 4-bit under 24 GiB",
            arguments=_points("quantised"),
            expected_seconds=120,
            limit_seconds=200,
            least_seconds=60,
        ),
        Step(
            name="rollouts",
            about="GRPO with generation by transformers",
            arguments=_points("rollouts"),
            expected_seconds=90,
            limit_seconds=150,
            least_seconds=40,
        ),
        Step(
            name="ballast",
            about="tests of the memory limit",
            arguments=_pytest("-x", "tests/probe/test_on_gpus.py"),
            expected_seconds=40,
            limit_seconds=60,
            least_seconds=45,
        ),
        Step(
            name="tests",
            about="tests of each CUDA path",
            arguments=_pytest("tests/gpu/test_probes.py", "tests/gpu/test_limits.py"),
            expected_seconds=240,
            limit_seconds=400,
            least_seconds=60,
        ),
        Step(
            name="cudnn",
            about="attention of cuDNN",
            arguments=_script("first_light_rates.py", "--cudnn"),
            expected_seconds=10,
            limit_seconds=30,
            least_seconds=10,
        ),
    )


def plan(
    minutes: float,
    card_gib: float,
    *,
    done: Collection[str] = (),
    only: Sequence[str] = (),
) -> tuple[Step, ...]:
    """Return the steps that are left, with the time limits of a program of so many minutes.

    Steps that were chosen by name are run in the order named, with the limits of a long program.
    """
    by_name = {step.name: step for step in steps(card_gib)}
    long = bool(only) or minutes >= LONG_MINUTES
    planned = []
    for name in only or by_name:
        if name in done:
            continue
        step = by_name[name]
        if long and step.long_limit_seconds is not None:
            step = replace(step, limit_seconds=step.long_limit_seconds)
        planned.append(step)
    return tuple(planned)


def seconds_for(
    step: Step,
    remaining: float,
    scale: float = 1,
) -> float | None:
    """Return the seconds that a step gets of those that are left; None if they are too few."""
    if remaining < step.least_seconds * scale:
        return None
    return min(step.limit_seconds * scale, remaining - RESERVE_SECONDS)
