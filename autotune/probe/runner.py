"""Probe runner: the ranks of one load_key under a worker, measured candidate after candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from autotune.core.errors import ProbeError
from autotune.core.measurement import (
    Cost,
    DeviceMemory,
    Measurement,
    Memory,
    MemorySample,
    Outcome,
    ProbePlan,
)
from autotune.core.space import Candidate
from autotune.probe import assembly, device_report
from autotune.probe.assembly import Peaks, worst
from autotune.probe.command_exchange import CommandExchange
from autotune.probe.command_reply import CommandReply, results_by_rank, results_of
from autotune.probe.message_validation import RankResult
from autotune.probe.process_meter import concatenated
from autotune.probe.root_failure import KernelReport, end_of, failure_of
from autotune.probe.worker_process import WorkerProcess
from autotune.worker import protocol
from autotune.worker.protocol import Message

# Share of the limit beyond which a lost process counts as out of memory for any signal.
FULL_SHARE = 0.97


@dataclass(frozen=True, kw_only=True)
class RequestBuilders:
    """Functions of a trainer that build the requests to its worker."""

    load: Callable[[Candidate], Mapping[str, object]]
    probe: Callable[[Candidate, ProbePlan], Mapping[str, object]]


class ProcessRunner:
    """Loads at its first measurement, and again after a loss of ranks; the imports stay."""

    def __init__(
        self,
        *,
        load_key: str,
        worker: WorkerProcess,
        ranks: int,
        requests: RequestBuilders,
    ) -> None:
        self.load_key = load_key
        self.worker = worker
        self.ranks = ranks
        self.requests = requests
        self.load_peaks = Peaks(peak_bytes=None, phase_peak_bytes={})
        self.load_devices: tuple[DeviceMemory, ...] = ()

        self.generation: int | None = None
        """The worker's generation in which the model was loaded; None: not loaded."""

    @property
    def loaded(self) -> bool:
        return self.worker.alive and self.generation == self.worker.generation

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise ProbeError(
                f"Candidate {candidate.id} needs load {candidate.load_key}; this runner has"
                f" {self.load_key}."
            )
        try:
            return _Probe(self, candidate, plan).run()
        except Exception:
            self.close()
            raise
        except BaseException:  # interrupted: `close` would wait for a worker that may be importing
            self.worker.end()
            raise

    def close(self) -> None:
        if self.generation is not None:
            self.generation = None
            self.worker.unload()


class _Probe:
    """One candidate: a load where nothing is loaded, then its measurement."""

    def __init__(
        self,
        runner: ProcessRunner,
        candidate: Candidate,
        plan: ProbePlan,
    ) -> None:
        self._runner = runner
        self._worker = runner.worker
        self._candidate = candidate
        self._plan = plan
        self._started = time.monotonic()
        deadline = self._started + plan.deadline_seconds
        self._commands = CommandExchange(runner.worker, runner.ranks, deadline)
        self._load_seconds = 0.0
        self._load_timeline: tuple[MemorySample, ...] = ()
        self._output_mark = 0

    def run(self) -> Measurement:
        reply = self._exchange()
        if reply.gone_before:  # exited between two commands: no evidence about this candidate
            self._runner.close()
            reply = self._exchange()
        if not reply.ended_well:
            return self._failed(reply)
        results = results_of(reply)
        self._check_world(results)
        if not all(message.get("stays", True) for message in reply.results.values()):
            # A rank that could not free its memory would distort the next measurement.
            self._runner.close()
        return replace(
            self._facts(reply, Outcome.OK),
            worst=assembly.merge_speeds([result.worst for result in results]),
            typical=assembly.merge_speeds([result.typical for result in results]),
        )

    def _check_world(self, results: Sequence[RankResult]) -> None:
        """Raise ProbeError if the trainer had another number of ranks than were started."""
        sizes = {result.world_size for result in results if result.world_size is not None}
        span = self._worker.span
        world = self._runner.ranks if span is None else span.world
        if sizes - {world} or len(results) != self._runner.ranks:
            raise ProbeError(
                f"The trainer ran with a world size of {sorted(map(str, sizes))}, but {world} ranks"
                " were started: the measurement is of another job."
            )

    def _exchange(self) -> CommandReply:
        """Load if nothing is loaded, then measure. Returns the reply to a failed load."""
        worker = self._worker
        runner = self._runner
        worker.start()
        self._output_mark = worker.mark_output()
        if not runner.loaded:
            worker.settle_gpus()
            request = {"scratch": worker.scratch, **runner.requests.load(self._candidate)}
            self._begin_command()
            reply = self._load(request)
            worker.check_gpus()
            self._load_seconds = time.monotonic() - self._started
            if not reply.ended_well:
                return reply
            self._load_timeline = worker.timeline()
            runner.generation = worker.generation
            runner.load_peaks = self._tree_peaks(reply)
            runner.load_devices = self._devices(reply)
        self._begin_command()
        request = dict(runner.requests.probe(self._candidate, self._plan))
        reply = self._commands.send({"do": protocol.MEASURE, "request": request}, protocol.MEASURED)
        worker.check_gpus()
        return reply

    def _begin_command(self) -> None:
        if not self._runner.loaded:
            self._worker.loads += 1
        self._worker.mark()
        self._worker.limit.reset()
        self._kills_before = self._worker.limit.oom_kills()

    def _load(self, request: Message) -> CommandReply:
        if not self._worker.warm:
            # First, so that the memory of the imports is known when the rest is divided among
            # ranks.
            imported = self._commands.send(
                {"do": protocol.WARM, "load": request},
                protocol.READY,
                first_phase="load",
                replies=1,
            )
            if not imported.ended_well:
                return imported
        command: dict[str, object] = {
            "do": protocol.LOAD,
            "ranks": self._runner.ranks,
            "load": request,
        }
        if self._worker.span is not None:
            command["span"] = asdict(self._worker.span)
        return self._commands.send(command, protocol.LOADED, first_phase="load")

    def _failed(self, reply: CommandReply) -> Measurement:
        worker = self._worker
        # 1. Faults of the machine, which carry no evidence about the candidate.
        kernel = self._kernel_report()
        if reply.worker_lost and not kernel.out_of_memory:
            worker.end()
            last_line = reply.printed.strip().rpartition("\n")[2][-500:]
            raise ProbeError(
                "The probe's worker process exited during a measurement:"
                f" {last_line or 'it printed nothing'}"
            )

        # 2. The cause. Processes present before the probe, such as the ballast, are accounted
        #    for: torch's list of them in an error would be mistaken for a cause.
        if worker.gpus is not None:
            reply = replace(
                reply,
                failures=device_report.without_neighbours(reply.failures),
                printed=device_report.without_neighbours(reply.printed),
            )
        outcome, failure = failure_of(
            reply, kernel, worker.settings.device_kind, self._plan.deadline_seconds
        )
        if outcome.is_out_of_memory and outcome is not Outcome.OOM_HOST:
            self._check_others()

        # 3. The measurement, then the next state: a single rank that freed its memory stays.
        measurement = replace(self._facts(reply, outcome), failure=failure)
        if reply.worker_lost:
            worker.end()
        if failure.cause == "cuda_fault" or not self._stays_loaded(reply):
            self._runner.generation = None
            worker.unload()
        return measurement

    def _kernel_report(self) -> KernelReport:
        worker = self._worker
        tree = self._worker.meter
        full_bytes = FULL_SHARE * worker.settings.limit_bytes
        return KernelReport(
            out_of_memory=worker.limit.oom_kills() > self._kills_before or tree.went_over,
            own_limit=tree.went_over or worker.limit.at_limit(),
            full=not worker.on_gpus and tree.peak_bytes >= full_bytes,
            host_short=worker.on_gpus and worker.host.was_short(tree.peak_bytes),
            mostly_own=worker.filled_the_machine(),
        )

    def _check_others(self) -> None:
        """Raise ProbeError if others took the GPUs' memory while the probe ran."""
        gpus = self._worker.gpus
        meter = self._worker.device_meter
        if gpus is None or meter is None:
            return
        reason = device_report.taken_meanwhile(gpus, meter.peaks())
        if reason is not None:
            raise ProbeError(reason)

    def _stays_loaded(self, reply: CommandReply) -> bool:
        if not self._runner.loaded or self._runner.ranks != 1 or not reply.failures:
            return False
        return all(message.get("stays", False) for message in reply.failures)

    def _facts(self, reply: CommandReply, outcome: Outcome) -> Measurement:
        # 1. Over all ranks: the highest memory, the longest stages.
        worker = self._worker
        results = results_of(reply)
        devices = device_report.higher_of_each(self._runner.load_devices, self._devices(reply))
        peaks = self._with_load(reply, devices)
        seconds = time.monotonic() - self._started
        first = results[0] if results else RankResult()
        reason = None
        setup_seconds = loop_seconds = 0.0
        for result in results:
            reason = reason or result.torch_reserved_why
            setup_seconds = max(setup_seconds, result.setup_seconds or 0.0)
            loop_seconds = max(loop_seconds, result.loop_seconds or 0.0)

        # 2. Memory and cost.
        memory = Memory(
            peak_bytes=peaks.peak_bytes,
            limit_bytes=worker.effective_limit_bytes,
            bound_by=worker.bound_by,
            phase_peak_bytes=peaks.phase_peak_bytes,
            devices=devices,
            torch_by_phase=device_report.torch_by_phase(results),
            torch_allocated_bytes=worst(results, "torch_allocated_bytes"),
            torch_reserved_bytes=worst(results, "torch_reserved_bytes"),
            torch_reserved_why=reason or None,
            allocation_retries=worst(results, "allocation_retries"),
            allocation_failures=worst(results, "allocation_failures"),
            models=assembly.models_of(results_by_rank(reply)),
            lowest_peak_bytes=assembly.lowest_peak(peaks.peak_bytes, results),
            timeline=concatenated(self._load_timeline, worker.timeline(), self._load_seconds),
        )
        cost = Cost(
            total_seconds=seconds,
            device_seconds=None if worker.gpus is None else seconds * len(worker.gpus.slots),
            load_seconds=self._load_seconds,
            setup_seconds=setup_seconds,
            loop_seconds=loop_seconds,
        )

        # 3. With what the first rank ran.
        return Measurement(
            candidate_id=self._candidate.id,
            outcome=outcome,
            memory=memory,
            cost=cost,
            optimizer_steps=first.optimizer_steps or 0,
            exercised=assembly.activity_of(results),
            effective=first.effective or {},
            versions=dict(worker.versions),
            printed=end_of(worker.printed_since(self._output_mark)),
            caveats=self._caveats(),
        )

    def _caveats(self) -> tuple[str, ...]:
        caveats: list[str] = []
        if self._worker.gpus is not None:
            caveats += device_report.caveats(self._worker.gpus)
        if self._worker.afresh is not None:
            caveats.append(
                "each load includes the imports, because ranks cannot be forked after them:"
                f" {self._worker.afresh}"
            )
        return tuple(caveats)

    def _with_load(self, reply: CommandReply, devices: tuple[DeviceMemory, ...]) -> Peaks:
        """Include the load's peaks, also for later candidates of the runner: a real run loads
        too.
        """
        if self._worker.gpus is not None:
            return Peaks(
                peak_bytes=device_report.worst_peak(devices),
                phase_peak_bytes=device_report.worst_phases(devices),
            )
        peaks = self._tree_peaks(reply)
        load = self._runner.load_peaks
        return Peaks(
            peak_bytes=max(peaks.peak_bytes or 0, load.peak_bytes or 0) or None,
            phase_peak_bytes={**load.phase_peak_bytes, **peaks.phase_peak_bytes},
        )

    def _tree_peaks(self, reply: CommandReply) -> Peaks:
        meter = self._worker.meter
        limit = self._worker.limit
        return assembly.tree_peaks(
            reply, meter.peak_bytes, meter.phase_peak_bytes, limit.ceiling_bytes()
        )

    def _devices(self, reply: CommandReply) -> tuple[DeviceMemory, ...]:
        gpus = self._worker.gpus
        meter = self._worker.device_meter
        if gpus is None:
            return ()
        first = 0 if self._worker.span is None else self._worker.span.first
        by_rank = {number - first: result for number, result in results_by_rank(reply).items()}
        mismatch = device_report.on_another_device(gpus, by_rank)
        if mismatch is not None:
            raise ProbeError(mismatch)
        return device_report.device_memories(gpus, meter.peaks() if meter else {}, by_rank)
