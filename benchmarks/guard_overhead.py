"""What watching a training costs it, in eight minutes.

    python benchmarks/guard_overhead.py [--seconds 480] [--out FILE]

One training runs under the guard on every core. Guard and keeper are halted and continued in turns
(SIGSTOP, SIGCONT), in blocks of four parts: without, with, with, without, and the other way round.
The two sides of a block share the process, its memory and the state of the machine, and a drift of
the machine cancels.

The cost is too small for its own noise: one percent more or less of a block's time is usual. So
half of the time the guard works SPED_UP times as often as it does: its looks at memory, output and
checkpoints, and the lines that it copies. Its own processor seconds have little noise. They are
measured at both rates: sped up, they are `more_work` times as many, which is less than SPED_UP,
because frequent looks find warm caches. What the wall ratio is above 1 is divided by `more_work`,
and its interval too. Of the intervals of both shares, the ends count that make it smallest.

    wall ratio    seconds of the training's work with the guard / without, per block
    CPU ratio     the same of the training's own processor seconds
    CPU share     processor seconds of guard and keeper / those of all cores, in parts with them

Over blocks counts the Hodges-Lehmann estimate, the median of the means of all pairs of blocks, with
its 95 % interval by signed ranks. Turns in both orders make the ratios of blocks symmetric, which
it needs; of normal noise it takes two thirds of the blocks that a median takes.

The cost is shown to be below the bar where the whole interval at the guard's own rate is.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import random
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

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "guard-overhead.json"
BAR = 0.005
BELOW = "below"
SPED_UP = 16  # times as often as the guard watches
BLOCKS = ((False, True, True, False), (True, False, False, True))  # True: with the guard
SETTLE_SECONDS = (0.1, 0.3)  # after a change, not counted; another time in each part
COUNTED_SECONDS = 2.5  # of a part: one look at the guard's own rate
MIN_COUNTED_SECONDS = 0.5
QUIET_LOAD = 0.5  # other work before the start, above which the interval is wider
WARMUP_SECONDS = 5.0
NORMAL_QUANTILE = 1.96  # of an interval that covers 95 %

# What a training does under a guard: it computes, prints twice a second, and has checkpoints.
LINE_SECONDS = 0.5
CHECKPOINTS = 3
FILES_OF_A_CHECKPOINT = 12
TRAINING = """
import os, sys, time
import numpy

log_file, end_file, line_seconds = sys.argv[1:4]
weights = numpy.random.default_rng(0).random((400, 400))
next_line = time.monotonic()
step = 0
with open(log_file, "w") as log:
    while not os.path.exists(end_file):
        weights = numpy.tanh(weights @ weights / 400)
        now = time.monotonic()
        log.write(f"{now} {time.process_time()}\\n")
        if now > next_line:
            next_line = now + float(line_seconds)
            step += 1
            print(f"step:{step} - loss:1.0", flush=True)
"""

# The command line of autotune, with a guard that watches more often.
GUARD = """
import sys
from autotune.cli import main
from autotune.guard import watch, watched

rate = int(sys.argv.pop(1))
watch.GUARD_POLL_SECONDS /= rate
watch.CHECKPOINT_SECONDS /= rate
watched.LOOK_SECONDS /= rate
watched.LOOK_PAUSE /= rate
main()
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Time with or without the guard."""

    is_guarded: bool
    began: float
    ended: float
    guard_cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class WorkEnd:
    """End of one unit of the training's work."""

    at: float
    cpu_seconds: float  # of the training so far


@dataclass(frozen=True, kw_only=True)
class WorkCost:
    """Mean cost of a unit of work in some parts."""

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

    def at_own_rate(self, more_work: float) -> Centre:
        """Return a ratio that was measured with the guard sped up as one of its own rate."""
        return Centre(
            value=1 + (self.value - 1) / more_work,
            low=1 + (self.low - 1) / more_work,
            high=1 + (self.high - 1) / more_work,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    if load_before > QUIET_LOAD:
        print(f"other programs run here (load {load_before:.1f}): the interval will be wider")
    own_rate = _measure(options.seconds / 2, rate=1)
    sped_up = _measure(options.seconds / 2, rate=SPED_UP)
    result = {
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        **figures(own_rate, sped_up),
        "blocks": {
            "own_rate": [asdict(block) for block in own_rate],
            "sped_up": [asdict(block) for block in sped_up],
        },
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("docs/guard.md has to say:\n" + sentence(result))
    return 0 if result["verdict"] == BELOW else 1


def figures(own_rate: Sequence[Block], sped_up: Sequence[Block]) -> dict[str, Any]:
    """Return what the blocks of both rates show."""
    usual_share = centre([block.guard_cpu_share for block in own_rate])
    share = centre([block.guard_cpu_share for block in sped_up])
    more_work = share.low / usual_share.high
    wall = centre([block.wall_ratio for block in sped_up]).at_own_rate(more_work)
    return {
        "bar": BAR,
        "verdict": verdict(wall),
        "wall_ratio": _rounded(wall),
        "more_work": round(more_work, 2),
        "sped_up": {"times": SPED_UP, **_of_blocks(sped_up)},
        "own_rate": _of_blocks(own_rate),
    }


def _of_blocks(blocks: Sequence[Block]) -> dict[str, Any]:
    return {
        "wall_ratio": _rounded(centre([block.wall_ratio for block in blocks])),
        "cpu_ratio": _rounded(centre([block.cpu_ratio for block in blocks])),
        "guard_cpu_share": _rounded(centre([block.guard_cpu_share for block in blocks])),
    }


def sentence(result: Mapping[str, Any]) -> str:
    """Return what the documentation says of a result, with signs of change in percent."""
    share = f"{100 * result['own_rate']['guard_cpu_share']['value']:.2f}"
    return (
        f"Watching takes {share} % of the processors' time. It changes the time of a step by"
        f" {_changes(result['wall_ratio'])} with 95 % certainty: {result['verdict']} 0.5 %). This"
        f" is measured with a guard that does {result['more_work']:.1f} times its work, and divided"
        f" by that; at its usual work, noise is greater than the cost:"
        f" {_changes(result['own_rate']['wall_ratio'])})"
    )


def _changes(ratio: Mapping[str, float]) -> str:
    """Return a ratio with its interval as changes in percent; the bracket stays open."""
    value, low, high = (f"{100 * (ratio[name] - 1):+.2f}" for name in ("value", "low", "high"))
    return f"{value} % ({low} to {high} %"


def _measure(seconds: float, rate: int) -> list[Block]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_checkpoints(folder)
        program, log, end = folder / "training.py", folder / "work.txt", folder / "end"
        program.write_text(TRAINING)
        command = [sys.executable, str(program), str(log), str(end), str(LINE_SECONDS / rate)]
        with _guarded(command, folder, rate) as guard:
            try:
                parts = _parts(guard, seconds, rate)
            finally:
                end.touch()
            if guard.wait() != 0:
                raise SystemExit(f"the guarded run ended with {guard.returncode}")
        work = _work(log)
    blocks = []
    for start in range(0, len(parts) - 3, 4):
        blocks.append(_block(parts[start : start + 4], work))
    return blocks


def _write_checkpoints(folder: Path) -> None:
    for step in range(CHECKPOINTS):
        checkpoint = folder / f"step_{step}"
        checkpoint.mkdir()
        for number in range(FILES_OF_A_CHECKPOINT):
            (checkpoint / f"{number}.json").write_text("{}")


def _guarded(
    command: Sequence[str],
    folder: Path,
    rate: int,
) -> subprocess.Popen[bytes]:
    options = ["--values", "unused=1", "--out", str(folder / "guard")]
    options += ["--checkpoints", str(folder / "step_{step}")]
    guard = [sys.executable, "-c", GUARD, str(rate), "guard", *options, "--", *command, "{unused}"]
    threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
    return subprocess.Popen(
        guard,
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# Parts: halt and continue.


def _parts(
    guard: subprocess.Popen[bytes],
    seconds: float,
    rate: int,
) -> list[Part]:
    watched = _guard_and_keeper(guard.pid)
    while len(watched) < 2:  # until the keeper has started the command
        if guard.poll() is not None:
            raise SystemExit(f"the guard ended with {guard.returncode}")
        time.sleep(0.05)
        watched = _guard_and_keeper(guard.pid)
    time.sleep(WARMUP_SECONDS)
    counted_seconds = max(MIN_COUNTED_SECONDS, COUNTED_SECONDS / rate)
    settle = random.Random(0)
    parts: list[Part] = []
    deadline = time.monotonic() + seconds - WARMUP_SECONDS
    try:
        while time.monotonic() < deadline:
            for is_guarded in BLOCKS[len(parts) // 4 % len(BLOCKS)]:
                _send(watched, signal.SIGCONT if is_guarded else signal.SIGSTOP)
                time.sleep(settle.uniform(*SETTLE_SECONDS))
                parts.append(_part(watched, is_guarded, counted_seconds))
    finally:
        _send(watched, signal.SIGCONT)
    return parts


def _part(
    watched: Sequence[int],
    is_guarded: bool,
    counted_seconds: float,
) -> Part:
    began = time.monotonic()
    cpu_before = _cpu_seconds(watched)
    time.sleep(counted_seconds)
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


def _work(log: Path) -> list[WorkEnd]:
    ends = []
    for line in log.read_text().splitlines():
        at, cpu_seconds = line.split()
        ends.append(WorkEnd(at=float(at), cpu_seconds=float(cpu_seconds)))
    return ends


def _block(parts: Sequence[Part], work: Sequence[WorkEnd]) -> Block:
    guarded = [part for part in parts if part.is_guarded]
    plain = [part for part in parts if not part.is_guarded]
    with_guard = _cost(guarded, work)
    without = _cost(plain, work)
    core_seconds = sum(part.ended - part.began for part in guarded) * (os.cpu_count() or 1)
    return Block(
        wall_ratio=with_guard.wall_seconds / without.wall_seconds,
        cpu_ratio=with_guard.cpu_seconds / without.cpu_seconds,
        guard_cpu_share=sum(part.guard_cpu_seconds for part in guarded) / core_seconds,
    )


def _cost(parts: Sequence[Part], work: Sequence[WorkEnd]) -> WorkCost:
    """Return the mean cost of the units of work that lie whole in these parts."""
    wall = cpu = 0.0
    count = 0
    for part in parts:
        first = bisect.bisect_left(work, part.began, key=_moment)
        inside = work[first : bisect.bisect_right(work, part.ended, key=_moment)]
        wall += inside[-1].at - inside[0].at
        cpu += inside[-1].cpu_seconds - inside[0].cpu_seconds
        count += len(inside) - 1
    return WorkCost(wall_seconds=wall / count, cpu_seconds=cpu / count)


def _moment(end: WorkEnd) -> float:
    return end.at


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
