"""What earlier preflights proved, and whether it still holds: the same configuration, asked to the same environment, on the same
GPUs, with the same neighbours.

A proof is found by a hash of everything that is handed to the probe (the framework's own requests) and of the circumstances
(versions, device and driver, the model's config, the limit). Who else uses the GPUs is looked at anew each time.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.answering.recall import circumstances, files_named, strings_in
from autotune.candidate import Candidate, fingerprint
from autotune.errors import BadInput
from autotune.measurement import Outcome
from autotune.question import Question
from autotune.recommendation import Trial
from autotune.rig.neighbours import WORTH_NAMING_BYTES
from autotune.rig.others import held_by_others
from autotune.stamps import stamp
from autotune.store import Store
from autotune.trainers.base import ProbePlan, PromptLengths, Trainer
from autotune.units import format_bytes

SCHEMA = 1
PROOFS, LENGTHS = "proofs", "lengths"

PROOF = ProbePlan(
    optimizer_steps=3, warmup_cycles=1, timed_cycles=2, save_checkpoint=True, evaluate=True, deadline_seconds=1800.0
)
"""The shortest probe that goes through everything a certificate asks for."""

MOST_COMPARED = 50
"""So many earlier proofs are looked at to say what has changed."""

MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One configuration, measured at its worst case."""

    schema: int
    when: str
    where: str
    """The machine's own name."""

    facts: Mapping[str, object]
    trial: Trial
    certificate: Mapping[str, object] | None
    """Item by item, as `recommendation.json` has it."""


@dataclass(frozen=True, kw_only=True)
class Missed:
    """Nothing on record holds here."""

    why: str


@dataclass(frozen=True, kw_only=True)
class _Longest:
    schema: int
    tokens: int


class Proofs:
    """The record, for one configuration under the present circumstances."""

    def __init__(
        self, question: Question, trainer: Trainer, candidate: Candidate, versions: Mapping[str, str], store: Store | None = None
    ) -> None:
        self._store = Store() if store is None else store
        self._question = question
        self.facts = facts_of(question, trainer, candidate, versions)
        self.key = fingerprint({"schema": SCHEMA, "facts": self.facts})

    def find(self) -> Proof | Missed:
        """What was proven of this very configuration, where it still holds."""
        if self._question.fresh:
            return Missed(why="--fresh measures again")
        known = self._store.kept(PROOFS, self.key, Proof)
        if known is None or known.schema != SCHEMA:
            return Missed(why=self._what_changed())
        why = neighbours_changed(self._question, known.trial)
        return known if why is None else Missed(why=why)

    def keep(self, trial: Trial, certificate: Mapping[str, object] | None) -> Proof:
        """For the next time. Only what the candidate itself decided is kept: whether it fits, or ran out of memory."""
        proof = Proof(
            schema=SCHEMA, when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), where=platform.node(), facts=self.facts,
            trial=trial, certificate=certificate,
        )  # fmt: skip
        if decided(trial) is not None:
            self._store.keep(PROOFS, self.key, proof)
        return proof

    def _what_changed(self) -> str:
        """Against the proof that is nearest to this configuration, what is different."""
        here = dict(_flat(self.facts))
        changes = [_difference(dict(_flat(one.facts)), here) for one in self._store.newest(PROOFS, Proof, MOST_COMPARED)]
        nearest = min(changes, key=len, default=[])
        if not nearest:
            return "nothing like it was measured here before"
        more = f" and {len(nearest) - MOST_NAMED} more" if len(nearest) > MOST_NAMED else ""
        return f"since the nearest that was measured here, {', '.join(nearest[:MOST_NAMED])}{more} changed"


def decided(trial: Trial) -> bool | None:
    """Whether it fits; None where it ended otherwise than well or by running out of memory, which decides nothing."""
    outcome, verdict = trial.measurement.outcome, trial.verdict
    if verdict.fits or outcome.is_out_of_memory:
        return verdict.fits
    return False if outcome is Outcome.OK and verdict.margin_bytes is not None else None


def facts_of(question: Question, trainer: Trainer, candidate: Candidate, versions: Mapping[str, str]) -> dict[str, object]:
    """Everything that decides what the probe would measure. Of a dataset it is the longest prompt, and that is in the request."""
    job = question.job
    load = dict(trainer.load_request(candidate, job))
    if isinstance(
        model := load.get("model"), Mapping
    ):  # its config and its weights are facts of their own; the path says nothing
        load["model"] = {name: value for name, value in model.items() if name not in ("name", "folder")}
    probe = {name: value for name, value in trainer.probe_request(candidate, job, PROOF).items() if name != "dataset"}
    settings = {name: value for name, value in job.workload.user_settings.items() if name not in _data_names(question)}
    shared = {name: value for name, value in circumstances(question, versions).facts.items() if name != "files"}
    return {**shared, "files": files_named(*strings_in(settings)), "load": load, "probe": probe}


def _data_names(question: Question) -> set[str]:
    """Settings that name data or the model, which have facts of their own."""
    named = set(question.job.workload.user_settings)
    return {name for name in named if name.startswith("dataset")} | {"model_name_or_path", "output_dir"}


def neighbours_changed(question: Question, then: Trial) -> str | None:
    """Why a proof of then says nothing about now: others hold more or less of the devices. None where nothing changed."""
    memory, hardware = then.measurement.memory, question.job.hardware
    if hardware.kind == "cpu":
        return _machine_is_fuller(memory.peak_bytes)
    now = held_by_others(hardware, question.memory_limit_bytes)
    before = tuple(device.others_bytes for device in memory.devices)
    if now is None or not before or None in before:
        return "it can't be told who else uses these GPUs"
    for index, (held, was) in enumerate(zip(now, before, strict=False)):
        if was is None or abs(held - was) > WORTH_NAMING_BYTES:
            return f"others hold {format_bytes(held)} of GPU {index} now, and held {format_bytes(was or 0)} when it was measured"
    return None if len(now) == len(before) else "the number of GPUs changed"


def _machine_is_fuller(peak_bytes: int | None) -> str | None:
    import psutil

    free = int(psutil.virtual_memory().available)
    if peak_bytes is not None and free >= peak_bytes:
        return None
    return f"others leave {format_bytes(free)} of this machine's memory, and {format_bytes(peak_bytes or 0)} were needed"


def longest_prompt(question: Question, trainer: Trainer, versions: Mapping[str, str], store: Store | None = None) -> int:
    """Tokens of the longest prompt in the configuration's own dataset, measured once for each state of its files."""
    store = Store() if store is None else store
    key = _lengths_key(question, versions)
    known = None if key is None or question.fresh else store.kept(LENGTHS, key, _Longest)
    if known is not None and known.schema == SCHEMA:
        return known.tokens
    found = trainer.prompt_lengths(question.job)
    if found is None:
        raise BadInput(
            "The longest prompt of the training data isn't known: the configuration names no dataset that can be read here.",
            way_out="Say how long prompts get: --max-prompt-length 512",
        )
    tokens = _longest(found)
    if key is not None:
        store.keep(LENGTHS, key, _Longest(schema=SCHEMA, tokens=tokens))
    return tokens


def _longest(found: PromptLengths) -> int:
    return found.percentiles[100]


def _lengths_key(question: Question, versions: Mapping[str, str]) -> str | None:
    """None where it can't be told whether the data are still the same."""
    workload = question.job.workload
    data = [stamp(name, repository="datasets") for name in _datasets(question)]
    tokenizer = stamp(str(workload.model.folder)) if workload.model.folder is not None else None
    if not data or None in data or tokenizer is None:
        return None
    told = {
        "data": data,
        "tokenizer": tokenizer,
        "named": {**dict(workload.user_settings), "dataset": workload.dataset},
        "held": {name: value for name, value in workload.held.items() if name in ("model_revision", "trust_remote_code")},
        "versions": dict(versions),
    }
    return fingerprint({"schema": SCHEMA, **told})


def _datasets(question: Question) -> list[str]:
    """As the framework would load them: a name each."""
    workload = question.job.workload
    if workload.dataset is not None:
        return [workload.dataset]
    parts = workload.user_settings.get("datasets")
    mixed = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    named = [name for part in mixed for name in (part.get("path"), *strings_in(part.get("data_files")))]
    return [name for name in (workload.user_settings.get("dataset_name"), *named) if isinstance(name, str)]


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)


def _difference(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """`versions.torch (2.8.0, now 2.9.0)` and the like, in the order of the facts."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return [f"{name} ({_short(before.get(name))}, now {_short(now.get(name))})" for name in names]


def _short(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
