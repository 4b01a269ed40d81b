"""State that a rank keeps between candidates: the model, its tokenizer and the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import process_memory
from . import base_model, engine, rank_environment, vllm_server
from .rollout_reuse import RolloutCache


@dataclass(kw_only=True)
class Loaded:
    """Model, tokenizer and engine of one load."""

    request: Mapping[str, Any]
    folder: Path
    scratch: Path
    model: Any
    tokenizer: Any
    engines: engine.Engines | None = None
    server: vllm_server.Server | None = None  # vLLM server, on the first rank
    run_class: Any = None  # class that runs a candidate; None for that of the method
    rollout_cache: RolloutCache = field(default_factory=RolloutCache)
    idle_memory: process_memory.IdleMemory | None = None  # on a GPU: memory after the load
    candidates: int = 0  # number of measured candidates
    doubtful: bool = False  # true after a run without proof that the shared weights are still finite

    @property
    def device(self) -> str:
        return str(self.request["device"])

    def build_model(self) -> None:
        self.model = self._made(base_model.build)

    def model_for(self, attention: str | None, recorder: Any) -> Any:
        """Return the next trainer's model: fresh modules around the tensors, or new if sharded."""
        if not rank_environment.is_sharded(self.request):
            return base_model.fresh(self.model, attention=attention)
        with recorder.inside("load"):
            made = self._made(base_model.build_sharded)
        if attention is not None:
            made.set_attn_implementation(attention)
        return made

    def another(self) -> Any:
        """Return a second model with its own tensors, as a reference model is."""
        return copy.deepcopy(self.model) if self.model is not None else self._made(base_model.build_sharded)

    def _made(self, build: Callable[..., Any]) -> Any:
        model = {**self.request["model"], "scores": self.request.get("method") == "reward"}
        return build(
            model, self.folder, device=self.device, seed=int(self.request.get("seed", 42)),
            trust_remote_code=bool(self.request.get("trust_remote_code")),
        )  # fmt: skip
