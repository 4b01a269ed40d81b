"""TRL's other trainers, really run: RLOO, SFT and DPO, in the newest and the oldest supported release."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.inside.drive import inside, load_request, measure_request, run_apart

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
MADE_BY_A_RUN = {"forward", "backward", "optimizer"}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
LORA = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": None}


def request_of(method: str, settings: dict[str, Any], *, prompt: int = 24, completion: int = 8, **more: Any) -> dict[str, Any]:
    worded = measure_request(prompt=prompt, completion=completion, **more)
    return {**worded, "settings": {**SMALL, **settings}}


def runs(method: str, folder: Path, *requests: dict[str, Any], load: dict[str, Any] | None = None, **variables: str) -> list[Any]:
    document = {
        "load": load_request(folder / "scratch", method=method, **(load or {})), "measures": list(requests), "traceback": True,
    }  # fmt: skip
    (answer,) = run_apart(document, folder, **variables)
    return [one.get("result") or one for one in answer["measures"]]


def check_rows(result: dict[str, Any], *, tokens: int, row: int) -> None:
    assert "worst" in result, result
    assert result["worst"]["cycle_loss_tokens"] == [tokens] * 2
    assert {phase for phase, seconds in result["worst"]["phase_seconds"].items() if seconds > 0} >= MADE_BY_A_RUN
    ran = result["exercised"]
    assert (ran["watched"], ran["optimizer_steps"], ran["generations"]) == ("offline", 3, 0)
    assert (ran["shortest_prompt"], ran["longest_prompt"]) == (row, row)


def test_sft_padded_packed_and_without_padding(tmp_path: Path) -> None:
    padded, packed, free, saved = runs(
        "sft", tmp_path,
        request_of("sft", {"max_length": 32}),
        request_of("sft", {"max_length": 32, "packing": True}),
        request_of("sft", {"max_length": None, "padding_free": True}),
        request_of("sft", {"max_length": 32}, plan={"save_checkpoint": True}),
    )  # fmt: skip
    for result in (padded, packed, free):
        check_rows(result, tokens=2 * 2 * 31, row=32)  # the first token of a row is predicted by nobody
    assert saved["exercised"]["checkpoint_saves"] == 1
    assert not list((tmp_path / "scratch").rglob("checkpoint-*"))


def test_dpo_scores_its_reference_with_an_adapter_and_without(tmp_path: Path) -> None:
    request = request_of("dpo", {"max_length": 32})
    (whole,) = runs("dpo", tmp_path, request)
    (adapted,) = runs("dpo", tmp_path, request, load={"adapter": LORA})
    for result in (whole, adapted):
        check_rows(result, tokens=2 * 2 * 2 * 8, row=32)  # two answers of 8 tokens for each of the four prompts
        assert result["worst"]["phase_seconds"]["score"] > 0
    assert adapted["effective"]["use_peft"] and not whole["effective"]["use_peft"]
    trained = 4 * adapted["effective"]["trainable_parameters"]  # float32
    held = adapted["model_bytes"]
    assert (held["adapters"], held["gradients"], held["optimizer"]) == (trained, trained, 2 * trained)
    assert "reference_weights" not in held, "the policy without its adapter is its own reference"
    assert whole["model_bytes"]["reference_weights"] == whole["model_bytes"]["weights"]
    assert adapted["effective"]["trainable_parameters"] < whole["effective"]["trainable_parameters"]


def test_rloo_generates(tmp_path: Path) -> None:
    settings = {"num_generations": 2, "max_completion_length": 8, "beta": 0.05}
    (result,) = runs("rloo", tmp_path, request_of("rloo", settings))
    assert result["worst"]["cycle_loss_tokens"] == [2 * 2 * 8] * 2
    assert result["worst"]["phase_seconds"]["rollout"] > 0 and result["worst"]["phase_seconds"]["score"] > 0
    assert result["exercised"]["generations"] == 3


def test_the_users_own_rows_are_brought_to_the_longest(tmp_path: Path) -> None:
    from datasets import Dataset

    folder = tmp_path / "rows"
    Dataset.from_list([{"text": f"{'short ' * (1 + index % 5)}row {index}"} for index in range(16)]).save_to_disk(str(folder))
    data = {"dataset_name": str(folder)}
    (result,) = runs("sft", tmp_path, request_of("sft", {"max_length": 32}, dataset=data))
    check_rows(result, tokens=2 * 2 * 31, row=32)


@pytest.mark.skipif(not OVERLAYS, reason="needs `make trl-overlays`")
@pytest.mark.parametrize("method", ["sft", "dpo", "rloo"])
def test_the_oldest_release(method: str, tmp_path: Path) -> None:
    older = Path(OVERLAYS or "") / "trl-1.0.0"
    settings: dict[str, Any] = {"max_length": 32}
    if method == "rloo":
        settings = {"num_generations": 2, "max_completion_length": 8}
    (result,) = runs(method, tmp_path, request_of(method, settings), PYTHONPATH=str(older))
    assert result["worst"]["cycle_loss_tokens"][0] > 0 and result["optimizer_steps"] == 3


def test_every_method_names_a_trainer_that_exists() -> None:
    methods = inside("adapters.trl_methods")
    for name, method in methods.METHODS.items():
        trainer = methods.trainer_of({"method": name})
        assert [hook for hook in method.hooks if not hasattr(trainer, hook)] == []
