"""Phases of the step, derived from frames alone."""

from __future__ import annotations

from autotune.failures.table import cause_of, phase_of

ORZ, VLLM = "/job/orz/exp_engine/accelerators/inference", "/env/site-packages/vllm/worker"


def test_open_reasoner_zero_restores_its_engines_for_the_weight_sync() -> None:
    frames = [
        (
            f"{ORZ}/vllm_engine.py:backload_to_gpu"
            " self.llm.llm_engine.model_executor.driver_worker.load_gpu()"
        ),
        f"{ORZ}/vllm_worker_wrap.py:load_gpu super()._init_cache_engine()",
        f"{VLLM}/cache_engine.py:_allocate_kv_cache torch.zeros(kv_cache_shape,",
    ]
    assert (phase_of(frames), cause_of(frames)) == ("sync", "kv_cache")


def test_a_cache_of_an_engine_that_starts_is_no_weight_sync() -> None:
    frames = [
        f"{VLLM}/worker.py:_init_cache_engine CacheEngine(",
        f"{VLLM}/cache_engine.py:_allocate_kv_cache torch.zeros(",
    ]
    assert (phase_of(frames), cause_of(frames)) == (None, "kv_cache")
