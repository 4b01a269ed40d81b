"""What watching a training costs it, in eight minutes on a quiet machine.

    python benchmarks/guard_overhead.py [--seconds 480] [--out FILE]

One training runs under the guard on every core. Guard and keeper are halted and continued in turns
(SIGSTOP, SIGCONT), in blocks of four parts: without, with, with, without, and the other way round.
The two sides of a block share the process, its memory and the state of the machine, and a drift of
the machine cancels. A part counts as long as the guard takes from one look to the next, so that it
holds one look; the look that was due while it was halted falls into the time that is not counted.

    wall ratio    seconds of a step with the guard / without, per block
    CPU ratio     the same of the training's own processor seconds
    CPU share     processor seconds of guard and keeper / those of all cores, in parts with them

A step's time is the mean of its part: a look delays one step of many, which a median would not see.
Over blocks counts the Hodges-Lehmann estimate, the median of the means of all pairs of blocks, with
its 95 % interval by signed ranks. Turns in both orders make the ratios of blocks symmetric, which
it needs; of normal noise it takes two thirds of the blocks that a median takes.

The cost is shown to be below the bar where the whole interval of the wall ratio is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.guard.watched import LOOK_SECONDS

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "guard-overhead.json"
BAR = 0.005
BELOW = "below"
BLOCKS = ((False, True, True, False), (True, False, False, True))  # True: with the guard
SETTLE_SECONDS = 0.3  # after a change, not counted
COUNTED_SECONDS = LOOK_SECONDS
PART_SECONDS = SETTLE_SECONDS + COUNTED_SECONDS
QUIET_LOAD = 0.5  # other work before the start, above which a result says little
WARMUP_SECONDS = 5.0
NORMAL_QUANTILE = 1.96  # of an interval that covers 95 %

TRAINING = """
import os, sys, time
import numpy

weights = numpy.random.default_rng(0).random((600, 600))
with open(sys.argv[1], "w") as log:
    step = 0
    while not os.path.exists(sys.argv[2]):
        step += 1
        for _ in range(4):
            weights = numpy.tanh(weights @ weights / 600)
        print(f"step:{step} - loss:1.0", flush=True)
        log.write(f"{time.monotonic()} {time.process_time()}\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Time with or without the guard."""

    is_guarded: bool
    began: float
    ended: float
    guard_cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    at: float
    cpu_seconds: float  # of the training so far


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Mean cost of a step in some parts."""

    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Block:
    wall_ratio: float
    cpu_ratio: float
    guard_cpu_share: float


@dataclass(frozen=True, kw_only=True)
class Centre:
    """Centre of many blocks, with its interval."""

    value: float
    low: float
    high: float


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > QUIET_LOAD:
        print(f"other programs run here (load {load_before:.1f}): the interval will be wide")
    blocks = _measure(options.seconds)
    wall = centre([block.wall_ratio for block in blocks])
    result = {
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "bar": BAR,
        "verdict": verdict(wall),
        "wall_ratio": _rounded(wall),
        "cpu_ratio": _rounded(centre([block.cpu_ratio for block in blocks])),
        "guard_cpu_share": _rounded(centre([block.guard_cpu_share for block in blocks])),
        "blocks": [asdict(block) for block in blocks],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("docs/guard.md has to say:\n" + sentence(result))
    return 0 if result["verdict"] == BELOW else 1


def sentence(result: Mapping[str, Any]) -> str:
    """Return what the documentation says of a result, with signs of change in percent."""
    wall = result["wall_ratio"]
    low, high = (f"{100 * (wall[name] - 1):+.2f}" for name in ("low", "high"))
    share = f"{100 * result['guard_cpu_share']['value']:.2f}"
    return (
        f"Watching takes {share} % of the processors' time. It changes the time of a step by"
        f" {100 * (wall['value'] - 1):+.2f} % ({low} to {high} % with 95 % certainty:"
        f" {result['verdict']} 0.5 %)"
    )


def _measure(seconds: float) -> list[Block]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, log, end = folder / "training.py", folder / "steps.txt", folder / "end"
        program.write_text(TRAINING)
        command = [sys.executable, str(program), str(log), str(end)]
        with _guarded(command, folder) as guard:
            try:
                parts = _parts(guard, seconds)
            finally:
                end.touch()
            if guard.wait() != 0:
                raise SystemExit(f"the guarded run ended with {guard.returncode}")
        steps = _steps(log)
    blocks = []
    for start in range(0, len(parts) - 3, 4):
        blocks.append(_block(parts[start : start + 4], steps))
    return blocks


def _guarded(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    guard_options = ["--values", "unused=1", "--out", str(folder / "guard")]
    guard = [sys.executable, "-m", "autotune", "guard", *guard_options, "--", *command, "{unused}"]
    threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
    return subprocess.Popen(
        guard,
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# Parts: halt and continue.


def _parts(guard: subprocess.Popen[bytes], seconds: float) -> list[Part]:
    watched = _guard_and_keeper(guard.pid)
    while len(watched) < 2:  # until the keeper has started the command
        time.sleep(0.05)
        watched = _guard_and_keeper(guard.pid)
    time.sleep(WARMUP_SECONDS)
    number_of_blocks = max(1, round(seconds / (4 * PART_SECONDS)))
    parts = []
    try:
        for number in range(number_of_blocks):
            for is_guarded in BLOCKS[number % len(BLOCKS)]:
                parts.append(_part(watched, is_guarded))
    finally:
        _send(watched, signal.SIGCONT)
    return parts


def _part(watched: Sequence[int], is_guarded: bool) -> Part:
    _send(watched, signal.SIGCONT if is_guarded else signal.SIGSTOP)
    time.sleep(SETTLE_SECONDS)
    began = time.monotonic()
    cpu_before = _cpu_seconds(watched)
    time.sleep(COUNTED_SECONDS)
    return Part(
        is_guarded=is_guarded,
        began=began,
        ended=time.monotonic(),
        guard_cpu_seconds=_cpu_seconds(watched) - cpu_before,
    )


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _guard_and_keeper(guard: int) -> list[int]:
    try:
        text = Path(f"/proc/{guard}/task/{guard}/children").read_text()
    except OSError:
        return []
    keepers = [int(word) for word in text.split()]
    return [guard, *keepers[:1]]


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor seconds of all threads, to the nanosecond."""
    total = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


# Figures.


def _steps(log: Path) -> list[StepEnd]:
    steps = []
    for line in log.read_text().splitlines():
        at, cpu_seconds = line.split()
        steps.append(StepEnd(at=float(at), cpu_seconds=float(cpu_seconds)))
    return steps


def _block(parts: Sequence[Part], steps: Sequence[StepEnd]) -> Block:
    guarded = [part for part in parts if part.is_guarded]
    plain = [part for part in parts if not part.is_guarded]
    with_guard = _cost(guarded, steps)
    without = _cost(plain, steps)
    core_seconds = sum(part.ended - part.began for part in guarded) * (os.cpu_count() or 1)
    return Block(
        wall_ratio=with_guard.wall_seconds / without.wall_seconds,
        cpu_ratio=with_guard.cpu_seconds / without.cpu_seconds,
        guard_cpu_share=sum(part.guard_cpu_seconds for part in guarded) / core_seconds,
    )


def _cost(parts: Sequence[Part], steps: Sequence[StepEnd]) -> StepCost:
    """Return the mean cost of the steps that lie whole in these parts."""
    wall = cpu = 0.0
    count = 0
    for part in parts:
        inside = [step for step in steps if part.began <= step.at <= part.ended]
        wall += inside[-1].at - inside[0].at
        cpu += inside[-1].cpu_seconds - inside[0].cpu_seconds
        count += len(inside) - 1
    return StepCost(wall_seconds=wall / count, cpu_seconds=cpu / count)


def centre(values: Sequence[float]) -> Centre:
    """Return the Hodges-Lehmann estimate with its interval by signed ranks."""
    means = []
    for place, first in enumerate(values):
        for second in values[place:]:
            means.append((first + second) / 2)
    means.sort()
    count = len(values)
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    left_out = max(0, math.floor(len(means) / 2 - NORMAL_QUANTILE * spread))
    return Centre(
        value=statistics.median(means),
        low=means[left_out],
        high=means[-1 - left_out],
    )


def _rounded(numbers: Centre) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(numbers).items()}


def verdict(ratio: Centre) -> str:
    """Return where the ratio lies by its whole interval."""
    if ratio.high < 1 + BAR:
        return BELOW
    if ratio.low > 1 + BAR:
        return "above"
    return "undecided around"


if __name__ == "__main__":
    sys.exit(main())
