"""What a preflight proved holds only while nothing changed that decided it: with recorded facts of GPUs, versions, drivers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.candidate import Candidate
from autotune.hardware import Hardware
from autotune.measurement import Cost, DeviceMemory, Measurement, Memory, Outcome
from autotune.preflight import proofs as room
from autotune.preflight.proofs import Missed, Proof, Proofs, decided
from autotune.question import Question
from autotune.recommendation import Trial
from autotune.spaces import load_space
from autotune.store import Store
from autotune.trainers.base import Job
from autotune.trainers.trl import TrlGrpo
from autotune.units import MIB
from autotune.verdict import judge
from autotune.workload import Model, Workload
from tests.rig.nvml_playback import Playback

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "trl": "1.16.0"}
A100 = Hardware(kind="cuda", name="A100-40G", count=1, memory_bytes=40960 * MIB, here=True)
CONFIG = {"model_type": "qwen2", "hidden_size": 896, "max_position_embeddings": 4096}
OTHERS = 3080 * MIB
"""What others hold of GPU 0 in the recording."""

Change = Callable[[Question], Question]


@pytest.fixture(name="driver", autouse=True)
def recorded_driver(monkeypatch: pytest.MonkeyPatch) -> Playback:
    """A driver that plays back what two A100 said."""
    library = Playback("two_a100")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return library


def question(*, prompt: int = 512, config: dict[str, object] = CONFIG, held: dict[str, object] | None = None) -> Question:
    settings = {"max_prompt_length": prompt, "per_device_train_batch_size": 8, "num_generations": 8, **(held or {})}
    workload = Workload(
        model=Model(name="made/up", config=config, folder=None, origin="catalogue"),
        python=Path(sys.executable), tuning="full", held=settings, user_settings={"dataset_name": "made/prompts"},
    )  # type: ignore[arg-type]  # fmt: skip
    return Question(
        job=Job(workload=workload, hardware=A100), space=load_space("grpo"), memory_limit_bytes=A100.memory_bytes,
        budget_seconds=60, max_probes=1, mode="probe", sampler="value", storage="memory://", study_name="one", out=Path("out"),
    )  # fmt: skip


def candidate(asked: Question) -> Candidate:
    trainer = TrlGrpo()
    return trainer.complete(trainer.baseline(asked.space, asked.job), asked.job)


def proofs(asked: Question, versions: dict[str, str] = VERSIONS) -> Proofs:
    return Proofs(asked, TrlGrpo(), candidate(asked), versions)


def trial(asked: Question, outcome: Outcome = Outcome.OK, peak: int | None = 20 * 1024 * MIB) -> Trial:
    device = DeviceMemory(index=0, uuid="GPU-0", name="A100", peak_bytes=peak, measured_by="nvml-processes", others_bytes=OTHERS)
    memory = Memory(peak_bytes=peak, limit_bytes=A100.memory_bytes, bound_by="device", devices=(device,))
    cost = Cost(total_seconds=30.0, load_seconds=20.0)
    measured = Measurement(candidate_id=candidate(asked).id, outcome=outcome, memory=memory, cost=cost)
    return Trial(number=0, purpose="confirm", candidate=candidate(asked), measurement=measured, verdict=judge(measured))


def prove(asked: Question) -> None:
    proofs(asked).keep(trial(asked), {"complete": True})


def missed(asked: Question, versions: dict[str, str] = VERSIONS) -> str:
    found = proofs(asked, versions).find()
    assert isinstance(found, Missed), "the record answered"
    return found.why


def test_the_very_same_is_answered_from_the_record() -> None:
    prove(question())
    found = proofs(question()).find()
    assert isinstance(found, Proof)
    assert found.trial == trial(question()) and found.certificate == {"complete": True}
    assert found.trial.measurement.memory.devices[0].others_bytes == OTHERS


def test_an_empty_record_says_so_and_fresh_asks_none() -> None:
    assert missed(question()) == "nothing like it was measured here before"
    prove(question())
    assert "--fresh" in missed(dataclasses.replace(question(), fresh=True))


def test_another_driver_is_a_miss(driver: Playback) -> None:
    prove(question())
    driver._recording["driver"] = "999.1"
    assert "device.driver" in missed(question()) and "999.1" in missed(question())


def test_another_version_is_a_miss() -> None:
    prove(question())
    assert "versions.torch (2.13.0, now 2.14.0)" in missed(question(), {**VERSIONS, "torch": "2.14.0"})
    assert "versions.vllm (not set, now 0.31.0)" in missed(question(), {**VERSIONS, "vllm": "0.31.0"})


def test_another_model_config_is_a_miss() -> None:
    prove(question())
    assert "model.hidden_size (896, now 1024)" in missed(question(config={**CONFIG, "hidden_size": 1024}))


def test_a_longer_prompt_in_the_data_is_a_miss() -> None:
    prove(question(prompt=512))
    assert "probe.lengths.prompt (512, now 700)" in missed(question(prompt=700))
    assert isinstance(proofs(question(prompt=512)).find(), Proof), "and the old one is still there"


@pytest.mark.parametrize("used", [3080 - 300, 3080 + 900], ids=["less", "more"])
def test_other_users_of_the_gpu_are_a_miss(driver: Playback, used: int) -> None:
    prove(question())
    driver.put(0, used, [{"pid": 9004711, "mib": used}])
    assert missed(question()).startswith("others hold ") and "when it was measured" in missed(question())


def test_nobody_to_ask_about_others_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    prove(question())
    monkeypatch.setattr(room, "held_by_others", lambda *_: None)
    assert missed(question()) == "it can't be told who else uses these GPUs"


def test_a_few_mebibytes_of_others_are_no_change(driver: Playback) -> None:
    prove(question())
    driver.put(0, 3080 + 20, [{"pid": 9004711, "mib": 3080 + 20}])
    assert isinstance(proofs(question()).find(), Proof)


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: dataclasses.replace(asked, memory_limit_bytes=38 * 1024 * MIB),
        lambda asked: question(held={"gradient_checkpointing": False}),
        lambda asked: question(held={"max_completion_length": 64}),
        lambda asked: dataclasses.replace(asked, job=_with_lists(asked.job, lora_target_modules=["q_proj"])),
    ],
    ids=["limit", "a neutral setting", "a length", "a list"],
)
def test_another_setting_is_a_miss(change: Change) -> None:
    prove(question(held={"use_peft": True}))
    asked = change(question(held={"use_peft": True}))
    assert "changed" in missed(asked)


def _with_lists(job: Job, **lists: object) -> Job:
    user = {**job.workload.user_settings, **lists}
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, user_settings=user))


def test_an_allocators_variable_is_a_miss_and_its_value_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    prove(question())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:secret")
    assert "environment.PYTORCH_CUDA_ALLOC_CONF" in missed(question())
    prove(question())
    kept = "".join(file.read_text() for file in (Store().folder / "proofs").iterdir())
    assert "PYTORCH_CUDA_ALLOC_CONF" in kept and "secret" not in kept


def test_where_the_output_goes_changes_nothing() -> None:
    prove(question(held={"output_dir": "runs/1", "run_name": "one"}))
    assert isinstance(proofs(question(held={"output_dir": "runs/2", "run_name": "two"})).find(), Proof)


def test_only_what_the_candidate_decided_is_kept() -> None:
    asked = question()
    assert decided(trial(asked)) is True
    assert decided(trial(asked, Outcome.OOM_BACKWARD)) is False
    assert decided(trial(asked, peak=50 * 1024 * MIB)) is False, "it ran and took more than the limit"
    for undecided in (trial(asked, Outcome.CRASH), trial(asked, Outcome.TIMEOUT), trial(asked, peak=None)):
        assert decided(undecided) is None
        proofs(asked).keep(undecided, None)
        assert missed(asked) == "nothing like it was measured here before"
    proofs(asked).keep(trial(asked, Outcome.OOM_BACKWARD), None)
    found = proofs(asked).find()
    assert isinstance(found, Proof) and not found.trial.verdict.fits


def test_on_a_cpu_a_fuller_machine_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Hardware(kind="cpu", name="cpu", count=1, memory_bytes=2**40, here=True)
    asked = dataclasses.replace(question(), job=dataclasses.replace(question().job, hardware=cpu), memory_limit_bytes=2**40)
    proofs(asked).keep(trial(asked, peak=1), None)
    assert isinstance(proofs(asked).find(), Proof)
    proofs(asked).keep(trial(asked, peak=2**39), None)
    assert "of this machine's memory" in missed(asked)


def test_a_proof_that_was_cut_short_is_none() -> None:
    prove(question())
    (file,) = (Store().folder / "proofs").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert "measured here before" in missed(question())
