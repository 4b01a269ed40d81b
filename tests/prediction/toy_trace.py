"""Toy trace adapter: returns a trace built from its specification, or misbehaves as requested."""

import os
import signal
import sys
import time


class Untraceable(RuntimeError):
    pass


def warm(load_hint):
    if os.environ.get("TOY_WARM_FAILS"):
        raise ImportError("No module named 'framework'")
    return {}


def load(request, stage):
    return {}


def measure(
    loaded,
    specification,
    stage,
):
    do = specification.get("do", "answer")
    if do == "kill":
        print("last output before the signal", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "hang":
        print("hanging now", flush=True)
        time.sleep(600)
    if do == "untraceable":
        try:
            raise Untraceable("custom::op cannot be traced without data")
        except Untraceable as error:
            raise RuntimeError("the step failed") from error
    if do == "raise":
        raise ValueError("no such setting")
    if do == "nonsense":
        return {"schema": 1}
    numbers = range(1, specification.get("allocations", 3) + 1)
    sizes = list(numbers)
    return {
        "schema": 1,
        "basis": "traced",
        "versions": {"toy": "1"},
        "device": specification.get("device", "cpu"),
        "layers": 1,
        "sizes": sizes,
        "parts": [0] * len(sizes),
        "part_names": ["weights"],
        "events": [*numbers, *(-number for number in numbers)],
        "marks": [{"event": 0, "phase": "load", "step": 0, "layer": None}],
        "work": [],
        "inventory": {
            "parameters": 1,
            "trainable_parameters": 1,
            "weight_bytes": 4,
            "trainable_bytes": 4,
            "layer_bytes": [4],
            "layer_trainable": [1],
            "largest_parameter": 1,
        },
        "effective": {"pid": os.getpid(), "environment": dict(os.environ)},
    }


def release(loaded):
    pass
