"""What watching a training costs it: pairs of the same run with and without the guard, in turns.

    python benchmarks/guard_overhead.py [--pairs 10] [--steps 400]

The training computes on every core, and times each of its steps. The first figure is the ratio of
the median step times of each pair; it has the noise of the machine. The second has none: the CPU
time of the guard and its keeper, as a share of the cores' time while the command ran.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "guard-overhead.json"
BAR = 0.005

TRAINING = """
import json, sys, time
import numpy

steps, file = int(sys.argv[1]), sys.argv[2]
weights = numpy.random.default_rng(0).random((600, 600))
times = []
for step in range(1, steps + 1):
    begin = time.perf_counter()
    for _ in range(4):
        weights = numpy.tanh(weights @ weights / 600)
    times.append(time.perf_counter() - begin)
    print(f"step:{step} - loss:1.0", flush=True)
json.dump(times, open(file, "w"))
"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Median seconds of a step without and with the guard, and the guard's CPU share."""

    plain_seconds: float
    guarded_seconds: float
    guard_cpu_share: float

    @property
    def ratio(self) -> float:
        return self.guarded_seconds / self.plain_seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        pairs.append(_pair(number, options.steps))
        print(f"pair {number + 1}: {pairs[-1].ratio:.4f} {pairs[-1].guard_cpu_share:.5f}")
    ratio = statistics.median(pair.ratio for pair in pairs)
    share = statistics.median(pair.guard_cpu_share for pair in pairs)
    result = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "steps": options.steps,
        "median_ratio": round(ratio, 5),
        "median_guard_cpu_share": round(share, 6),
        "bar": BAR,
        "pairs": [asdict(pair) for pair in pairs],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"ratio {ratio:.4f}, CPU share {share:.5f}, bar {BAR}")
    return 0 if share < BAR else 1


def _pair(number: int, steps: int) -> Pair:
    """Run both, in an order that changes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "training.py"
        program.write_text(TRAINING)
        seconds = {}
        share = 0.0
        kinds = ["plain", "guarded"]
        random.Random(number).shuffle(kinds)
        for kind in kinds:
            file = folder / f"{kind}.json"
            command = [sys.executable, str(program), str(steps), str(file)]
            if kind == "guarded":
                share = _guarded(command, folder)
            else:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[kind] = statistics.median(json.loads(file.read_text()))
        return Pair(
            plain_seconds=seconds["plain"],
            guarded_seconds=seconds["guarded"],
            guard_cpu_share=share,
        )


def _guarded(command: list[str], folder: Path) -> float:
    """Run under the guard; return the CPU share of guard and keeper while the command runs."""
    guard_options = ["--values", "steps=1", "--out", str(folder / "guard")]
    guard = [sys.executable, "-m", "autotune", "guard", *guard_options, "--", *command, "{steps}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        guard,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        watched: list[int] = []
        while len(watched) < 2:  # until the keeper has started the command
            watched = _guard_and_keeper(process.pid)
            time.sleep(0.01)
        time.sleep(0.3)
        began, used = time.monotonic(), _cpu_seconds(watched)
        last = began, used
        while process.poll() is None and (folder / "guarded.json").exists() is False:
            last = time.monotonic(), _cpu_seconds(watched)
            time.sleep(0.05)
        process.wait()
    assert process.returncode == 0
    wall = (last[0] - began) * (os.cpu_count() or 1)
    return max(0.0, last[1] - used) / wall


def _guard_and_keeper(guard: int) -> list[int]:
    try:
        text = Path(f"/proc/{guard}/task/{guard}/children").read_text()
    except OSError:
        return []
    keepers = [int(word) for word in text.split()]
    return [guard, *keepers[:1]]


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
