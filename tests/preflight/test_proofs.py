"""Proofs of a preflight become invalid when a deciding fact changes: recorded GPUs, versions,
drivers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.answer import Trial
from autotune.core.job import Hardware, Job, Model, Task, Workload
from autotune.core.measurement import Cost, DeviceMemory, Measurement, Memory, Outcome, judge
from autotune.core.space import Candidate
from autotune.core.units import MIB
from autotune.frameworks.shares_in_files import with_room
from autotune.frameworks.trl.trainers import TrlGrpo
from autotune.preflight import proofs as room
from autotune.preflight.check import launcher_bytes
from autotune.preflight.proofs import Proof, Proofs, decided
from autotune.search.record import Store
from tests.probe.nvml_playback import Playback

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "trl": "1.16.0"}
A100 = Hardware(
    kind="cuda",
    name="A100-40G",
    count=1,
    memory_bytes=40960 * MIB,
    here=True,
)
CONFIG = {"model_type": "qwen2", "hidden_size": 896, "max_position_embeddings": 4096}
OTHERS = 3080 * MIB
"""Memory of other processes on GPU 0 in the recording."""

Change = Callable[[Job], Job]


@pytest.fixture(name="driver", autouse=True)
def recorded_driver(monkeypatch: pytest.MonkeyPatch) -> Playback:
    """Driver that plays back the replies of two A100."""
    library = Playback("two_a100")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return library


def job(
    *,
    prompt: int = 512,
    config: dict[str, object] = CONFIG,
    settings_held: dict[str, object] | None = None,
) -> Job:
    settings = {
        "max_prompt_length": prompt,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        **(settings_held or {}),
    }
    workload = Workload(
        model=Model(
            name="made/up",
            config=config,
            folder=None,
            origin="catalogue",
        ),
        python=Path(sys.executable),
        tuning="full",
        held_values=settings,
        user_settings={"dataset_name": "made/prompts"},
    )  # type: ignore[arg-type]
    return Job(
        task=Task(workload=workload, hardware=A100),
        space=load_space("grpo"),
        memory_limit_bytes=A100.memory_bytes,
        budget_seconds=60,
        max_probes=1,
        mode="probe",
        sampler="value",
        storage="memory://",
        study_name="one",
        out=Path("out"),
    )


def candidate(request: Job) -> Candidate:
    trainer = TrlGrpo()
    return trainer.complete(trainer.baseline(request.space, request.task), request.task)


def proofs(request: Job, versions: dict[str, str] = VERSIONS) -> Proofs:
    return Proofs(request, TrlGrpo(), candidate(request), versions)


def trial(
    request: Job,
    outcome: Outcome = Outcome.OK,
    peak: int | None = 20 * 1024 * MIB,
) -> Trial:
    device = DeviceMemory(
        index=0,
        uuid="GPU-0",
        name="A100",
        peak_bytes=peak,
        measured_by="nvml-processes",
        others_bytes=OTHERS,
    )
    memory = Memory(
        peak_bytes=peak,
        limit_bytes=A100.memory_bytes,
        bound_by="device",
        devices=(device,),
    )
    cost = Cost(total_seconds=30.0, load_seconds=20.0)
    measured = Measurement(
        candidate_id=candidate(request).id,
        outcome=outcome,
        memory=memory,
        cost=cost,
    )
    return Trial(
        number=0,
        purpose="confirm",
        candidate=candidate(request),
        measurement=measured,
        verdict=judge(measured),
    )


def prove(request: Job) -> None:
    proofs(request).keep(trial(request), {"complete": True})


def missed(request: Job, versions: dict[str, str] = VERSIONS) -> str:
    proof = proofs(request, versions).find()
    assert isinstance(proof, str), "the record answered"
    return proof


@pytest.mark.parametrize(
    ("hardware", "torch", "mib"),
    [
        (A100, "2.11.0+cu130", 330),
        (A100, "2.7.1", 0),
        (dataclasses.replace(A100, kind="cpu"), "2.13.0", 0),
    ],
)
def test_room_is_left_for_the_context_of_the_launching_process(
    hardware: Hardware,
    torch: str,
    mib: int,
) -> None:
    request = job()
    request = dataclasses.replace(
        request, task=dataclasses.replace(request.task, hardware=hardware)
    )
    assert launcher_bytes(request, {"torch": torch}) == pytest.approx(mib * MIB, rel=0.02)


@pytest.mark.parametrize(("limit", "left_mib"), [(40960, 40460 - 330), (30000, 30000 - 330)])
def test_room_comes_out_of_what_cuda_offers(limit: int, left_mib: int) -> None:
    request = dataclasses.replace(job(), memory_limit_bytes=limit * MIB)
    assert with_room(request, 330 * MIB, {}).memory_limit_bytes == pytest.approx(
        left_mib * MIB, rel=0.001
    )


def test_the_very_same_is_answered_from_the_record() -> None:
    prove(job())
    proof = proofs(job()).find()
    assert isinstance(proof, Proof)
    assert proof.trial == trial(job()) and proof.certificate == {"complete": True}
    assert proof.trial.measurement.memory.devices[0].others_bytes == OTHERS


def test_an_empty_record_is_reported_and_fresh_skips_it() -> None:
    assert missed(job()) == "nothing like it was measured here before"
    prove(job())
    assert "--fresh" in missed(dataclasses.replace(job(), fresh=True))


def test_another_driver_is_a_miss(driver: Playback) -> None:
    prove(job())
    driver._recording["driver"] = "999.1"
    assert "device.driver" in missed(job()) and "999.1" in missed(job())


def test_another_version_is_a_miss() -> None:
    prove(job())
    assert "versions.torch (2.13.0, now 2.14.0)" in missed(job(), {**VERSIONS, "torch": "2.14.0"})
    assert "versions.vllm (not set, now 0.31.0)" in missed(job(), {**VERSIONS, "vllm": "0.31.0"})


def test_another_model_config_is_a_miss() -> None:
    prove(job())
    assert "model.hidden_size (896, now 1024)" in missed(
        job(config={**CONFIG, "hidden_size": 1024})
    )


def test_a_longer_prompt_in_the_data_is_a_miss() -> None:
    prove(job(prompt=512))
    assert "probe.lengths.prompt (512, now 700)" in missed(job(prompt=700))
    assert isinstance(proofs(job(prompt=512)).find(), Proof), "and the old one is still there"


@pytest.mark.parametrize("used", [3080 - 300, 3080 + 900], ids=["less", "more"])
def test_other_users_of_the_gpu_are_a_miss(driver: Playback, used: int) -> None:
    prove(job())
    driver.put(0, used, [{"pid": 9004711, "mib": used}])
    assert missed(job()).startswith("others hold ") and "when it was measured" in missed(job())


def test_unknown_other_processes_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    prove(job())
    monkeypatch.setattr(room, "held_by_others", lambda *_: None)
    assert missed(job()) == "other users of these GPUs are unknown"


def test_a_few_mebibytes_of_others_are_no_change(driver: Playback) -> None:
    prove(job())
    driver.put(0, 3080 + 20, [{"pid": 9004711, "mib": 3080 + 20}])
    assert isinstance(proofs(job()).find(), Proof)


@pytest.mark.parametrize(
    "change",
    [
        lambda request: dataclasses.replace(request, memory_limit_bytes=38 * 1024 * MIB),
        lambda request: job(settings_held={"gradient_checkpointing": False}),
        lambda request: job(settings_held={"max_completion_length": 64}),
        lambda request: dataclasses.replace(
            request, task=_with_lists(request.task, lora_target_modules=["q_proj"])
        ),
    ],
    ids=["limit", "a neutral setting", "a length", "a list"],
)
def test_another_setting_is_a_miss(change: Change) -> None:
    prove(job(settings_held={"use_peft": True}))
    request = change(job(settings_held={"use_peft": True}))
    assert "changed" in missed(request)


def _with_lists(task: Task, **lists: object) -> Task:
    user = {**task.workload.user_settings, **lists}
    return dataclasses.replace(
        task, workload=dataclasses.replace(task.workload, user_settings=user)
    )


def test_an_allocator_variable_is_a_miss_and_its_value_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prove(job())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:secret")
    assert "environment.PYTORCH_CUDA_ALLOC_CONF" in missed(job())
    prove(job())
    text = "".join(file.read_text() for file in (Store().folder / "proofs").iterdir())
    assert "PYTORCH_CUDA_ALLOC_CONF" in text and "secret" not in text


def test_where_the_output_goes_changes_nothing() -> None:
    prove(job(settings_held={"output_dir": "runs/1", "run_name": "one"}))
    assert isinstance(
        proofs(job(settings_held={"output_dir": "runs/2", "run_name": "two"})).find(), Proof
    )


def test_only_decided_proofs_are_stored() -> None:
    request = job()
    assert decided(trial(request)) is True
    assert decided(trial(request, Outcome.OOM_BACKWARD)) is False
    assert decided(trial(request, peak=50 * 1024 * MIB)) is False, (
        "it ran and took more than the limit"
    )
    for undecided in (
        trial(request, Outcome.CRASH),
        trial(request, Outcome.TIMEOUT),
        trial(request, peak=None),
    ):
        assert decided(undecided) is None
        proofs(request).keep(undecided, None)
        assert missed(request) == "nothing like it was measured here before"
    proofs(request).keep(trial(request, Outcome.OOM_BACKWARD), None)
    proof = proofs(request).find()
    assert isinstance(proof, Proof) and not proof.trial.verdict.fits


def test_on_a_cpu_a_fuller_machine_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Hardware(
        kind="cpu",
        name="cpu",
        count=1,
        memory_bytes=2**40,
        here=True,
    )
    request = dataclasses.replace(
        job(), task=dataclasses.replace(job().task, hardware=cpu), memory_limit_bytes=2**40
    )
    proofs(request).keep(trial(request, peak=1), None)
    assert isinstance(proofs(request).find(), Proof)
    proofs(request).keep(trial(request, peak=2**39), None)
    assert "of this machine's memory" in missed(request)


def test_a_proof_that_was_cut_short_is_none() -> None:
    prove(job())
    (file,) = (Store().folder / "proofs").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert "measured here before" in missed(job())
