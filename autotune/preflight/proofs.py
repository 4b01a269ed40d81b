"""Stored proofs of earlier preflights, valid for the same configuration, environment, GPUs and
other processes.

Key of a proof: hash of the probe's inputs (the framework's own requests) and of the circumstances
(versions, device, driver, model config, limit). Memory held by other processes is checked each
time.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.core.answer import Trial
from autotune.core.errors import BadInput
from autotune.core.job import Job
from autotune.core.measurement import Outcome, ProbePlan
from autotune.core.space import Candidate, fingerprint
from autotune.core.units import format_bytes
from autotune.frameworks.base import Trainer
from autotune.machine.local_files import stamp
from autotune.machine.nvml import MIN_REPORTED_BYTES
from autotune.probe.device_report import held_by_others
from autotune.search.record import Store, circumstances, files_named, strings_in

SCHEMA = 1
PROOFS, LENGTHS = "proofs", "lengths"

PROOF = ProbePlan(
    optimizer_steps=3,
    warmup_cycles=1,
    timed_cycles=2,
    save_checkpoint=True,
    evaluate=True,
    deadline_seconds=1800.0,
)
"""Shortest probe that covers all items of a certificate."""

MAX_COMPARED = 50  # Earlier proofs that are compared to name the changes
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Worst-case measurement of one configuration."""

    schema: int
    when: str
    where: str  # host name
    facts: Mapping[str, object]
    trial: Trial
    certificate: Mapping[str, object] | None  # as in `recommendation.json`


class Proofs:
    """Record of proofs for one configuration under the present circumstances."""

    def __init__(
        self, job: Job, trainer: Trainer, candidate: Candidate, versions: Mapping[str, str]
    ) -> None:
        self._job, self._store = job, Store()
        self.facts = facts_of(job, trainer, candidate, versions)
        self.key = fingerprint({"schema": SCHEMA, "facts": self.facts})

    def find(self) -> Proof | str:
        """Return the proof of this configuration if it is still valid, else the reason that
        there is none.
        """
        if self._job.fresh:
            return "--fresh measures again"
        known = self._store.kept(PROOFS, self.key, Proof)
        if known is None or known.schema != SCHEMA:
            return self._what_changed()
        return neighbours_changed(self._job, known.trial) or known

    def keep(self, trial: Trial, certificate: Mapping[str, object] | None) -> Proof:
        """Store the proof. Outcomes other than fitting or running out of memory are not stored."""
        proof = Proof(
            schema=SCHEMA,
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            where=platform.node(),
            facts=self.facts,
            trial=trial,
            certificate=certificate,
        )
        if decided(trial) is not None:
            self._store.keep(PROOFS, self.key, proof)
        return proof

    def _what_changed(self) -> str:
        """Name the differences from the nearest stored proof."""
        here = dict(_flat(self.facts))
        changes = [
            _difference(dict(_flat(one.facts)), here)
            for one in self._store.newest(PROOFS, Proof, MAX_COMPARED)
        ]
        nearest = min(changes, key=len, default=[])
        if not nearest:
            return "nothing like it was measured here before"
        more = f" and {len(nearest) - MAX_NAMED} more" if len(nearest) > MAX_NAMED else ""
        return (
            f"since the nearest that was measured here, {', '.join(nearest[:MAX_NAMED])}{more}"
            " changed"
        )


def decided(trial: Trial) -> bool | None:
    """Return True or False for fits; None if the trial ended for another reason than memory."""
    outcome, verdict = trial.measurement.outcome, trial.verdict
    if verdict.fits or outcome.is_out_of_memory:
        return verdict.fits
    return False if outcome is Outcome.OK and verdict.margin_bytes is not None else None


def facts_of(
    job: Job, trainer: Trainer, candidate: Candidate, versions: Mapping[str, str]
) -> dict[str, object]:
    """Return all inputs of the measurement; of a dataset only the longest prompt matters."""
    task = job.task
    load = dict(trainer.load_request(candidate, task))
    if isinstance(model := load.get("model"), Mapping):
        # Config and weights are separate facts; the path is irrelevant.
        load["model"] = {
            name: value for name, value in model.items() if name not in ("name", "folder")
        }
    probe = {
        name: value
        for name, value in trainer.probe_request(candidate, task, PROOF).items()
        if name != "dataset"
    }
    settings = {
        name: value
        for name, value in task.workload.user_settings.items()
        if not name.startswith("dataset")
        and name not in ("model_name_or_path", "output_dir")  # data and model: separate facts
    }
    shared = {
        name: value for name, value in circumstances(job, versions).facts.items() if name != "files"
    }
    return {**shared, "files": files_named(*strings_in(settings)), "load": load, "probe": probe}


def neighbours_changed(job: Job, then: Trial) -> str | None:
    """Return why other processes invalidate a proof; None: unchanged memory."""
    memory, hardware = then.measurement.memory, job.task.hardware
    if hardware.kind == "cpu":
        import psutil

        free, peak_bytes = int(psutil.virtual_memory().available), memory.peak_bytes
        if peak_bytes is not None and free >= peak_bytes:
            return None
        return (
            f"others leave {format_bytes(free)} of this machine's memory, and"
            f" {format_bytes(peak_bytes or 0)} were needed"
        )
    now = held_by_others(hardware, job.memory_limit_bytes)
    before = tuple(device.others_bytes for device in memory.devices)
    if now is None or not before or None in before:
        return "other users of these GPUs are unknown"
    for index, (held, was) in enumerate(zip(now, before, strict=False)):
        if was is None or abs(held - was) > MIN_REPORTED_BYTES:
            return (
                f"others hold {format_bytes(held)} of GPU {index} now, and held"
                f" {format_bytes(was or 0)} when it was measured"
            )
    return None if len(now) == len(before) else "the number of GPUs changed"


def longest_prompt(job: Job, trainer: Trainer, versions: Mapping[str, str]) -> int:
    """Return the longest prompt of the dataset in tokens, cached per state of its files."""
    store, key = Store(), _lengths_key(job, versions)
    known = None if key is None or job.fresh else store.kept(LENGTHS, key, dict[str, int])
    if known is not None and known.get("schema") == SCHEMA and "tokens" in known:
        return known["tokens"]
    way_out = "Say how long prompts get: --max-prompt-length 512"
    try:
        found = trainer.prompt_lengths(job.task)
    except BadInput as error:
        raise BadInput(
            f"The longest prompt of the training data isn't known. {error.what}", way_out=way_out
        ) from error
    if found is None:
        raise BadInput(
            "The longest prompt of the training data isn't known: the configuration names no"
            " dataset.",
            way_out=way_out,
        )
    tokens = found.percentiles[100]
    if key is not None:
        store.keep(LENGTHS, key, {"schema": SCHEMA, "tokens": tokens})
    return tokens


def _lengths_key(job: Job, versions: Mapping[str, str]) -> str | None:
    """Return the cache key; None if changes of the data cannot be detected."""
    workload = job.task.workload
    data = [stamp(name, repository="datasets") for name in _datasets(job)]
    tokenizer = stamp(str(workload.model.folder)) if workload.model.folder is not None else None
    if not data or None in data or tokenizer is None:
        return None
    return fingerprint(
        {
            "schema": SCHEMA,
            "data": data,
            "tokenizer": tokenizer,
            "named": {**dict(workload.user_settings), "dataset": workload.dataset},
            "held": {
                name: value
                for name, value in workload.held.items()
                if name in ("model_revision", "trust_remote_code")
            },
            "versions": dict(versions),
        }
    )


def _datasets(job: Job) -> list[str]:
    """Return the names of the datasets, as the framework loads them."""
    workload = job.task.workload
    if workload.dataset is not None:
        return [workload.dataset]
    parts = workload.user_settings.get("datasets")
    mixed = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    named = [
        name for part in mixed for name in (part.get("path"), *strings_in(part.get("data_files")))
    ]
    return [
        name
        for name in (workload.user_settings.get("dataset_name"), *named)
        if isinstance(name, str)
    ]


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return differences like `versions.torch (2.8.0, now 2.9.0)`, in the order of the facts."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return [f"{name} ({_short(before.get(name))}, now {_short(now.get(name))})" for name in names]


def _short(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
