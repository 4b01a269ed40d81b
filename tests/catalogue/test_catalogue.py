"""The data is complete, sourced, and true where it can be checked by arithmetic."""

from __future__ import annotations

import pytest

from autotune.catalogue import KnownModel, gpus, models
from autotune.units import GIB

MODELS = {known.ids[0]: known for known in models()}


def parameters(config: dict[str, int]) -> int:
    """The number of weights of a Llama-like model, counted from its shape alone."""
    hidden, layers, mlp = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    query, kv = heads * head, groups * head
    biases = query + 2 * kv if config["model_type"] == "qwen2" else 0  # type: ignore[comparison-overlap]
    norms = 2 * hidden + (2 * head if config["model_type"] == "qwen3" else 0)  # type: ignore[comparison-overlap]
    layer = 2 * hidden * query + 2 * hidden * kv + 3 * hidden * mlp + norms + biases
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return embeddings + layers * layer + hidden


@pytest.mark.parametrize("known", MODELS.values(), ids=MODELS)
def test_the_shape_has_as_many_weights_as_its_authors_say(known: KnownModel) -> None:
    assert parameters(dict(known.config)) == pytest.approx(known.parameters_billions * 1e9, rel=0.015)  # type: ignore[arg-type]


@pytest.mark.parametrize("known", MODELS.values(), ids=MODELS)
def test_every_model_has_its_sources(known: KnownModel) -> None:
    assert known.source.startswith("https://")
    assert known.page == f"https://huggingface.co/{known.ids[0]}/blob/main/config.json"


def test_the_models_that_were_promised_are_there() -> None:
    promised = [f"Qwen/Qwen2.5-{size}{tail}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B") for tail in ("", "-Instruct")]
    promised += [f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B")]
    promised += ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "mistralai/Mistral-7B-v0.3"]
    promised += ["HuggingFaceTB/SmolLM2-135M"]
    assert set(promised) <= {hub_id for known in models() for hub_id in known.ids}


def test_no_id_is_claimed_twice() -> None:
    ids = [hub_id.lower() for known in models() for hub_id in known.ids]
    assert len(ids) == len(set(ids))


def test_transformers_takes_every_config() -> None:
    transformers = pytest.importorskip("transformers")
    for hub_id, known in MODELS.items():
        config = transformers.AutoConfig.for_model(**dict(known.config))
        assert config.num_hidden_layers == known.config["num_hidden_layers"], hub_id


@pytest.mark.parametrize("gpu", gpus(), ids=[gpu.name for gpu in gpus()])
def test_every_gpu_has_a_source_and_a_plausible_size(gpu: object) -> None:
    assert gpu.source.startswith("https://")  # type: ignore[attr-defined]
    assert 4 * GIB <= gpu.memory_bytes < 256 * GIB  # type: ignore[attr-defined]


def test_sizes_in_names_are_the_sizes() -> None:
    for gpu in gpus():
        _, dash, size = gpu.name.rpartition("-")
        if dash:
            assert gpu.memory_bytes == pytest.approx(int(size.removesuffix("G")) * GIB, rel=0.02)


def test_no_spelling_means_two_gpus() -> None:
    spellings = [spelling.lower() for gpu in gpus() for spelling in (gpu.name, *gpu.aliases)]
    assert len(spellings) == len(set(spellings))
