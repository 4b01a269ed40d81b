"""Memory of an SGLang engine, against lines that its servers logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog.model_lookup import find_model
from autotune.core.composition import EngineSettings
from autotune.core.units import GIB
from autotune.estimate import engine_memory, model_shape, rollout_engine, sglang_engine
from autotune.estimate.engine_passes import graph_bytes
from autotune.estimate.engine_use import EngineUse

LOGS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("sglang_logs.yaml").read_text(encoding="utf-8")
)
LOGGED_POSITIONS = 131072
"""`context_len` of every logged run with a stated fraction."""

STATED = [row for row in LOGS if "tokens" in row]
CAPTURED = [row for row in LOGS if "graphs" in row]


def shape_of(row: dict[str, Any]) -> Any:
    return model_shape.shape(find_model(row["model"]).config)


def name(row: dict[str, Any]) -> str:
    return str(row["model"]).rpartition("/")[2]


@pytest.mark.parametrize("row", STATED, ids=name)
def test_the_cache_is_what_the_log_says(row: dict[str, Any]) -> None:
    ranks, shape = row.get("tensor_parallel", 1), shape_of(row)
    weights = row["free"] - row["after_weights"]
    cache = sglang_engine.cache_bytes(row["free"] * GIB, row["fraction"], weights * GIB)
    assert cache // sglang_engine.cache_bytes_per_token(shape, 2, ranks) == pytest.approx(
        row["tokens"], rel=0.001
    )
    computed = engine_memory.weight_bytes(shape, dtype="bfloat16", tensor_parallel=ranks) / GIB
    assert computed == pytest.approx(weights, abs=0.35) and computed < weights


@pytest.mark.parametrize("row", STATED, ids=name)
def test_the_table_of_requests_is_most_of_what_the_pools_take_besides(row: dict[str, Any]) -> None:
    shape = shape_of(row)
    cache = (
        row["tokens"]
        * sglang_engine.cache_bytes_per_token(shape, 2, row.get("tensor_parallel", 1))
        / GIB
    )
    besides = row["after_weights"] - cache - row["pool_end"]
    table = sglang_engine.request_table_bytes(shape, row["requests"]) / GIB
    assert table * LOGGED_POSITIONS / shape.positions == pytest.approx(besides, abs=0.2)


@pytest.mark.parametrize("row", CAPTURED, ids=name)
def test_captured_graphs_are_in_the_interval(row: dict[str, Any]) -> None:
    estimate = graph_bytes(shape_of(row), 2, row.get("tensor_parallel", 1), row["captured"], 8192)
    assert estimate.low <= row["graphs"] * GIB <= estimate.high


def fitted(**about: Any) -> EngineUse:
    other_bytes = about.pop("other", 0)
    settings = EngineSettings(
        **{
            "utilization": 0.5,
            "max_model_length": 1536,
            "max_num_seqs": 256,
            "kind": "sglang",
            **about,
        }
    )
    return rollout_engine.fit(
        find_model("Qwen2.5-7B").config,
        settings,
        dtype="bfloat16",
        gpu=None,
        device_memory_bytes=80 * GIB,
        other_bytes=other_bytes,
    )


def test_the_share_is_one_of_the_free_memory() -> None:
    unshared, shared = fitted(), fitted(other=20 * GIB)
    assert unshared.kv is not None and shared.kv is not None
    assert unshared.kv.kv_cache_bytes.value - shared.kv.kv_cache_bytes.value == pytest.approx(
        10 * GIB
    )
    assert unshared.failure is None and sum(unshared.parts.values()) == pytest.approx(
        unshared.reserved_bytes.value
    )


def test_weights_beyond_the_share_are_refused_in_its_own_words() -> None:
    small = fitted(utilization=0.15)
    assert small.kv is None and small.sure
    assert small.failure is not None and "increase --mem-fraction-static" in small.failure


def test_graphs_stay_while_it_sleeps_and_need_no_memory_without() -> None:
    asleep = fitted(sleep=True).asleep_bytes
    assert (
        0 < asleep.value < 3 * GIB
        and fitted(sleep=True, eager=True).asleep_bytes.value < asleep.value
    )
    assert fitted().asleep_bytes == fitted().reserved_bytes
