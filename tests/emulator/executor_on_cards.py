"""Head of programs that measure with a local executor on emulated cards: real workers and ranks,
a toy framework.
"""

from __future__ import annotations

from pathlib import Path

ROOT = str(Path(__file__).parents[2])
ADAPTER = str(Path(__file__).with_name("cards_adapter.py"))

HEAD = f"""
import json, sys, tempfile, threading
from pathlib import Path
from autotune.machine.hardware_detection import hardware
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.executors.local_places import local_places
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings
from autotune.core.space import Candidate
from autotune.core.measurement import ProbePlan

def executor(asked, ranks=1, slots=1):
    here = hardware(asked)
    settings = RunnerSettings(python=Path(sys.executable), adapter={ADAPTER!r}, ranks=ranks,
        device_kind="cuda",
                              limit_bytes=here.memory_bytes, scratch_root=Path(tempfile.mkdtemp()))
    asks = RequestBuilders(load=lambda one: dict(one.settings), probe=lambda one,
        plan: dict(one.settings))
    return LocalExecutor(settings, asks, places=local_places(here, here.memory_bytes, slots))

def measured(running, slot=0, seconds=100, **settings):
    one = Candidate(knobs=settings, settings=settings, load=settings)
    return running.open(one, slot).measure(one, ProbePlan(deadline_seconds=seconds))

def told(found):
    failure = found.failure
    cards = {{device.index: (device.peak_bytes or 0) >> 20 for device in found.memory.devices}}
    return {{
        "outcome": found.outcome,
        "visible": found.effective.get("visible"),
        "count": found.effective.get("count"),
        "cards": cards,
        "failure": failure and failure.evidence,
        "cause": failure and failure.cause,
        "rank": failure and failure.rank,
        "phase": failure and failure.phase,
    }}
"""
