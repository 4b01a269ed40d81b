"""One meaning of the engine's share under a memory limit: prediction, probe and written file agree,
and the user's file states a share of the whole GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import catalog, frameworks
from autotune.catalog.model_lookup import find_model
from autotune.core.composition import EngineSettings, SplitEngines
from autotune.core.job import Job
from autotune.core.measurement import LoopActivity, ProbePlan
from autotune.core.prediction import EngineFit
from autotune.core.space import Candidate
from autotune.core.units import GIB, MIB
from autotune.estimate import rollout_engine
from autotune.estimate.predictor import predict
from autotune.frameworks import shares_in_files
from autotune.frameworks.shares_in_files import for_files, for_probe, limit_notes, with_room
from autotune.probe.ballast import Ballast, BallastHold
from autotune.probe.gpu_set import Gpus
from autotune.report.certificate import items_of
from autotune.report.output_folder import write_files
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.worker.phase_recorder import PhaseRecorder
from autotune.worker.trl.vllm_engines import Engines, server_command
from tests.estimate.synthetic import composition, hardware, situation
from tests.preflight.test_proofs import trial
from tests.probe.nvml_playback import Playback

SHARE = "vllm_gpu_memory_utilization"
RESERVED_MIB = round(catalog.efficiency("driver_reserve_mib").value)
CARDS = {"A100-40G": 40, "A100-80G": 80}
MODEL = "Qwen2.5-7B"
CONFIG = find_model(MODEL).config

TOLERANCE = 0.005

under_limits = pytest.mark.parametrize(
    ("card", "limit_gib"),
    [(card, limit) for card in CARDS for limit in (16, 24, 40, None)],
)
"""Limits on cards of 40 and 80 GiB; None: no limit."""


# The probe: the card as NVML and a ballast report it, and what the worker passes on to vLLM.


class HeldCard:
    """Stands in for a ballast: the card's size as CUDA reports it."""

    pid, alive = 0, True

    def __init__(self, memory_gib: int) -> None:
        self._total_bytes = memory_gib * GIB - RESERVED_MIB * MIB

    def leave(self, free_bytes: int) -> BallastHold:
        free_bytes = min(free_bytes, self._total_bytes)
        return BallastHold(
            held_bytes=self._total_bytes - free_bytes,
            free_bytes=free_bytes,
            total_bytes=self._total_bytes,
        )

    def close(self) -> None:
        pass


@contextmanager
def card_under_limit(card: str, limit_gib: int | None) -> Iterator[dict[str, Any]]:
    """Yield the facts about the card that a rank receives."""
    library = Playback("two_a100")
    for device in library._recording["devices"]:
        device |= {"total_mib": CARDS[card] * 1024, "reserved_mib": RESERVED_MIB}
    library.put(0, 4, [])

    def make_ballast(python: Path, device: str) -> Ballast:
        return HeldCard(CARDS[card])  # type: ignore[return-value]

    gpus = Gpus(
        1,
        (limit_gib or CARDS[card]) * GIB,
        Path(sys.executable),
        library=library,
        variable="0",
        make_ballast=make_ballast,
        patience_seconds=0.3,
    )
    try:
        gpus.settle()
        yield gpus.for_ranks()[0]
    finally:
        gpus.close()


def share_in_colocated_probe(device: dict[str, Any], share: float) -> float:
    """Return the share with which the worker builds vLLM in the trainer's process."""
    recorder = PhaseRecorder(emit=lambda event: None, device=device)
    engines = Engines(recorder, cpu=False, random_weights=True)
    built: list[dict[str, Any]] = []
    engines._real = lambda **arguments: built.append(arguments)
    engines.get({"model": "m", "gpu_memory_utilization": share})
    return float(built[0]["gpu_memory_utilization"])


def share_in_server_probe(device: dict[str, Any], share: float) -> float:
    """Return the share in the command by which the worker starts TRL's server."""
    request = {
        "server": {
            "gpus": 1,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": share,
            "max_model_length": 1024,
        },
        "model": {"dtype": "bfloat16", "weights": "real"},
    }
    command = server_command(request, Path("model"), 8000, scale=device["engine_share_scale"])
    return float(command[command.index("--gpu_memory_utilization") + 1])


def on_whole_card(
    card: str,
    share_of_gpu: float,
    settings: EngineSettings,
) -> EngineFit | None:
    """Return what vLLM makes of this share on the card, which it does not see limited."""
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == card)
    return rollout_engine.fit(
        CONFIG,
        replace(settings, utilization=share_of_gpu),
        dtype="bfloat16",
        gpu=gpu,
        device_memory_bytes=gpu.memory_bytes,
        other_bytes=0,
    ).kv


def predicted(card: str, limit_gib: int | None, **changes: Any) -> EngineFit | None:
    """Return the engine as `predict` has it."""
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == card)
    limit_bytes = gpu.memory_bytes if limit_gib is None else limit_gib * GIB
    return predict(
        situation(
            gpu=gpu,
            hardware=hardware(gpu),
            limit_bytes=limit_bytes,
            config=CONFIG,
            composition=replace(composition(), **changes),
        )
    ).engine


def assert_same_cache(first: EngineFit | None, second: EngineFit | None) -> None:
    assert first is not None and second is not None
    assert first.kv_cache_bytes.value == pytest.approx(second.kv_cache_bytes.value, rel=TOLERANCE)
    assert first.kv_cache_tokens == pytest.approx(second.kv_cache_tokens, rel=TOLERANCE)


ENGINE = EngineSettings(
    utilization=0.6,
    max_model_length=512,
    max_num_seqs=8,
    quantised_bits=4,
)


@under_limits
def test_prediction_and_colocated_probe_agree(card: str, limit_gib: int | None) -> None:
    share = composition(engine=ENGINE, generation="engine")
    expected = predicted(
        card,
        limit_gib,
        engine=ENGINE,
        generation="engine",
        residents=share.residents,
    )
    with card_under_limit(card, limit_gib) as device:
        probed = share_in_colocated_probe(device, ENGINE.utilization)
    assert_same_cache(expected, on_whole_card(card, probed, ENGINE))


@under_limits
def test_prediction_and_server_probe_agree(card: str, limit_gib: int | None) -> None:
    engine = replace(ENGINE, apart=True, max_num_batched_tokens=2048)
    split = SplitEngines(
        gpus=1,
        engine=engine,
        dtype="bfloat16",
    )
    expected = predicted(card, limit_gib, generation="server", split=split)
    with card_under_limit(card, limit_gib) as device:
        probed = share_in_server_probe(device, engine.utilization)
    assert_same_cache(expected, on_whole_card(card, probed, engine))


@under_limits
def test_the_written_share_is_the_probes(card: str, limit_gib: int | None) -> None:
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == card)
    limit_bytes = gpu.memory_bytes if limit_gib is None else limit_gib * GIB
    scale = shares_in_files.scale_of(hardware(gpu), limit_bytes)
    with card_under_limit(card, limit_gib) as device:
        probed = share_in_colocated_probe(device, 0.6)
    assert 0.6 * scale == pytest.approx(probed, rel=TOLERANCE)


def test_the_share_that_was_predicted_to_fit_and_left_no_cache() -> None:
    """A 7B with 0.3 of a limit of 40 GiB on 80 GiB: 11.9 GiB, less than its weights."""
    engine = replace(ENGINE, utilization=0.3, quantised_bits=None)
    residents = composition(engine=engine, generation="engine").residents
    assert (
        predicted(
            "A100-80G",
            40,
            engine=engine,
            generation="engine",
            residents=residents,
        )
        is None
    )


def test_sglang_has_its_share_of_what_the_limit_leaves_free() -> None:
    engine = replace(
        ENGINE,
        kind="sglang",
        apart=True,
        quantised_bits=None,
        utilization=0.8,
    )
    kv = {}
    for limit_gib in (None, 40):
        split = SplitEngines(
            gpus=1,
            engine=engine,
            dtype="bfloat16",
        )
        engine_use = predicted("A100-80G", limit_gib, generation="server", split=split)
        assert engine_use is not None
        kv[limit_gib] = engine_use.kv_cache_bytes.value
    assert kv[None] - kv[40] == pytest.approx(0.8 * 40 * GIB)


# The user's file.

FILE = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "use_peft": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    SHARE: 0.3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
}


def request_of(tmp_path: Path, file: dict[str, Any] | None = None, **flags: Any) -> ParsedRequest:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(FILE if file is None else file))
    return parse_request(
        Flags(config=str(path), **{"gpus": "A100-80G", "mode": "predict", **flags})
    )


def without_share() -> dict[str, Any]:
    return {name: value for name, value in FILE.items() if name != SHARE}


def test_without_a_limit_nothing_is_converted(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    candidate = candidate_of_job(request)
    assert candidate.settings[SHARE] == 0.3
    assert for_files(candidate, request.job) == (candidate, request.job.task)
    assert not list(limit_notes(request.job, (candidate,)))
    assert not any(SHARE in note for note in request.notes)


def test_the_share_of_a_file_is_one_of_the_whole_gpu(tmp_path: Path) -> None:
    request = request_of(tmp_path, memory_limit="40G")
    candidate = candidate_of_job(request)
    assert candidate.settings[SHARE] == 0.6037  # of 39.5 GiB: 0.3 of 79.5
    assert 0.6037 in request.job.space[SHARE].choices
    (note,) = (note for note in request.notes if SHARE in note)
    assert "0.3 is a share of the whole GPU: of the limit of 40 GiB it is 0.6037" in note


def test_so_is_the_default_of_trl_where_the_file_states_none(tmp_path: Path) -> None:
    request = request_of(tmp_path, without_share(), memory_limit="40G")
    assert candidate_of_job(request).settings[SHARE] == 0.6037


def test_a_server_has_no_default_share_in_the_trainers_file(tmp_path: Path) -> None:
    file = {**without_share(), "vllm_mode": "server"}
    request = request_of(tmp_path, file, memory_limit="40G", gpus="2xA100-80G")
    assert SHARE not in request.job.task.workload.held_values


def test_the_share_of_a_flag_is_one_of_the_limit(tmp_path: Path) -> None:
    request = request_of(tmp_path, memory_limit="40G", hold=(f"{SHARE}=0.5",))
    assert candidate_of_job(request).settings[SHARE] == 0.5
    assert not any(SHARE in note for note in request.notes)


def test_a_share_above_the_limit_cannot_fit_and_the_note_says_so(tmp_path: Path) -> None:
    request = request_of(tmp_path, {**FILE, SHARE: 0.9}, memory_limit="40G")
    assert candidate_of_job(request).settings[SHARE] == 1.0
    (note,) = (note for note in request.notes if SHARE in note)
    assert "takes 71.6 GiB of the GPU, above the limit of 40 GiB" in note
    engine = replace(ENGINE, utilization=1.0)
    gpu = next(gpu for gpu in catalog.gpus() if gpu.name == "A100-80G")
    use = rollout_engine.fit(
        CONFIG,
        engine,
        dtype="bfloat16",
        gpu=gpu,
        device_memory_bytes=gpu.memory_bytes,
        limit_bytes=40 * GIB,
        other_bytes=MIB,
    )
    assert use.failure is not None and use.sure


def test_preflight_keeps_the_engine_of_the_file_beside_the_launching_process(
    tmp_path: Path,
) -> None:
    request = request_of(tmp_path, memory_limit="40G")
    for file in (FILE, without_share()):
        request = request_of(tmp_path, file)
        job = with_room(request.job, 330 * MIB, request.trainer.fields())
        scale = shares_in_files.scale_of(job.task.hardware, job.memory_limit_bytes)
        assert scale < 1
        share = job.task.workload.held_values[SHARE]
        assert isinstance(share, float)
        assert share * scale == pytest.approx(0.3, abs=1e-4)


# Written files.


def written(
    request: ParsedRequest,
    candidate: Candidate,
    folder: Path,
) -> dict[str, str]:
    files, _ = write_files(request.job, request.trainer, candidate, ["Head."], folder, folder)
    return {file.name: file.read_text() for file in files if file.suffix in (".yaml", ".sh")}


def test_a_written_file_takes_no_more_than_the_limit_of_the_whole_gpu(tmp_path: Path) -> None:
    request = request_of(tmp_path, memory_limit="40G", hold=(f"{SHARE}=0.5",))
    candidate = candidate_of_job(request)
    text = written(request, candidate, tmp_path / "out")["recommended.yaml"]
    assert yaml.safe_load(text)[SHARE] == 0.2485
    assert "0.5 is written as" in " ".join(text.replace("\n# ", " ").split())


def test_a_file_that_is_read_and_written_states_the_same_share(tmp_path: Path) -> None:
    for share in (0.3, 0.25, 0.4321):
        request = request_of(tmp_path, {**FILE, SHARE: share}, memory_limit="38G")
        text = written(request, candidate_of_job(request), tmp_path / "out")["recommended.yaml"]
        assert yaml.safe_load(text)[SHARE] == share
    request = request_of(tmp_path, without_share(), memory_limit="38G")
    text = written(request, candidate_of_job(request), tmp_path / "out")["recommended.yaml"]
    assert yaml.safe_load(text)[SHARE] == 0.3


def test_the_server_of_launch_sh_has_the_share_of_the_gpu(tmp_path: Path) -> None:
    file = {**without_share(), "vllm_mode": "server"}
    request = request_of(
        tmp_path,
        file,
        memory_limit="40G",
        gpus="2xA100-80G",
        hold=(f"{SHARE}=0.5",),
    )
    text = written(request, candidate_of_job(request), tmp_path / "out")["launch.sh"]
    assert "--gpu_memory_utilization 0.2485" in text


def test_a_launch_script_keeps_the_share_that_it_has(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --use_peft --use_vllm --vllm_mode colocate"
        f" --{SHARE} 0.3 --num_generations 8\n"
    )
    flags = Flags(
        from_command=str(script),
        gpus="A100-80G",
        mode="predict",
        memory_limit="40G",
    )
    request = parse_request(flags)
    candidate = candidate_of_job(request)
    assert candidate.settings[SHARE] == 0.6037
    changed = written(request, candidate, tmp_path / "out")["changed-train.sh"]
    assert f"--{SHARE} 0.3 " in changed and "0.6037" not in changed


# Frameworks that are probed by their own command.


def verl_request(**settings: Any) -> tuple[Job, Candidate]:
    request = parse_request(
        Flags(
            framework="verl",
            model="Qwen2.5-7B",
            gpus="A100-80G",
            mode="predict",
            memory_limit="40G",
            set=tuple(f"{name}={json.dumps(value)}" for name, value in settings.items()),
        )
    )
    return request.job, candidate_of_job(request)


RECORDS = LoopActivity(watched="outside", optimizer_steps=4)
VERL_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def share_in_command(job: Job, candidate: Candidate) -> object:
    trainer = frameworks.trainer("verl", "grpo")
    request = trainer.probe_request(*for_probe(candidate, job, trainer), ProbePlan())
    argv = request["argv"]
    assert isinstance(argv, list | tuple)
    (word,) = (word for word in argv if word.startswith(VERL_SHARE))
    return float(word.partition("=")[2])


def test_a_command_is_probed_with_the_share_of_the_gpu() -> None:
    job, candidate = verl_request(**{VERL_SHARE: 0.5})
    assert candidate.settings[VERL_SHARE] == 0.5
    assert share_in_command(job, candidate) == 0.2485


def test_the_certificate_knows_the_share_of_the_command() -> None:
    job, candidate = verl_request(**{VERL_SHARE: 0.5})
    proof = trial(job)
    for share, state in ((0.2485, "done"), (0.5, "done"), (0.3, "not done")):
        measurement = replace(proof.measurement, effective={VERL_SHARE: share}, exercised=RECORDS)
        proven = replace(proof, candidate=candidate, measurement=measurement)
        items = {item["name"]: item["state"] for item in items_of(job, proven)}
        assert items["settings as asked"] == state


def test_sglang_is_probed_with_the_share_as_it_is() -> None:
    job, candidate = verl_request(**{VERL_SHARE: 0.5, "actor_rollout_ref.rollout.name": "sglang"})
    assert share_in_command(job, candidate) == 0.5
