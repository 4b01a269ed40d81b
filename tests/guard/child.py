"""A training without a framework, for the guard's tests: `child.py FOLDER MICRO [CHECKPOINT]`.

A step takes 8 samples whatever the micro-batch, and the state is a hash over all samples so far: it
is right at the end only if no sample was lost and none was seen twice. FAULT names what goes wrong,
in the first attempts up to FAULT_TIMES.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STEPS = 12
SAVE_EVERY = 3
GLOBAL_BATCH = 8
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.1"))
FAULT = os.environ.get("FAULT", "")
FAULT_STEP = 8
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of"
    " which 1.00 GiB is free."
)
TIMED_OUT = (
    "[rank0]:[E1112 10:00:00.123456789 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
MACHINE_FAULTS = {
    "nccl": "NCCL error: remote process exited or there was a network error",
    "lost gpu": "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "lost node": "The actor died because its node has died. Node Id: 1b2c",
}


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def main() -> None:
    folder = Path(sys.argv[1])
    micro = int(sys.argv[2])
    attempts = folder / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = len(list(attempts.iterdir())) + 1
    (attempts / str(number)).write_text(" ".join(sys.argv[2:]))
    is_faulty = number <= int(os.environ.get("FAULT_TIMES", "1"))
    fault = FAULT if is_faulty else ""
    if "grandchild" in os.environ.get("WITH", ""):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if "deaf" in os.environ.get("WITH", ""):
        for number_of_signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number_of_signal, signal.SIG_IGN)
    if fault == "load":
        raise OutOfMemoryError(OUT_OF_MEMORY)
    step, state = 0, "start"
    if len(sys.argv) > 3:
        stored = json.loads((Path(sys.argv[3]) / "state.json").read_text())
        step, state = stored["step"], stored["state"]
    train(folder, step, state, micro, fault)


def train(
    folder: Path,
    step: int,
    state: str,
    micro: int,
    fault: str,
) -> None:
    while step < STEPS:
        for start in range(0, GLOBAL_BATCH, micro):
            for sample in range(start, min(start + micro, GLOBAL_BATCH)):
                key = f"{state}{step}{sample}"
                state = hashlib.sha256(key.encode()).hexdigest()
        step += 1
        time.sleep(STEP_SECONDS)
        print(f"step:{step} - loss:1.0", flush=True)
        if fault == "first step" or (fault == "later step" and step == FAULT_STEP):
            training_step()
        if fault == "evaluate" and step == FAULT_STEP:
            evaluate()
        if fault in MACHINE_FAULTS and step == FAULT_STEP:
            raise RuntimeError(MACHINE_FAULTS[fault])
        if fault == "watchdog" and step == FAULT_STEP:
            end_by_the_watchdog()
        if fault == "hang" and step == FAULT_STEP:
            wait_for_a_rank_that_never_comes()
        if fault == "bug" and step == FAULT_STEP:
            raise KeyError("advantages")
        if step % SAVE_EVERY == 0:
            save(folder, step, state, fault)
    (folder / "final").write_text(state)


def training_step() -> None:
    raise OutOfMemoryError(OUT_OF_MEMORY)


def end_by_the_watchdog() -> None:
    """End as NCCL's watchdog ends a rank whose collective timed out."""
    print(TIMED_OUT, file=sys.stderr, flush=True)
    os.abort()


def wait_for_a_rank_that_never_comes() -> None:
    threading.Event().wait()


def evaluate() -> None:
    raise OutOfMemoryError(OUT_OF_MEMORY)


def save(
    folder: Path,
    step: int,
    state: str,
    fault: str,
) -> None:
    checkpoint = folder / "out" / f"step_{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    is_late = step > FAULT_STEP
    if fault == "full disk" and is_late:
        (checkpoint / "state.json").write_text("")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    text = json.dumps({"step": step, "state": state, "filling": "x" * 100_000})
    if fault in ("saving", "torn") and is_late:
        (checkpoint / "state.json").write_text(text[:50_000])
        if fault == "saving":
            raise OutOfMemoryError(OUT_OF_MEMORY)
        os.kill(os.getpid(), signal.SIGKILL)
    with (checkpoint / "state.json").open("w") as file:
        for start in range(0, len(text), 10_000):
            file.write(text[start : start + 10_000])
            file.flush()
            if "slow save" in os.environ.get("WITH", ""):
                time.sleep(0.05)


def state_at_the_end() -> str:
    """Return the state of an uninterrupted run."""
    state = "start"
    for step in range(STEPS):
        for sample in range(GLOBAL_BATCH):
            state = hashlib.sha256(f"{state}{step}{sample}".encode()).hexdigest()
    return state


if __name__ == "__main__":
    main()
