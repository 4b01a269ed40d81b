"""First light: what a few minutes on a GPU can settle, most informative first, in one program.

make first-light                    # nine minutes; MINUTES=30 for all steps
    python benchmarks/first_light.py --minutes 9 --out DIR
    python benchmarks/first_light.py --predict H100 --out DIR    # no GPU needed
    python benchmarks/first_light.py --page DIR

Each step is a process with a time limit of its own. Its results are appended to DIR/results.jsonl
at once, and a second program goes on where the first one ended. DIR/page.md has predicted, emulated
and measured figures next to each other. Under `autotune rehearse` all of this runs on emulated
cards, with emulated figures. Models are synthetic, in the public shapes: no download.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import machine
import psutil
from first_light_page import write_page
from first_light_steps import Step, plan, seconds_for, steps
from gpu_record import DONE, FILE, OUT_OF_TIME, Record, basis_here
from gpu_setups import PARTS

from autotune.core.units import GIB, MIB
from autotune.machine.hardware_detection import gpu_of, gpus_here, hardware

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "vllm",
    "bitsandbytes",
)
ANY_CARD_GIB = 80  # all cards have the same names of steps
PR_SET_CHILD_SUBREAPER = 36
ENDING_SECONDS = 3
DOCUMENT = '{"schema"'  # beginning of the line that --json prints
ANSWER = ("status", "recommendation", "baseline", "counts", "probe_seconds")
"""Fields of a search's document that are appended to the results; the others are in its folder."""

KEPT_MIB = 4  # larger files of a search stay behind


def main() -> int:
    arguments = _arguments()
    if arguments.page:
        write_page(arguments.page, _same_card(arguments.page.resolve().name))
        return 0
    if arguments.predict:
        return _predict(arguments.predict, arguments.out)
    if not gpus_here():
        print("No NVIDIA GPU is visible on this machine.", file=sys.stderr)
        return 2
    return Program(arguments).run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9)
    add("--seconds", type=float, help="in place of --minutes: from --began on")
    add(
        "--began",
        type=float,
        default=time.time(),
        metavar="EPOCH",
    )
    add(
        "--scale",
        type=float,
        default=1,
        help="multiplies all times: for emulated cards",
    )
    add(
        "--only",
        type=_names,
        default=[],
        metavar="STEPS",
        help="these steps, in this order: search,sft",
    )
    add("--again", action="store_true", help="repeat steps that ended well")
    add("--out", type=Path, help="folder of the results")
    add("--keep", type=Path, help="a second folder with the results, to go on from")
    add("--predict", metavar="GPU", help="predict all points, and end")
    add(
        "--page",
        type=Path,
        metavar="DIR",
        help="write the page again, and end",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.only) - {step.name for step in steps(ANY_CARD_GIB)}
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    return arguments


def _names(text: str) -> list[str]:
    return text.split(",")


def card_name() -> str:
    """Return the name of this machine's card in the catalogue, or its driver's name for it."""
    gpu = gpu_of(hardware("local"))
    if gpu is not None:
        return gpu.name
    driver_name = gpus_here()[0].name
    return driver_name.removeprefix("NVIDIA ").strip().replace(" ", "-")


def _same_card(card: str) -> list[Path]:
    """Return the folders of a card's committed results: predictions, measured, emulated."""
    return [RESULTS / "first-light" / card, RESULTS / "first-light-emulated" / card]


def _predict(gpu: str, out: Path | None) -> int:
    folder = out or RESULTS / "first-light" / gpu
    program = Path(__file__).with_name("gpu_points.py")
    command = [sys.executable, str(program), "predict", *PARTS]
    return subprocess.call([*command, "--gpus", gpu, "--out", str(folder)])


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A step's process after its end."""

    code: int | None  # None: its time was over
    seconds: float
    output: str
    orphans: tuple[str, ...]  # command lines of processes that it left

    @property
    def outcome(self) -> str:
        outcomes = {None: "timeout", DONE: "ok", OUT_OF_TIME: "out of time"}
        return outcomes.get(self.code, "failed")


class Program:
    """The steps of one call."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        seconds = arguments.seconds or 60 * arguments.minutes
        self._minutes = seconds / 60
        self._until = arguments.began + seconds * arguments.scale
        folder = "first-light-emulated" if basis_here() == "emulated" else "first-light"
        out: Path = arguments.out or RESULTS / folder / card_name()
        self._out = out.resolve()
        self._work = Path(tempfile.gettempdir()) / "first-light-work"
        self._record = Record(self._out / FILE)

    def run(self) -> int:
        """Run the steps that are left. Return 1 if one of them failed."""
        # Orphans of a step become children of this process, which ends them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, _exit)
        self._restore()
        device = gpus_here()[0]
        self._record.append("start", **self._head())
        self._say(f"{basis_here()} on {device.name}, {self._minutes:.0f} minutes")
        failed = False
        for step in self._plan(device.memory_bytes / GIB):
            remaining = self._until - time.time()
            seconds = seconds_for(step, remaining, self._arguments.scale)
            if seconds is None:
                self._finished(step, "no time", seconds=0)
            else:
                failed |= self._run(step, seconds) == "failed"
        self._say(f"results: {self._out / FILE}, page: {self._out / 'page.md'}")
        return int(failed)

    def _plan(self, card_gib: float) -> tuple[Step, ...]:
        done = set()
        for line in self._record.lines("step"):
            if line["outcome"] == "ok" and not self._arguments.again:
                done.add(line["name"])
        return plan(self._minutes, card_gib, done=done, only=self._arguments.only)

    def _head(self) -> dict[str, Any]:
        device = gpus_here()[0]
        versions = {"python": platform.python_version()}
        versions.update(_versions())
        return {
            "card": card_name(),
            "driver_name": device.name,
            "memory_mib": device.memory_bytes // MIB,
            "driver_version": device.driver_version,
            "compute_capability": device.compute_capability,
            "minutes": round(self._minutes, 1),
            "scale": self._arguments.scale,
            "machine": machine.facts(versions),
        }

    def _run(self, step: Step, seconds: float) -> str:
        command = step.command(
            sys.executable, self._out, self._work, seconds, self._arguments.scale
        )
        self._say(f"{step.name}: {step.about}; at most {seconds:.0f} s")
        ended = _ended(command, seconds)
        answer = _answer(ended.output)
        if answer is not None:
            self._record.append("search", name=step.name, answer=answer)
        self._copy_files(step)
        self._finished(
            step,
            ended.outcome,
            seconds=ended.seconds,
            code=ended.code,
            orphans=ended.orphans,
            tail=ended.output[-2000:],
        )
        return ended.outcome

    def _finished(self, step: Step, outcome: str, seconds: float, **details: Any) -> None:
        self._record.append(
            "step",
            name=step.name,
            outcome=outcome,
            seconds=round(seconds, 1),
            at=time.strftime("%H:%M:%S"),
            **details,
        )
        self._say(f"{step.name}: {outcome} after {seconds:.0f} s")
        self._write_page()
        self._keep()

    def _write_page(self) -> None:
        try:
            write_page(self._out, _same_card(card_name()))
        except Exception:  # a page can be written later; the card's time is short
            traceback.print_exc()

    def _copy_files(self, step: Step) -> None:
        """Copy the small files of a search next to the results."""
        folder = self._work / step.name
        for file in folder.rglob("*") if folder.is_dir() else ():
            if file.is_file() and file.stat().st_size < KEPT_MIB * MIB:
                target = self._out / step.name / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)

    def _restore(self) -> None:
        """Go on from the second folder where the first one was emptied."""
        second = self._arguments.keep
        if second is None or not second.is_dir():
            return
        if not (self._out / FILE).exists():
            shutil.copytree(second, self._out, dirs_exist_ok=True)

    def _keep(self) -> None:
        if self._arguments.keep is not None:
            shutil.copytree(self._out, self._arguments.keep, dirs_exist_ok=True)

    def _say(self, text: str) -> None:
        remaining = max(0, self._until - time.time())
        print(f"===== {time.strftime('%H:%M:%S')}, {remaining:.0f} s left: {text}", flush=True)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _ended(command: list[str], seconds: float) -> Ended:
    """Run a command for at most so many seconds, and end whatever it leaves."""
    before = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(
        target=_show,
        args=(process, lines),
        daemon=True,
    )
    reader.start()
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:  # the program itself may be ended, too
        took = time.monotonic() - began
        orphans = _end_processes(before)
    reader.join(ENDING_SECONDS)
    return Ended(
        code=code,
        seconds=took,
        output="".join(lines),
        orphans=orphans,
    )


def _show(process: subprocess.Popen[str], lines: list[str]) -> None:
    """Print a step's output as it comes, but for the document of a search."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if not line.startswith(DOCUMENT):
            print(line, end="", flush=True)


def _end_processes(before: set[psutil.Process]) -> tuple[str, ...]:
    """End the processes that a step left, by their ids. Return their command lines."""
    orphans = []
    texts = []
    for process in psutil.Process().children(recursive=True):
        if process in before:
            continue
        try:
            texts.append(" ".join(process.cmdline())[:120])
            process.terminate()
        except psutil.Error:
            continue
        orphans.append(process)
    _, alive = psutil.wait_procs(orphans, timeout=ENDING_SECONDS)
    for process in alive:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(alive, timeout=ENDING_SECONDS)
    return tuple(texts)


def _answer(output: str) -> dict[str, Any] | None:
    """Return the document of `autotune run --json`, without the rows of its candidates."""
    for line in output.splitlines():
        if line.startswith(DOCUMENT):
            document = json.loads(line)
            return {name: document.get(name) for name in ANSWER}
    return None


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
