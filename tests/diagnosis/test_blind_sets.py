"""Sets of logs that were written without sight of the table, read once while that was frozen,
and mended by afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec.yaml
import pytest

from autotune.diagnosis import diagnose
from autotune.failures.table import CAUSES
from tests.every import for_each

HERE = Path(__file__).parent
RESULTS = json.loads((HERE.parents[1] / "benchmarks" / "results" / "diagnose.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Blind:
    """Blind set of logs."""

    name: str
    first_right: tuple[int, int]
    """Number of correct diagnoses at the first reading, and number of logs."""

    mistaken: Mapping[str, str] = field(default_factory=dict)
    """Logs that are known to be named otherwise than their label, each with why."""

    otherwise: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    """Logs whose kind two sets label differently: the reported cause, and the reason for it."""

    askew: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """Facts that a log does not contain, or contradicts, compared with its label, which is
    unchanged.
    """

    alarms: tuple[str, ...] = ()
    """Logs that are not about memory, or not certainly, but are reported as such."""

    @property
    def folder(self) -> Path:
        return HERE / f"logs-{self.name}"

    @property
    def labels(self) -> list[dict[str, Any]]:
        return list(msgspec.yaml.decode((self.folder / "labels.yaml").read_text())["logs"])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


SETS = (
    Blind(
        name="third",
        first_right=(89, 111),
        mistaken={
            "adapter-of-other-model": (
                "weights of another shape: whether the file or the setting is wrong, no log tells"
            ),
            "optimizer-state-of-other-run": "the same, of an optimizer's state",
            "ranks-killed-by-hand": (
                "SIGKILL without a word, which a lack of memory looks like as well"
            ),
        },
        otherwise={
            "ranks-nccl-shm": (
                "hang_or_nccl",
                "NCCL's own small segments: nothing of the training is in /dev/shm",
            )
        },
        # A layer that is computed again runs out while autograd runs, as its traceback shows; the
        # label says forward.
        askew={("apple-out-of-memory", "phase"): "backward"},
        alarms=("ranks-killed-by-hand",),
    ),
    Blind(
        name="fourth",
        first_right=(94, 110),
        # A process that is killed says nothing of what it did; only bars of its loading stand
        # before that.
        askew={("each-rank-reads-seventy-billion", "phase"): None},
    ),
    Blind(
        name="fifth",
        first_right=(93, 110),
        mistaken={
            "vllm-memory-profile-moved": "memory that a neighbour gave back did not run out",
            "embedding-index-out-of-range": (
                "a token beyond the table of a model's tokens: the device only found it"
            ),
            "openrlhf-prompt-file-absent": "a file of the data set that is not there",
        },
        otherwise={
            "port-29500-taken": (
                "hang_or_nccl",
                "a port in use is a start of several processes that do not meet",
            ),
            "second-node-never-joins": (
                "hang_or_nccl",
                "so is a node that the others wait for; the sixth's author says so too",
            ),
        },
        askew={("own-reward-key-missing", "phase"): "reward"},
    ),
    Blind(
        name="sixth",
        first_right=(99, 115),
        mistaken=dict.fromkeys(
            (
                "trl-vllm-no-cache-blocks-l4",
                "verl-vllm-max-seq-len-over-kv",
                "verl-sglang-mem-fraction",
            ),
            "what has no room is the KV cache; when that shows is the engine's start, and four"
            " other sets call it by the former",
        ),
        askew={
            # Memory that a neighbour gave back while vLLM measured did not run out.
            ("vllm-profiling-free-memory-grew", "is_memory"): False,
            # It wakes up before the rollout, as the third's and the fifth's authors say; and what a
            # device asserts is told late.
            ("trl-colocate-wake-up-cumem", "phase"): "sync",
            ("added-token-outside-embedding", "phase"): None,
            # No place in these is one of loading; only what stands before them is.
            ("torchrun-8-ranks-load-70b-sigkill", "phase"): None,
            ("compute-node-offline-hub", "phase"): None,
        },
    ),
    Blind(
        name="seventh",
        first_right=(76, 80),
        mistaken={
            "sft-backward-of-large-vocabulary-loss": (
                "only multiplying batch, length and vocabulary tells it from a layer's"
            ),
            "leftover-rollout-server-on-device": (
                "the engine's start says the same whoever holds the memory"
            ),
            "token-beyond-embedding-table": "the device only found it, as in the fifth",
        },
        askew={
            # The rank stands only in a prefix of some lines, or in what comes afterwards, and is
            # not told.
            ("openrlhf-actor-logprob-epoch", "rank"): None,
            ("dpo-reference-copy-second-model", "rank"): None,
            ("sampling-from-nan-probabilities", "rank"): None,
            # What a device asserts is told late; no place is one of loading where a process was
            # killed or the hub is away.
            ("sampling-from-nan-probabilities", "phase"): None,
            ("slurm-cgroup-kills-sft", "phase"): None,
            ("compute-node-without-hub", "phase"): None,
            # Gathered for generating by the forward pass that generates.
            ("ppo-ds3-gather-for-generation", "phase"): "forward",
        },
    ),
    Blind(
        name="eighth",
        first_right=(71, 74),
        mistaken={
            "index-select-beyond-table": (
                "a token beyond the table of a model's tokens, as in the fifth and the seventh"
            )
        },
        # A reward manager runs functions of the user's own: a key that is missing there may be
        # theirs, so nothing is said.
        otherwise={
            "verl-rows-without-reward-model": (
                None,
                "what fails behind a reward manager is left to its author",
            )
        },
        askew={
            # The frame says what was computed, not in which pass; the rank is inside the sentence;
            # no place is one of loading.
            ("liger-fused-linear-loss", "phase"): None,
            ("store-barrier-never-full", "rank"): None,
            ("gated-model-without-access", "phase"): None,
            ("hub-gateway-timeout", "phase"): None,
        },
    ),
)
CASES = [(blind_set, label) for blind_set in SETS for label in blind_set.labels]
of_each = pytest.mark.parametrize("blind_set", SETS, ids=lambda blind_set: blind_set.name)


@of_each
def test_each_log_has_its_label(blind_set: Blind) -> None:
    assert {file.stem for file in blind_set.folder.glob("*.log")} == {
        label["name"] for label in blind_set.labels
    }
    assert len(blind_set.labels) == blind_set.first_right[1]
    assert all(label["cause"] is None or label["cause"] in CAUSES for label in blind_set.labels)


@for_each(CASES)
def test_it_is_named_for_what_it_is(case: tuple[Blind, dict[str, Any]]) -> None:
    blind_set, label = case
    diagnosis = diagnose(blind_set.log(label["name"]))
    if label["name"] in blind_set.mistaken:
        assert diagnosis.cause != label["cause"] and diagnosis.cause in label["also_defensible"]
        return
    if label["name"] in blind_set.otherwise:
        assert diagnosis.cause == blind_set.otherwise[label["name"]][0] != label["cause"]
        return
    is_memory = blind_set.askew.get((label["name"], "is_memory"), label["is_memory"])
    assert (diagnosis.cause, diagnosis.is_memory) == (label["cause"], is_memory), diagnosis
    for fact in ("rank", "phase"):
        expected = blind_set.askew.get((label["name"], fact), label.get(fact))
        assert fact not in label or getattr(diagnosis, fact) == expected, diagnosis


@of_each
def test_nothing_of_another_cause_is_called_memory_but_what_is_known_to_be(
    blind_set: Blind,
) -> None:
    other_causes = [label["name"] for label in blind_set.labels if not label["is_memory"]]
    assert (
        tuple(name for name in other_causes if diagnose(blind_set.log(name)).is_memory)
        == blind_set.alarms
    )


@of_each
def test_the_first_reading_stays_on_record(blind_set: Blind) -> None:
    first = RESULTS[f"{blind_set.name}_set_first_run"]
    assert (first["right"], first["logs"]) == blind_set.first_right
    assert first["table"] != RESULTS[f"{blind_set.name}_set_after_mending"]["table"]
