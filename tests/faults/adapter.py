"""Toy framework with a fault at the probe that the test names. It records its own actions, so
that the study can be checked against them.
"""

# mypy: ignore-errors

import ctypes
import json
import os
import signal
import stat
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "probe"))
import toy_adapter as toy

MIB = 2**20
CYCLE_SECONDS = 0.1
"""Reported duration of every cycle: the truth of this synthetic machine is exact."""


def warm(hint):
    if hint.get("gloo"):
        import torch.distributed  # noqa: F401
    return toy.warm(hint)


load, release = toy.load, toy.release


def measure(
    loaded,
    request,
    stage,
):
    trouble, folder = request.get("trouble") or {}, request["folder"]
    number = _begin(folder, request["candidate"], stage.rank)
    if number == trouble.get("at"):
        _TROUBLES[trouble["name"]](trouble, loaded, stage, folder)
    result = toy.measure(loaded, request, stage)
    result["worst"]["cycle_seconds"] = [CYCLE_SECONDS] * request["cycles"]
    result["worst"]["phase_seconds"] = {}
    _note(f"{folder}/finished-{stage.rank}", {"candidate": request["candidate"]})
    return result


def _begin(
    folder,
    candidate,
    rank,
):
    """Return the number of this probe in the whole study, counted over all slots."""
    token = uuid.uuid4().hex
    _note(f"{folder}/begun-{rank}", {"candidate": candidate, "pid": os.getpid(), "mine": token})
    with open(f"{folder}/begun-{rank}") as file:  # noqa: PTH123
        return 1 + next(place for place, line in enumerate(file) if token in line)


def _note(path, record):
    with open(path, "a") as file:  # noqa: PTH123
        file.write(json.dumps(record) + "\n")


def _grandchild(
    trouble,
    loaded,
    stage,
    folder,
):
    toy._grandchild({"pid_file": f"{folder}/grandchild"}, loaded, stage)
    _end(trouble.get("then"))


def _end(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raises":
        raise RuntimeError("the probe left a grandchild behind")
    elif how == "exits":
        os._exit(1)


def _hang_in_python(
    trouble,
    loaded,
    stage,
    folder,
):
    toy._spin({}, loaded, stage)


def _hang_in_c(
    trouble,
    loaded,
    stage,
    folder,
):
    """A native call that never gives the interpreter's lock back: no Python code of this process
    runs any more.
    """
    ctypes.PyDLL(None).sleep(600)


def _hang_in_a_collective(
    trouble,
    loaded,
    stage,
    folder,
):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if stage.rank == 1:
        time.sleep(600)  # it never joins
    dist.all_reduce(torch.ones(4))


def _flood(
    trouble,
    loaded,
    stage,
    folder,
):
    toy._print({"mib": trouble["mib"]}, loaded, stage)


def _write_on_the_wire(
    trouble,
    loaded,
    stage,
    folder,
):
    content = bytes.fromhex(trouble["words"])
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                os.write(int(entry), content)
        except OSError:
            continue
    _end(trouble.get("then"))


def _answer_nonsense(
    trouble,
    loaded,
    stage,
    folder,
):
    """An answer to this very question whose body is not what was agreed."""
    stage.emit({"event": "measured", "result": trouble["result"]})


def _eat_memory(
    trouble,
    loaded,
    stage,
    folder,
):
    (toy._share if trouble["shared"] else toy._hold)({"mib": trouble["mib"]}, loaded, stage)


def _exit_without_result(
    trouble,
    loaded,
    stage,
    folder,
):
    os._exit(0)


def _fill_the_disk(
    trouble,
    loaded,
    stage,
    folder,
):
    checkpoint = os.path.join(os.environ["TMPDIR"], "checkpoint")  # noqa: PTH118
    with open(checkpoint, "wb") as file:  # noqa: PTH123
        while True:
            file.write(b"x" * MIB)
            file.flush()


def _sleep(
    trouble,
    loaded,
    stage,
    folder,
):
    time.sleep(trouble["seconds"])


_TROUBLES = {
    "grandchild": _grandchild,
    "hang in Python": _hang_in_python,
    "hang in C": _hang_in_c,
    "hang in a collective": _hang_in_a_collective,
    "flood": _flood,
    "wire": _write_on_the_wire,
    "nonsense": _answer_nonsense,
    "memory": _eat_memory,
    "exit 0": _exit_without_result,
    "disk": _fill_the_disk,
    "sleep": _sleep,
}
