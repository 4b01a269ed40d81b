"""Toy framework for tests: it really allocates, sleeps, crashes and spawns, as its request
defines.
"""

import ctypes
import mmap
import os
import signal
import socket
import stat
import sys
import time

MIB = 2**20
_LEAKED = []


def warm(load_hint):
    time.sleep(load_hint.get("warm_seconds", 0))
    if load_hint.get("warm_fails"):
        raise ImportError("No module named 'framework'")
    if load_hint.get("driver"):
        ctypes.CDLL(load_hint["driver"]).cuInit(0)
    return {"toy": "1.0"}


def load(request, stage):
    loaded = {"kept": [], "held": [], "stage": stage}
    with stage.inside("load"):
        _perform(request.get("script", []), loaded, stage, request)
        loaded["kept"], loaded["held"] = loaded["held"], []
    return loaded


def measure(
    loaded,
    request,
    stage,
):
    started = time.perf_counter()
    _perform(request.get("script", []), loaded, stage, request)
    seconds = time.perf_counter() - started
    tokens = request.get("tokens", 100)
    cycles = request.get("cycles", 2)
    spent = {name: value for name, value in stage.seconds().items() if value}
    return {
        "worst": {
            "completion_tokens": 32,
            "cycle_seconds": [max(seconds, 1e-3)] * cycles,
            "cycle_loss_tokens": [tokens] * cycles,
            "prompt_tokens": 7 * cycles,
            "phase_seconds": spent,
            "user_reward_seconds": 0.0,
            "cut_short": False,
        },
        "typical": None,
        "optimizer_steps": 2,
        "effective": {
            "pid": os.getpid(),
            "tmp": os.environ.get("TMPDIR"),
            "rank": os.environ.get("RANK"),
        },
        "setup_seconds": 0.01,
        "loop_seconds": seconds,
        "world_size": request.get("world_size", stage.world_size),
        "memory": stage.memory(),
    }


def release(loaded):
    loaded["held"].clear()


def _perform(
    script,
    loaded,
    stage,
    request,
):
    for step in script:
        if step.get("rank", stage.rank) == stage.rank:
            _ACTIONS[step["do"]](step, loaded, stage)


def _phase(
    step,
    loaded,
    stage,
):
    while stage.phase is not None:
        stage.leave()
    stage.enter(step["name"])


def _hold(
    step,
    loaded,
    stage,
):
    """Private memory, page by page, as a framework's allocator takes it: RLIMIT_DATA counts it."""
    for _ in range(step["mib"] // step.get("piece", 1)):
        piece = bytearray(step.get("piece", 1) * MIB)
        ctypes.memset((ctypes.c_char * len(piece)).from_buffer(piece), 1, len(piece))
        loaded["held"].append(piece)


def _map(
    step,
    loaded,
    stage,
):
    """Map private memory without touching it: RLIMIT_DATA counts it, the kernel's cgroup does
    not.
    """
    loaded["held"].append(
        mmap.mmap(-1, step["mib"] * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )


def _share(
    step,
    loaded,
    stage,
):
    """Use shared memory, which no rlimit counts: only the cgroup or the meter limits it."""
    area = mmap.mmap(-1, step["mib"] * MIB)
    loaded["held"].append(area)
    for at in range(0, len(area), mmap.PAGESIZE):
        area[at] = 1


def _leak(
    step,
    loaded,
    stage,
):
    _hold(step, loaded, stage)
    _LEAKED.append(list(loaded["held"]))


def _torch(
    step,
    loaded,
    stage,
):
    import torch

    loaded["held"].append(torch.ones(step["mib"] * MIB, dtype=torch.uint8))


def _sleep(
    step,
    loaded,
    stage,
):
    time.sleep(step["seconds"])


def _raise(
    step,
    loaded,
    stage,
):
    raise {"ValueError": ValueError, "RuntimeError": RuntimeError, "SystemExit": SystemExit}[
        step["type"]
    ](step["text"])


def _exit(
    step,
    loaded,
    stage,
):
    os._exit(step["code"])


def _kill(
    step,
    loaded,
    stage,
):
    os.kill(os.getpid(), getattr(signal, step["signal"]))
    time.sleep(5)


def _grandchild(
    step,
    loaded,
    stage,
):
    """Start a daemon in a session of its own, whose parent exits at once: its pid is recorded
    nowhere.
    """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(step["pid_file"], "w") as file:  # noqa: PTH123
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    pid_file = step["pid_file"]
    while not os.path.exists(pid_file) or not os.path.getsize(pid_file):  # noqa: PTH110, PTH202
        time.sleep(0.005)


def _print(
    step,
    loaded,
    stage,
):
    block = b"x" * (MIB - 1) + b"\n"
    for _ in range(step["mib"]):
        os.write(1, block)


def _say(
    step,
    loaded,
    stage,
):
    print(step["text"], file=sys.stderr, flush=True)


def _garble(
    step,
    loaded,
    stage,
):
    """Half a line, nonsense and a list on the rank's own wire."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                os.write(
                    int(entry), b'no json\n[1, 2]\n{"event": "measured", "id": \n{"event": "ph'
                )
        except OSError:
            continue


def _spin(
    step,
    loaded,
    stage,
):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def _spin_for(
    step,
    loaded,
    stage,
):
    """Compute for this many seconds of processor time."""
    until = time.process_time() + step["seconds"]
    while time.process_time() < until:
        pass


def _meet(
    step,
    loaded,
    stage,
):
    """Neither of two ranks goes on before the other has come this far."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if stage.rank == 0:
        with socket.create_server(address) as server:
            server.accept()[0].sendall(b"!")
        return
    for _ in range(3000):
        try:
            with socket.create_connection(address) as connection:
                connection.recv(1)
                return
        except OSError:
            time.sleep(0.01)


def _peer(
    step,
    loaded,
    stage,
):
    """Rank 0 waits for a word of rank 1 that never comes, as in a collective."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if stage.rank == 0:
        with socket.create_server(address) as server:
            connection, _ = server.accept()
            if not connection.recv(1):
                raise RuntimeError(
                    "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345"
                )
    else:
        for _ in range(500):
            try:
                loaded["peer"] = socket.create_connection(address)
                return
            except OSError:
                time.sleep(0.01)


def _write(
    step,
    loaded,
    stage,
):
    """Tokens, one after the other, and many of them."""
    for done in range(1, 1000):
        time.sleep(0.02)
        stage.progress(done, 1000, "token")


def _driver(
    step,
    loaded,
    stage,
):
    """Initialise the GPU, as a framework does first."""
    driver = ctypes.CDLL(step["path"])
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


_ACTIONS = {
    "phase": _phase,
    "hold": _hold,
    "map": _map,
    "share": _share,
    "leak": _leak,
    "torch": _torch,
    "sleep": _sleep,
    "raise": _raise,
    "exit": _exit,
    "kill": _kill,
    "grandchild": _grandchild,
    "print": _print,
    "say": _say,
    "garble": _garble,
    "spin": _spin,
    "spin_for": _spin_for,
    "peer": _peer,
    "meet": _meet,
    "write": _write,
    "driver": _driver,
}
