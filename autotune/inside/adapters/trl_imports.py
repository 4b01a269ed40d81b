"""TRL's modules, with vLLM or without: it imports vLLM wherever that is installed, which takes ten seconds."""

from __future__ import annotations

import importlib
import sys
from typing import Any

GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
GENERATION = "trl.generation.vllm_generation"


def without_vllm() -> None:
    """TRL imports vLLM wherever it is installed; unless this load generates with it, TRL is told that it is not."""
    utilities: Any = importlib.import_module("trl.import_utils")
    if not hasattr(utilities, "really_is_vllm_available"):
        utilities.really_is_vllm_available = utilities.is_vllm_available
        utilities.is_vllm_available = lambda *_, **__: False


def with_vllm() -> Any:
    """TRL's generation module with vLLM in it, also where it was imported without."""
    utilities: Any = importlib.import_module("trl.import_utils")
    importlib.import_module(GRPO)
    generation = importlib.import_module(GENERATION)
    if hasattr(utilities, "really_is_vllm_available"):
        utilities.is_vllm_available = utilities.really_is_vllm_available
        del utilities.really_is_vllm_available
        generation = importlib.reload(generation)
        for module in (sys.modules[name] for name in (GRPO, RLOO) if name in sys.modules):
            vars(module).update(VLLMGeneration=generation.VLLMGeneration, is_vllm_available=utilities.is_vllm_available)
    if not hasattr(generation, "LLM"):
        raise ImportError("generation by vLLM was asked for, and this environment has no vLLM.")
    return generation
