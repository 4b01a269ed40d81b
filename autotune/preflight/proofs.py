"""Stored proofs of earlier preflights, valid for the same configuration, environment, GPUs and
other processes.

Key of a proof: hash of the probe's inputs (the framework's own requests) and of the circumstances
(versions, device, driver, model config, limit). Memory held by other processes is checked each
time.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
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
from autotune.prediction.guarded_runs import refusal_of, refused_trial
from autotune.probe.device_report import held_by_others
from autotune.search.record import Store, circumstances, files_named, strings_in

SCHEMA = 1
PROOFS = "proofs"
LENGTHS_FOLDER = "lengths"

PROOF = ProbePlan(
    optimizer_steps=3,
    warmup_cycles=1,
    timed_cycles=2,
    save_checkpoint=True,
    evaluate=True,
    deadline_seconds=1800.0,
)
"""Shortest probe that covers all items of a certificate."""

MAX_COMPARED = 50  # earlier proofs that are compared to name the changes
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
        self,
        job: Job,
        trainer: Trainer,
        candidate: Candidate,
        versions: Mapping[str, str],
    ) -> None:
        self._job, self._store = job, Store()
        self._candidate, self._versions = candidate, versions
        self.facts = facts_of(job, trainer, candidate, versions)
        self.key = fingerprint({"schema": SCHEMA, "facts": self.facts})

    def find(self) -> Proof | str:
        """Return the proof of this configuration if it is still valid, else the reason that
        there is none.
        """
        if self._job.fresh:
            return "--fresh measures again"
        refusal = refusal_of(self._job, self._candidate, self._versions)
        if refusal is not None:
            return Proof(
                schema=SCHEMA,
                when=refusal.when,
                where=refusal.host,
                facts=self.facts,
                trial=refused_trial(refusal, self._candidate),
                certificate=None,
            )
        proof = self._store.kept(PROOFS, self.key, Proof)
        if proof is None or proof.schema != SCHEMA:
            return self._what_changed()
        return neighbours_changed(self._job, proof.trial) or proof

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
        facts = _flattened(self.facts)
        changes = []
        for proof in self._store.newest(PROOFS, Proof, MAX_COMPARED):
            changes.append(_difference(_flattened(proof.facts), facts))
        nearest = min(changes, key=len, default=[])
        if not nearest:
            return "nothing like it was measured here before"
        listed = ", ".join(nearest[:MAX_NAMED])
        if len(nearest) > MAX_NAMED:
            listed += f" and {len(nearest) - MAX_NAMED} more"
        return f"{listed} changed since the nearest proof"


def decided(trial: Trial) -> bool | None:
    """Return True or False for fits; None if the trial ended for another reason than memory."""
    outcome = trial.measurement.outcome
    verdict = trial.verdict
    if verdict.fits or outcome.is_out_of_memory:
        return verdict.fits
    if outcome is Outcome.OK and verdict.margin_bytes is not None:
        return False
    return None


def facts_of(
    job: Job,
    trainer: Trainer,
    candidate: Candidate,
    versions: Mapping[str, str],
) -> dict[str, object]:
    """Return all inputs of the measurement; of a dataset only the longest prompt matters."""
    # 1. The requests of the probe. Config, weights and data of the model are separate facts.
    task = job.task
    load = dict(trainer.load_request(candidate, task))
    model = load.get("model")
    if isinstance(model, Mapping):
        load["model"] = _without(model, "name", "folder")
    probe = _without(trainer.probe_request(candidate, task, PROOF), "dataset")

    # 2. Circumstances, and the files that the configuration names.
    settings = _without(task.workload.user_settings, "model_name_or_path", "output_dir")
    settings = {name: value for name, value in settings.items() if not name.startswith("dataset")}
    shared = _without(circumstances(job, versions).facts, "files")
    return {**shared, "files": files_named(*strings_in(settings)), "load": load, "probe": probe}


def _without(mapping: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in mapping.items() if name not in names}


def neighbours_changed(job: Job, earlier: Trial) -> str | None:
    """Return why other processes invalidate a proof; None: unchanged memory."""
    memory = earlier.measurement.memory
    hardware = job.task.hardware
    if hardware.kind == "cpu":
        return _host_memory_lacks(memory.peak_bytes)
    held_now = held_by_others(hardware, job.memory_limit_bytes)
    held_then = tuple(device.others_bytes for device in memory.devices)
    if held_now is None or not held_then or None in held_then:
        return "other users of these GPUs are unknown"
    for index, (now, then) in enumerate(zip(held_now, held_then, strict=False)):
        if then is None or abs(now - then) > MIN_REPORTED_BYTES:
            return (
                f"others hold {format_bytes(now)} of GPU {index} now, and held"
                f" {format_bytes(then or 0)} when it was measured"
            )
    if len(held_now) != len(held_then):
        return "the number of GPUs changed"
    return None


def _host_memory_lacks(peak_bytes: int | None) -> str | None:
    """Return what others leave of this machine's memory; None: enough for this peak."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if peak_bytes is not None and free >= peak_bytes:
        return None
    return (
        f"others leave {format_bytes(free)} of this machine's memory, and"
        f" {format_bytes(peak_bytes or 0)} were needed"
    )


def longest_prompt(
    job: Job,
    trainer: Trainer,
    versions: Mapping[str, str],
) -> int:
    """Return the longest prompt of the dataset in tokens, cached per state of its files."""
    # 1. From the cache.
    store = Store()
    key = _lengths_key(job, versions)
    if key is not None and not job.fresh:
        cached = store.kept(LENGTHS_FOLDER, key, dict[str, int])
        if cached is not None and cached.get("schema") == SCHEMA and "tokens" in cached:
            return cached["tokens"]

    # 2. Measured.
    way_out = "Say how long prompts get: --max-prompt-length 512"
    try:
        lengths = trainer.prompt_lengths(job.task)
    except BadInput as error:
        raise BadInput(
            f"The longest prompt of the training data isn't known. {error.what}", way_out=way_out
        ) from error
    if lengths is None:
        raise BadInput(
            "The longest prompt of the training data isn't known: the configuration names no"
            " dataset.",
            way_out=way_out,
        )
    tokens = lengths.percentiles[100]
    if key is not None:
        store.keep(LENGTHS_FOLDER, key, {"schema": SCHEMA, "tokens": tokens})
    return tokens


def _lengths_key(job: Job, versions: Mapping[str, str]) -> str | None:
    """Return the cache key; None if changes of the data cannot be detected."""
    workload = job.task.workload
    data = [stamp(name, repository="datasets") for name in _datasets(job)]
    tokenizer = None
    if workload.model.folder is not None:
        tokenizer = stamp(str(workload.model.folder))
    if not data or None in data or tokenizer is None:
        return None
    held_values = {}
    for name in workload.held_values:
        if name in ("model_revision", "trust_remote_code"):
            held_values[name] = workload.held_values[name]
    return fingerprint(
        {
            "schema": SCHEMA,
            "data": data,
            "tokenizer": tokenizer,
            "named": {**dict(workload.user_settings), "dataset": workload.dataset},
            "held": held_values,
            "versions": dict(versions),
        }
    )


def _datasets(job: Job) -> list[str]:
    """Return the names of the datasets, as the framework loads them."""
    workload = job.task.workload
    if workload.dataset is not None:
        return [workload.dataset]
    names = [workload.user_settings.get("dataset_name")]
    mixture = workload.user_settings.get("datasets")
    if not isinstance(mixture, list):
        mixture = []
    for part in mixture:
        if isinstance(part, Mapping):
            names += [part.get("path"), *strings_in(part.get("data_files"))]
    return [name for name in names if isinstance(name, str)]


def _flattened(value: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by dotted name, as text."""
    if not isinstance(value, Mapping):
        return {prefix: str(value)}
    leaves: dict[str, object] = {}
    for key, part in value.items():
        leaves.update(_flattened(part, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return differences like `versions.torch (2.8.0, now 2.9.0)`, in the order of the facts."""
    differences = []
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            differences.append(f"{name} ({_short(before.get(name))}, now {_short(now.get(name))})")
    return differences


def _short(value: object) -> str:
    if value is None:
        return "not set"
    text = str(value)
    if len(text) > 40:
        text = f"{text[:37]}..."
    return text
