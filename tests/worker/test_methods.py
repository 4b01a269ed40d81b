"""Runs of TRL's other trainers: RLOO, SFT, DPO and online DPO, newest and oldest release."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import inside, load_request, measure_request, run_apart

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
MADE_BY_A_RUN = {"forward", "backward", "optimizer"}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
LORA = {
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": None,
}


def request_of(
    method: str, settings: dict[str, Any], *, prompt: int = 24, completion: int = 8, **options: Any
) -> dict[str, Any]:
    worded = measure_request(prompt=prompt, completion=completion, **options)
    return {**worded, "settings": {**SMALL, **settings}}


def runs(
    method: str,
    folder: Path,
    *requests: dict[str, Any],
    load: dict[str, Any] | None = None,
    release: Path | None = None,
) -> list[Any]:
    document = {
        "load": load_request(folder / "scratch", method=method, **(load or {})),
        "measures": list(requests),
        "traceback": True,
    }
    (answer,) = run_apart(document, folder, release=release)
    return [measure.get("result") or measure for measure in answer["measures"]]


def check_rows(
    result: dict[str, Any],
    *,
    tokens: int,
    row: int,
) -> None:
    assert "worst" in result, result
    assert result["worst"]["cycle_loss_tokens"] == [tokens] * 2
    assert {
        phase for phase, seconds in result["worst"]["phase_seconds"].items() if seconds > 0
    } >= MADE_BY_A_RUN
    ran = result["exercised"]
    assert (ran["watched"], ran["optimizer_steps"], ran["generations"]) == ("offline", 3, 0)
    assert (ran["shortest_prompt"], ran["longest_prompt"]) == (row, row)


def test_sft_padded_packed_and_without_padding(tmp_path: Path) -> None:
    padded, packed, free, saved = runs(
        "sft",
        tmp_path,
        request_of("sft", {"max_length": 32}),
        request_of("sft", {"max_length": 32, "packing": True}),
        request_of("sft", {"max_length": None, "padding_free": True}),
        request_of("sft", {"max_length": 32}, plan={"save_checkpoint": True}),
    )
    for result in (padded, packed, free):
        check_rows(
            result, tokens=2 * 2 * 31, row=32
        )  # the first token of a row is predicted by nobody
    assert saved["exercised"]["checkpoint_saves"] == 1
    assert not list((tmp_path / "scratch").rglob("checkpoint-*"))


def test_dpo_scores_its_reference_with_an_adapter_and_without(tmp_path: Path) -> None:
    request = request_of("dpo", {"max_length": 32})
    (full,) = runs("dpo", tmp_path, request)
    (adapted,) = runs("dpo", tmp_path, request, load={"adapter": LORA})
    for result in (full, adapted):
        check_rows(
            result, tokens=2 * 2 * 2 * 8, row=32
        )  # two answers of 8 tokens for each of the four prompts
        assert result["worst"]["phase_seconds"]["score"] > 0
    assert adapted["effective"]["use_peft"]
    assert not full["effective"]["use_peft"]
    trained = 4 * adapted["effective"]["trainable_parameters"]  # float32
    part_bytes = adapted["model_bytes"]
    assert (part_bytes["adapters"], part_bytes["gradients"], part_bytes["optimizer"]) == (
        trained,
        trained,
        2 * trained,
    )
    assert "reference_weights" not in part_bytes, (
        "the policy without its adapter is its own reference"
    )
    assert full["model_bytes"]["reference_weights"] == full["model_bytes"]["weights"]
    assert adapted["effective"]["trainable_parameters"] < full["effective"]["trainable_parameters"]


def test_kto_scores_answers_and_their_neighbours(tmp_path: Path) -> None:
    request = request_of("kto", {"max_length": 32})
    (full, one_pass) = runs(
        "kto",
        tmp_path,
        request,
        request_of("kto", {"max_length": 32, "loss_type": "apo_zero_unpaired"}),
    )
    for result in (full, one_pass):
        check_rows(result, tokens=2 * 2 * 8, row=32)
        assert result["worst"]["phase_seconds"]["score"] > 0
        assert result["model_bytes"]["reference_weights"] == result["model_bytes"]["weights"]
        assert result["gradient_norm"] is not None


def test_a_reward_model_has_one_score_and_no_head(tmp_path: Path) -> None:
    (scored,) = runs("reward", tmp_path, request_of("reward", {"max_length": 32}))
    check_rows(scored, tokens=2 * 2 * 2 * 32, row=32)
    assert "reference_weights" not in scored["model_bytes"]
    assert scored["gradient_norm"] is not None


def test_asynchronous_grpo_trains_on_rollouts_at_hand(tmp_path: Path) -> None:
    settings = {"num_generations": 2, "max_completion_length": 8, "token_budget": None}
    filled = request_of("async-grpo", {**settings, "token_budget": 73})
    counted = request_of("async-grpo", {**settings, "token_budget": 0})
    (longest, full, by_count) = runs(
        "async-grpo", tmp_path, request_of("async-grpo", settings), filled, counted
    )
    for result, rollouts in (
        (longest, 1),
        (full, 3),
        (by_count, 2),
    ):  # 73: two of one prompt and one of another
        assert "worst" in result, result
        assert result["worst"]["cycle_loss_tokens"] == [2 * rollouts * 8] * 2
        assert {
            phase for phase, seconds in result["worst"]["phase_seconds"].items() if seconds > 0
        } >= {*MADE_BY_A_RUN, "sync"}
        assert result["effective"]["attn_implementation"] == "tree_fa3"
        assert result["gradient_norm"] > 0
    (adapted,) = runs("async-grpo", tmp_path, filled, load={"adapter": LORA})
    assert adapted["effective"]["use_peft"]
    assert adapted["gradient_norm"] is not None


def test_rloo_generates(tmp_path: Path) -> None:
    settings = {"num_generations": 2, "max_completion_length": 8, "beta": 0.05}
    (result,) = runs("rloo", tmp_path, request_of("rloo", settings))
    assert result["worst"]["cycle_loss_tokens"] == [2 * 2 * 8] * 2
    assert result["worst"]["phase_seconds"]["rollout"] > 0
    assert result["worst"]["phase_seconds"]["score"] > 0
    assert result["exercised"]["generations"] == 3


def test_online_dpo_generates_and_scores_pairs(tmp_path: Path) -> None:
    """Reference: a second copy under full tuning, the policy without its adapter else."""
    reward = write_reward_model(tmp_path / "reward")
    settings = {"max_length": 32, "gradient_checkpointing": False}
    plain = request_of("online-dpo", settings)
    plain_result, judged = runs(
        "online-dpo",
        tmp_path,
        plain,
        {**plain, "dataset": {"reward_model_name_or_path": str(reward)}},
    )
    (adapted,) = runs(
        "online-dpo", tmp_path, request_of("online-dpo", settings), load={"adapter": LORA}
    )
    for result in (plain_result, judged, adapted):
        assert result["worst"]["cycle_loss_tokens"] == [2 * 2 * 2 * 8] * 2, (
            result
        )  # two completions to each of four prompts
        seconds = result["worst"]["phase_seconds"]
        assert all(seconds[phase] > 0 for phase in ("rollout", "reward", "score", *MADE_BY_A_RUN))
        ran = result["exercised"]
        assert (ran["optimizer_steps"], ran["generations"]) == (
            3,
            6,
        )  # each of two micro-steps has one of its own
        assert (ran["shortest_prompt"], ran["longest_prompt"]) == (24, 24)
        assert (ran["shortest_completion"], ran["longest_completion"]) == (8, 8)
    assert (
        plain_result["model_bytes"]["reference_weights"] == plain_result["model_bytes"]["weights"]
    )
    assert "reference_weights" not in adapted["model_bytes"]
    assert "reward_weights" not in plain_result["model_bytes"]
    assert_is_held(judged["model_bytes"]["reward_weights"], reward)


def test_a_reward_model_of_grpo_has_parts_of_its_own(tmp_path: Path) -> None:
    """Classifier that the trainer reads from disk and that scores each completion."""
    reward = write_reward_model(tmp_path / "reward")
    settings = {"num_generations": 2, "max_completion_length": 8, "beta": 0.05}
    data = {"reward_model_name_or_path": str(reward)}
    (result,) = runs("grpo", tmp_path, request_of("grpo", settings, dataset=data))
    part_bytes = result["model_bytes"]
    assert_is_held(part_bytes["reward_weights"], reward)
    assert part_bytes["reference_weights"] == part_bytes["weights"]
    assert part_bytes["optimizer"] == 2 * part_bytes["gradients"]
    assert result["worst"]["phase_seconds"]["reward"] > 0


def write_reward_model(folder: Path) -> Path:
    """Write a classifier with one output and a tokenizer, smaller than the policy."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    made_up = inside("synthetic")
    made_up.write_model_folder(folder, made_up.tiny_config(layers=1))
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def assert_is_held(weighed: int, folder: Path) -> None:
    """Compare with the tensors on disk plus a few unsaved buffers."""
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        names = file.keys()
        written = sum(file.get_tensor(name).nbytes for name in names)
    assert written <= weighed < written + 1024


def test_the_users_rows_get_the_forced_length(tmp_path: Path) -> None:
    from datasets import Dataset

    folder = tmp_path / "rows"
    Dataset.from_list(
        [{"text": f"{'short ' * (1 + index % 5)}row {index}"} for index in range(16)]
    ).save_to_disk(str(folder))
    data = {"dataset_name": str(folder)}
    (result,) = runs("sft", tmp_path, request_of("sft", {"max_length": 32}, dataset=data))
    check_rows(result, tokens=2 * 2 * 31, row=32)


@pytest.mark.skipif(not OVERLAYS, reason="needs `make trl-overlays`")
@pytest.mark.parametrize(
    "method",
    [
        "sft",
        "dpo",
        "online-dpo",
        pytest.param("rloo", marks=pytest.mark.long),
        pytest.param("reward", marks=pytest.mark.long),
    ],
)
def test_the_oldest_release(method: str, tmp_path: Path) -> None:
    older = Path(OVERLAYS or "") / "trl-1.0.0"
    settings: dict[str, Any] = {"max_length": 32}
    if method == "rloo":
        settings = {"num_generations": 2, "max_completion_length": 8}
    (result,) = runs(method, tmp_path, request_of(method, settings), release=older)
    assert result["worst"]["cycle_loss_tokens"][0] > 0
    assert result["optimizer_steps"] == 3


def test_each_method_has_a_trainer() -> None:
    methods = inside("trl.methods")
    generation = importlib.import_module("trl.generation.vllm_generation")
    for name in methods.RUNS_BY_METHOD:
        trainer_class = methods.trainer_of({"method": name})
        inside("trl.seams").check(trainer_class, generation, "installed")


def test_a_release_without_the_trainer_is_answered_with_those_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = inside("trl.methods")
    monkeypatch.setattr(methods.RUNS_BY_METHOD["kto"], "module", "trl.trainer.of_another_release")
    with pytest.raises(ImportError, match=r"releases 1\.8\.0 to .* have: pip install 'trl=="):
        methods.trainer_of({"method": "kto"})
