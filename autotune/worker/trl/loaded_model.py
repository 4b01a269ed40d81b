"""State of a rank between its candidates: model, tokenizer, engine and caches of one load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..process_memory import IdleMemory
from ..protocol import Request
from . import base_model
from .rank_environment import is_sharded
from .rollouts import RolloutCache
from .vllm_engines import Engines, Server


@dataclass(kw_only=True)
class LoadedModel:
    """Model, tokenizer, engine and caches of one load, which all candidates share."""

    request: Request
    folder: Path
    scratch: Path
    tokenizer: Any
    scores: bool  # the method trains a model with one output, a score
    model: Any = None  # None if the ranks share one model in shards: each trainer gets a new one
    engines: Engines | None = None
    server: Server | None = None  # vLLM server, on the first rank
    rollout_cache: RolloutCache = field(default_factory=RolloutCache)
    idle_memory: IdleMemory | None = None  # on a GPU: memory after the load
    candidates: int = 0  # number of measured candidates
    # true after a run without proof that the shared weights are still finite
    doubtful: bool = False

    @property
    def device(self) -> str:
        return str(self.request["device"])

    def build_model(self) -> None:
        self.model = self._build(base_model.build)

    def model_for(self, attention: str | None, recorder: Any) -> Any:
        """Return the next trainer's model: fresh modules around the tensors, or new if sharded."""
        if not is_sharded(self.request):
            return base_model.fresh(self.model, attention=attention)
        with recorder.inside("load"):
            model = self._build(base_model.build_sharded)
        if attention is not None:
            model.set_attn_implementation(attention)
        return model

    def another(self) -> Any:
        """Return a second model with its own tensors, as a reference model is."""
        if self.model is None:
            return self._build(base_model.build_sharded)
        return copy.deepcopy(self.model)

    def _build(self, build: Callable[..., Any]) -> Any:
        seed = int(self.request.get("seed", 42))
        return build(
            {**self.request["model"], "scores": self.scores},
            self.folder,
            device=self.device,
            seed=seed,
            trust_remote_code=bool(self.request.get("trust_remote_code")),
        )
