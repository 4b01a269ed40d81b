"""Executor on emulated GPUs of this machine: probes of the installed framework, memory emulated.

The time of a probe means nothing there, so a probe times one cycle and is never stopped for its
speed. The search puts the predicted speed in the place of the timed one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

from autotune.core.job import Hardware
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.emulator import launch
from autotune.emulator.build import build, look
from autotune.emulator.cards import emulated_machine
from autotune.emulator.reports import LIMITATIONS, RunReport
from autotune.machine.nvml import VISIBLE
from autotune.probe.ballast import Ballast
from autotune.probe.executors.base import ProbeRunner
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.executors.local_places import SlotPlace
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings

DEFAULT_ROLLOUT_STRIDE = 16  # Tokens of a rollout for which a decoded one stands
SPEED_AND_ROLLOUTS = (
    f"Speeds are predicted, not emulated. Rollouts decoded one token of {DEFAULT_ROLLOUT_STRIDE};"
    " completions have their full length."
)

# Cycles of an emulated probe: the second one has the memory of all later ones.
WARMUP_CYCLES = 1
TIMED_CYCLES = 1


class EmulatedExecutor(LocalExecutor):
    """Local slot whose processes see the emulated GPUs and no others."""

    def __init__(
        self,
        settings: RunnerSettings,
        requests: RequestBuilders,
        *,
        hardware: Hardware,
        saves: bool = False,
        stride: int = DEFAULT_ROLLOUT_STRIDE,
        lag: int = 0,
        phases: bool = False,
    ) -> None:
        """`saves`: a confirmation writes its checkpoint; that of a whole model would take as
        much disk as the real one. `lag`: see `EmulatedMachine`. `phases`: the driver's own peak
        of each phase is kept too.
        """
        built = build(look(settings.python))
        machine = emulated_machine(f"{hardware.count}x{hardware.name}", lag=lag)
        folder = Path(tempfile.mkdtemp(prefix="autotune-emulated-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._stand = launch.set_up(machine, built, folder)
        self._saves = saves
        visible = ",".join(map(str, range(hardware.count)))
        environment = self._stand.environment(os.environ, phases=phases, stride=stride)
        variables = {VISIBLE: visible}
        for name, value in environment.items():
            if name != VISIBLE and os.environ.get(name) != value:
                variables[name] = value
        open_gpus = partial(
            Gpus,
            hardware.count,
            settings.limit_bytes,
            settings.python,
            library=self._stand.nvml(),
            variable=visible,
            make_ballast=partial(Ballast, variables=variables),
        )
        super().__init__(
            replace(settings, variables=variables),
            requests,
            places=(SlotPlace(label=str(hardware), visible=visible),),
            open_gpus=open_gpus,
        )

    def open(self, candidate: Candidate, slot: int = 0) -> ProbeRunner:
        return _EmulatedRunner(super().open(candidate, slot), self)

    def plan(self, plan: ProbePlan) -> ProbePlan:
        """Return the plan without what only the clock needs."""
        return replace(
            plan,
            warmup_cycles=WARMUP_CYCLES,
            timed_cycles=TIMED_CYCLES,
            stop_below_tokens_per_second=None,
            save_checkpoint=plan.save_checkpoint and self._saves,
        )

    def take_report(self) -> RunReport:
        """Return the driver's own figures of all processes since the last call."""
        report = self._stand.report()
        for path in self._stand.reports.iterdir():
            path.unlink(missing_ok=True)
        return report

    def marked(self, measurement: Measurement) -> Measurement:
        """Return the measurement as an emulated one, with reasons for doubt."""
        doubts = (*self._stand.report().sentences(), SPEED_AND_ROLLOUTS, LIMITATIONS)
        return replace(measurement, emulated=True, caveats=(*measurement.caveats, *doubts))


class _EmulatedRunner:
    def __init__(self, runner: ProbeRunner, executor: EmulatedExecutor) -> None:
        self.load_key = runner.load_key
        self._runner = runner
        self._executor = executor

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        return self._executor.marked(self._runner.measure(candidate, self._executor.plan(plan)))

    def close(self) -> None:
        self._runner.close()
