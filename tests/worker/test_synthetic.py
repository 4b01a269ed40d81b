"""Synthetic models and prompts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.worker import synthetic
from autotune.worker.trl import step_timer, training_data


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    config = {
        **synthetic.tiny_config(vocab=5000),
        "eos_token_id": 4321,
        "bos_token_id": 17,
        "pad_token_id": None,
    }
    folder = synthetic.write_model_folder(tmp_path_factory.mktemp("made") / "model", config)
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_special_tokens_have_the_ids_of_the_config(qwen: Any) -> None:
    assert qwen.eos_token_id == 4321
    assert qwen.convert_tokens_to_ids(synthetic.START) == 17
    assert qwen.pad_token_id not in (4321, 17)


def test_each_id_has_a_text(qwen: Any) -> None:
    assert len(qwen) == 5000
    assert all(isinstance(qwen.decode([token]), str) for token in range(5000))


def test_text_survives_tokenisation(qwen: Any) -> None:
    for text in ("What is 17 + 4 ?", "größer, 数学, 🙂\n\ttabs"):
        assert qwen.decode(qwen(text)["input_ids"]) == text


def test_the_chat_template_starts_the_assistants_turn(qwen: Any) -> None:
    text = qwen.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("special", "end"),
    [
        ({}, 1),
        ({"eos_token_id": [106, 1], "pad_token_id": 0, "bos_token_id": 2}, 106),
        ({"eos_token_id": 262_207}, 262_207),
    ],
)
def test_the_largest_vocabulary_takes_less_than_a_second(
    special: dict[str, Any],
    end: int,
    tmp_path: Path,
) -> None:
    """The limit is processor time, which does not depend on the load of the machine."""
    pytest.importorskip("tokenizers")
    begin = time.process_time()
    synthetic.write_tokenizer(tmp_path, {"vocab_size": 262_208, **special})
    assert time.process_time() - begin < 1
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    table = written["model"]["vocab"]
    assert sorted(table.values()) == list(range(262_208))
    assert table[synthetic.END] == end


def test_a_vocabulary_too_small_and_heads_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 100 cannot hold"):
        synthetic.write_tokenizer("/nowhere", {"vocab_size": 100})
    with pytest.raises(ValueError, match="makes heads of 16; take 32 or more"):
        synthetic.tiny_config(hidden=64, heads=4)


@pytest.mark.slow
def test_the_program_writes_a_loadable_model_and_dataset(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    shape = [
        "--hidden",
        "128",
        "--layers",
        "3",
        "--vocab",
        "600",
        "--prompts",
        str(tmp_path / "sums"),
        "--rows",
        "10",
    ]
    subprocess.run(
        [sys.executable, synthetic.__file__, str(tmp_path / "model"), *shape],
        check=True,
        timeout=120,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    assert model.config.num_hidden_layers == 3
    assert model.get_input_embeddings().weight.shape == (600, 128)
    data = datasets.load_dataset(str(tmp_path / "sums"), cache_dir=str(tmp_path / "cache"))["train"]
    assert len(data) == 10
    first = json.loads((tmp_path / "sums" / "train.jsonl").read_text().splitlines()[0])
    numbers = [int(word) for word in first["prompt"][0]["content"].split() if word.isdigit()]
    assert 8 <= len(numbers) <= 64
    assert sum(numbers) == int(first["answer"])


def test_synthetic_prompts_differ_from_the_start_and_are_long_enough(qwen: Any) -> None:
    prompts = training_data.synthetic_prompts(20, qwen, 64, seed=1)
    texts = [row["prompt"][0]["content"] for row in prompts]
    assert len({text[:8] for text in texts}) == 20
    assert all(len(qwen(text)["input_ids"]) >= 64 for text in texts)
    assert training_data.synthetic_prompts(20, qwen, 64, seed=1) == prompts


@pytest.mark.parametrize(
    ("shape", "optimizer_steps", "generations"),
    [
        ((1, 1, 1), 1, 1),
        ((4, 1, 4), 1, 1),
        ((4, 2, 4), 2, 1),
        ((8, 1, 2), 4, 1),
        ((2, 1, 8), 1, 4),
        ((3, 1, 2), 3, 2),
    ],
)
def test_a_unit_has_whole_cycles_and_whole_optimizer_steps(
    shape: Any,
    optimizer_steps: int,
    generations: int,
) -> None:
    steps, iterations, accumulation = shape
    config = SimpleNamespace(
        steps_per_generation=steps,
        num_iterations=iterations,
        gradient_accumulation_steps=accumulation,
    )
    plan = step_timer.measurement_plan(
        {"warmup_cycles": 1, "timed_cycles": 2, "optimizer_steps": 1}, config
    )
    assert (plan.unit_steps, plan.unit_generations) == (optimizer_steps, generations)
    assert plan.unit_steps * accumulation == plan.unit_generations * steps * iterations


def test_a_plan_has_a_warm_up_and_enough_optimizer_steps() -> None:
    course = step_timer.measurement_plan(
        {"warmup_cycles": 0, "timed_cycles": 2, "optimizer_steps": 6}, None
    )
    assert (course.warmup, course.timed, course.optimizer_steps) == (1, 5, 6)
    rich = SimpleNamespace(
        steps_per_generation=4,
        num_iterations=1,
        gradient_accumulation_steps=1,
    )
    course = step_timer.measurement_plan(
        {"warmup_cycles": 1, "timed_cycles": 3, "optimizer_steps": 2}, rich
    )
    assert (course.warmup, course.timed, course.optimizer_steps) == (1, 3, 16)
