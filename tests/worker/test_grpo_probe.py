"""The adapter on the real GRPOTrainer, on a model of 0.4 million parameters."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import (
    adapter,
    engine_request,
    events_stage,
    inside,
    load_request,
    measure_request,
    run_apart,
)

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
"""A folder with trl-<version>/ folders, as `make trl-overlays` makes it."""

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM here")

PHASES_OF_EVERY_RUN = {"rollout", "reward", "forward", "backward", "optimizer"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trl = adapter()
    request = load_request(tmp_path_factory.mktemp("scratch"))
    trl.warm(request)
    return trl.load(request, events_stage()[0])


def measure(loaded: Any, settings: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    stage, _ = events_stage()
    try:
        request = measure_request(settings, **changes)
        return adapter().measure(loaded, request, stage)  # type: ignore[no-any-return]
    finally:
        adapter().release(loaded)


def check_speed(
    speed: dict[str, Any],
    *,
    cycles: int,
    tokens: int,
) -> None:
    assert len(speed["cycle_seconds"]) == cycles
    assert speed["cycle_loss_tokens"] == [tokens] * cycles
    assert sum(speed["phase_seconds"].values()) == pytest.approx(
        sum(speed["cycle_seconds"]), rel=0.03
    )


def test_a_candidate_is_measured_at_its_worst(loaded: Any) -> None:
    result = measure(
        loaded,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        prompt=24,
        completion=10,
    )
    json.dumps(result)
    check_speed(result["worst"], cycles=2, tokens=8 * 10)
    assert result["worst"]["prompt_tokens"] == 2 * 8 * 24
    assert result["typical"] is None
    assert result["optimizer_steps"] == 3
    assert result["world_size"] == 1
    effective = result["effective"]
    assert (effective["longest_prompt_seen"], effective["longest_completion_seen"]) == (24, 10)
    assert (effective["generation_batch_size"], effective["steps_per_generation"]) == (8, 2)
    assert effective["trainable_parameters"] == effective["parameters"]
    assert {
        phase for phase, seconds in result["worst"]["phase_seconds"].items() if seconds > 0
    } >= PHASES_OF_EVERY_RUN
    memory = result["memory"]
    assert memory["peak_bytes"] >= max(memory["phase_peak_bytes"].values())
    assert memory["torch_allocated_bytes"] is None


def test_typical_lengths_are_a_run_of_their_own(loaded: Any) -> None:
    result = measure(loaded, completion=12, typical=5)
    check_speed(result["worst"], cycles=2, tokens=4 * 12)
    check_speed(result["typical"], cycles=2, tokens=4 * 5)
    assert result["effective"]["longest_completion_seen"] == 12


DRAWN = [2, 3, 5, 12]
"""Lengths that occur where 12 is the longest."""


def check_drawn(speed: dict[str, Any], completions: int) -> None:
    """Check that each of the lengths was generated equally often."""
    assert speed["drawn"]
    assert speed["completion_tokens"] == round(sum(DRAWN) / len(DRAWN))
    check_speed(speed, cycles=2, tokens=completions // len(DRAWN) * sum(DRAWN))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_peft": True},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_completions_end_at_drawn_lengths(loaded: Any, settings: dict[str, Any]) -> None:
    result = measure(
        loaded,
        settings,
        completion=12,
        typical=6,
        drawn=DRAWN,
    )
    completions = 4 * settings.get("gradient_accumulation_steps", 1)
    check_speed(result["worst"], cycles=2, tokens=completions * 12)
    assert not result["worst"]["drawn"]
    check_drawn(result["typical"], completions)
    assert (
        measure(loaded, settings)["worst"]["cycle_loss_tokens"] == [completions * 8] * 2
    )  # nothing is left of the draw


def test_prompts_get_drawn_lengths_too(loaded: Any) -> None:
    result = measure(
        loaded,
        prompt=16,
        typical=8,
        drawn=[8],
        drawn_prompts=[5],
    )
    assert result["worst"]["prompt_tokens"] == 2 * 4 * 16
    assert result["typical"]["prompt_tokens"] == 2 * 4 * 5


def test_candidates_leave_the_shared_weights_unchanged(loaded: Any) -> None:
    before = [parameter.clone() for parameter in loaded.model.parameters()]
    first = measure(loaded)["gradient_norm"]
    measure(
        loaded,
        {
            "per_device_train_batch_size": 8,
            "use_peft": True,
            "lora_r": 4,
            "beta": 0.1,
        },
    )
    measure(loaded, {"bf16": True})
    again = measure(loaded)
    assert again["gradient_norm"] == first > 0
    assert again["effective"]["use_peft"] is False
    assert all(
        (was == now).all() for was, now in zip(before, loaded.model.parameters(), strict=True)
    )
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_spoilt_weights_are_rebuilt(loaded: Any) -> None:
    import torch

    first = measure(loaded)["gradient_norm"]
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError):
        measure(loaded)
    assert measure(loaded)["gradient_norm"] == first


def test_an_adapter_of_the_load_is_trained(loaded: Any, tmp_path: Path) -> None:
    trl = adapter()
    adapter_settings = {
        "lora_r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    adapted = trl.load(load_request(tmp_path, adapter=adapter_settings), events_stage()[0])
    effective = measure(adapted)["effective"]
    assert (effective["use_peft"], effective["lora_r"], effective["lora_alpha"]) == (True, 4, 16)
    assert effective["lora_target_modules"] == ["q_proj", "v_proj"]
    assert effective["trainable_parameters"] == 2 * (4 * (128 + 128) + 4 * (128 + 64))


def test_a_reference_model_is_resident_and_scored(loaded: Any) -> None:
    result = measure(loaded, {"beta": 0.1})
    assert result["worst"]["phase_seconds"]["score"] > 0
    assert result["effective"]["beta"] == 0.1
    weight_bytes = 4 * result["effective"]["parameters"]  # float32
    part_bytes = result["model_bytes"]
    without = measure(loaded)["model_bytes"]
    assert part_bytes["gradients"] == weight_bytes
    assert part_bytes["optimizer"] == 2 * weight_bytes
    assert (
        part_bytes["weights"]
        == part_bytes["reference_weights"]
        == pytest.approx(weight_bytes, rel=0.01)
    )  # and its positions' frequencies
    assert without == {
        name: size for name, size in part_bytes.items() if not name.startswith("reference")
    }


def test_slow_candidates_stop_once_they_are_known_to_fit(loaded: Any) -> None:
    plan = {"timed_cycles": 6, "optimizer_steps": 3, "stop_below_tokens_per_second": 1e9}
    result = measure(loaded, plan=plan)
    assert result["worst"]["cut_short"] is True
    assert result["optimizer_steps"] == 3
    plan["stop_below_tokens_per_second"] = 1e-9
    assert measure(loaded, plan=plan)["worst"]["cut_short"] is False


def test_nothing_is_written_to_the_users_output_folder(loaded: Any, tmp_path: Path) -> None:
    output = tmp_path / "mine"
    settings = {
        "output_dir": str(output),
        "report_to": ["tensorboard"],
        "save_strategy": "steps",
        "save_steps": 1,
        "push_to_hub": True,
    }
    measure(
        loaded,
        {
            **settings,
            "log_completions": True,
            "logging_steps": 1,
            "num_train_epochs": 9,
        },
        plan={"save_checkpoint": True},
    )
    assert not output.exists()
    assert list(loaded.scratch.rglob("checkpoint-*")) == []


def test_the_users_prompts_and_rewards_are_used(
    loaded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = inside("synthetic").write_prompts(
        tmp_path / "sums",
        rows=6,
        shortest=3,
        longest=3,
    )
    (tmp_path / "my_rewards.py").write_text(
        "import time\nSEEN = []\n\ndef patient(completions, answer, **_):\n   "
        " SEEN.extend(answer)\n    time.sleep(0.05)\n    return [float(i) for i in"
        " range(len(completions))]\n"
    )
    monkeypatch.chdir(tmp_path)
    sources = {
        "dataset": {"dataset_name": str(data)},
        "reward_funcs": ["my_rewards.patient", "think_format_reward"],
    }
    result = measure(loaded, {"reward_weights": [1.0, 0.5]}, prompt=100, typical=4, **sources)
    # Two batches of 0.05 s; a busy machine wakes a sleeper late.
    assert (
        0.1 <= result["worst"]["user_reward_seconds"] < result["worst"]["phase_seconds"]["reward"]
    )
    assert result["worst"]["prompt_tokens"] == 2 * 4 * 100
    assert result["typical"]["prompt_tokens"] < 2 * 4 * 100  # the user's own, as long as they are
    import my_rewards  # type: ignore[import-not-found]

    answers = {
        json.loads(line)["answer"] for line in (data / "train.jsonl").read_text().splitlines()
    }
    assert set(my_rewards.SEEN) <= answers


def test_a_split_too_short_for_one_generation_batch_is_an_error(
    loaded: Any, tmp_path: Path
) -> None:
    data = inside("synthetic").write_prompts(tmp_path / "few", rows=3)
    with pytest.raises(
        ValueError, match=r"too few rows \(3\): one generation batch takes 4 different prompts"
    ):
        measure(loaded, {"per_device_train_batch_size": 16}, dataset={"dataset_name": str(data)})


def test_settings_that_the_framework_rejects_are_errors(loaded: Any) -> None:
    with pytest.raises(TypeError, match="have no setting max_prompt_length"):
        measure(loaded, {"max_prompt_length": 9})
    with pytest.raises(ValueError, match="num_generations"):
        measure(loaded, {"per_device_train_batch_size": 3})
    with pytest.raises(ValueError, match="vllm_mode='server' needs a server of its own"):
        measure(loaded, {"use_vllm": True, "vllm_mode": "server"})


def test_predicted_exhaustion_ends_early_and_memory_is_freed(tmp_path: Path) -> None:
    """Checkpointing is off, so each layer keeps its activations: visible after four of eight
    layers.
    """
    config = inside("synthetic").tiny_config(layers=8, hidden=256)
    roomy = measure_request({"per_device_train_batch_size": 4}, prompt=64, completion=8)
    tight = {"per_device_train_batch_size": 64, "gradient_checkpointing": False}
    too_large = measure_request(tight, prompt=256, completion=8)
    document = {
        "load": load_request(tmp_path, config=config),
        "measures": [roomy, too_large, roomy],
        "limit_bytes": 900 * 2**20,
    }
    first, failed, again = run_apart(document, tmp_path)[0]["measures"]
    assert failed["error"] == "LimitForeseen"
    assert failed["phase"] == "forward"
    assert "of 8 memory is" in failed["text"]
    assert "over the limit of 943718400 bytes" in failed["text"]
    assert failed["partial"]["optimizer_steps"] == 0
    assert failed["partial"]["memory"]["peak_bytes"] < 1.3 * 900 * 2**20
    assert failed["held_after"] - first["held_after"] < 32 * 2**20
    assert again["result"]["gradient_norm"] == first["result"]["gradient_norm"]


def test_an_allocation_that_fails_names_its_phase_and_the_next_candidate_runs(
    tmp_path: Path,
) -> None:
    roomy = measure_request(prompt=32)
    too_large = measure_request({"per_device_train_batch_size": 64}, prompt=512, completion=4)
    document = {
        "load": load_request(tmp_path),
        "measures": [roomy, too_large, roomy],
        "growth_bytes": 150 * 2**20,
    }
    first, failed, again = run_apart(document, tmp_path)[0]["measures"]
    assert failed["error"] == "RuntimeError"
    assert "can't allocate memory" in failed["text"]
    assert failed["phase"] in PHASES_OF_EVERY_RUN
    assert again["result"]["gradient_norm"] == first["result"]["gradient_norm"]


def test_two_ranks_share_the_work_and_stop_together(tmp_path: Path) -> None:
    hopeless = {"timed_cycles": 6, "stop_below_tokens_per_second": 1e9}
    measures = [
        measure_request(),
        measure_request({"use_peft": True}),
        measure_request(plan=hopeless),
    ]
    answers = run_apart({"load": load_request(tmp_path), "measures": measures}, tmp_path, ranks=2)
    results = [[measure["result"] for measure in answer["measures"]] for answer in answers]
    for result in (result for of_rank in results for result in of_rank):
        assert result["world_size"] == 2
        assert result["effective"]["generation_batch_size"] == 8
        assert set(result["worst"]["cycle_loss_tokens"]) == {4 * 8}
    for first, second in zip(*results, strict=True):
        assert first["gradient_norm"] == second["gradient_norm"]
        assert first["worst"]["cut_short"] == second["worst"]["cut_short"]
    assert [result["worst"]["cut_short"] for result in results[0]] == [False, False, True]


def vllm_document(folder: Path, *measures: dict[str, Any]) -> dict[str, Any]:
    return {
        "load": load_request(folder, engine=engine_request()),
        "measures": list(measures),
        "limit_bytes": 3 * 2**30,
    }


VLLM = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 64}


def check_vllm(answer: dict[str, Any]) -> None:
    """Check that the gradient does not depend on the split of the generation batch."""
    results = [measure["result"] for measure in answer["measures"]]
    for result in results:
        check_speed(result["worst"], cycles=2, tokens=4 * 8)
        assert {"sync", "score", *PHASES_OF_EVERY_RUN} <= {
            p for p, s in result["worst"]["phase_seconds"].items() if s > 0
        }
        assert (
            "load" not in result["memory"]["phase_peak_bytes"]
        )  # no engine was built after the load
        assert result["gradient_norm"] == pytest.approx(results[0]["gradient_norm"], rel=1e-5)
        effective = result["effective"]
        assert (effective["max_num_seqs"], effective["vllm_max_model_length"]) == (4, 64)
        assert effective["distributed_type"] == "NO"
    # The utilisation is a share of the probe's own limit.
    assert 0.8 * 0.3 < answer["load_memory"]["peak_bytes"] / (3 * 2**30) < 1.2 * 0.3


@needs_vllm
def test_one_vllm_engine_serves_candidates_one_after_another(tmp_path: Path) -> None:
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    measures = [
        measure_request({**VLLM, **settings})
        for settings in ({}, cut, {"gradient_checkpointing": False})
    ]
    check_vllm(run_apart(vllm_document(tmp_path, *measures), tmp_path)[0])


@needs_vllm
def test_vllm_ends_completions_at_drawn_lengths(tmp_path: Path) -> None:
    drawn = measure_request(
        VLLM,
        completion=12,
        typical=6,
        drawn=DRAWN,
        plan={"varied_lengths": True},
    )
    later = measure_request(
        {**VLLM, "gradient_accumulation_steps": 2},
        completion=12,
        typical=6,
        drawn=DRAWN,
    )
    first, second = (
        measure["result"]
        for measure in run_apart(vllm_document(tmp_path, drawn, later), tmp_path)[0]["measures"]
    )
    check_speed(first["worst"], cycles=2, tokens=4 * 12)
    assert first["exercised"]["varied_generations"] == 4
    check_drawn(first["typical"], 4)
    check_drawn(second["typical"], 8)


@needs_vllm
def test_a_vllm_window_too_small_fails_in_load_and_the_next_engine_comes_up(tmp_path: Path) -> None:
    starved = measure_request({**VLLM, "vllm_gpu_memory_utilization": 0.1})
    request = measure_request({**VLLM, "per_device_train_batch_size": 8})
    failed, served = run_apart(vllm_document(tmp_path, starved, request), tmp_path)[0]["measures"]
    assert failed["error"] == "ValueError"
    assert "memory" in failed["text"]
    assert failed["phase"] == "load"
    assert served["result"]["effective"]["max_num_seqs"] == 8


def versions() -> list[str]:
    """Return the releases that are here, oldest first."""
    if not OVERLAYS:
        return []
    return sorted(path.name.removeprefix("trl-") for path in Path(OVERLAYS).glob("trl-*"))


def oldest_first() -> list[Any]:
    """Return the releases as parameters: in every run the oldest, which differs most."""
    oldest, *later = versions() or [""]
    return [oldest, *[pytest.param(version, marks=pytest.mark.long) for version in later]]


@pytest.mark.skipif(
    not versions(), reason="AUTOTUNE_TRL_OVERLAYS names no folder with other releases of TRL"
)
@pytest.mark.parametrize("version", oldest_first())
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_other_releases_of_trl(
    version: str,
    engine: str,
    tmp_path: Path,
) -> None:
    release = Path(OVERLAYS or "") / f"trl-{version}"
    if engine == "vllm":
        if find_spec("vllm") is None:
            pytest.skip("no vLLM here")
        answer = run_apart(
            vllm_document(tmp_path, *[measure_request(VLLM)] * 2), tmp_path, release=release
        )[0]
        check_vllm(answer)
    else:
        measures = [measure_request({"beta": 0.1}), measure_request({"use_peft": True}, typical=4)]
        answer = run_apart(
            {"load": load_request(tmp_path), "measures": measures}, tmp_path, release=release
        )[0]
        for measure in answer["measures"]:
            check_speed(measure["result"]["worst"], cycles=2, tokens=4 * 8)
            assert set(measure["result"]["memory"]["phase_peak_bytes"]) >= PHASES_OF_EVERY_RUN
            assert measure["result"]["effective"]["longest_prompt_seen"] == 16
    assert answer["versions"]["trl"] == version


def test_the_supported_range_holds_the_installed_release() -> None:
    import trl
    from packaging.version import Version

    oldest, newest = adapter().supported()
    assert Version(oldest) <= Version(trl.__version__) <= Version(newest)
