"""vLLM that wakes up while the trainer's memory is in its place."""

from __future__ import annotations

from parts import engine, fail_at

if __name__ == "__main__":
    message = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:119"
    fail_at("vllm.v1.engine.llm_engine:LLMEngine.wake_up", RuntimeError(message))
    engine().wake_up()
