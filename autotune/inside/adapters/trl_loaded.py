"""What a rank keeps from one candidate to the next: the model, its tokenizer and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cuda_recovery, trl_engine, trl_launch, trl_model, trl_server
from .trl_imports import with_vllm
from .trl_rollouts import Library


@dataclass(kw_only=True)
class Loaded:
    """What a rank keeps from one candidate to the next."""

    request: Mapping[str, Any]
    folder: Path
    scratch: Path
    model: Any
    tokenizer: Any
    engines: trl_engine.Engines | None = None
    server: trl_server.Server | None = None
    """vLLM's own, which the first rank has."""

    run_class: Any = None
    """What runs a candidate; None for what goes with the method."""

    library: Library = field(default_factory=Library)
    """Rollouts that later candidates may take over."""

    settled: cuda_recovery.Standing | None = None
    """On a GPU, what was held once everything was loaded."""

    candidates: int = 0
    """How many were measured."""

    doubtful: bool = False
    """Whether a run ended without proof that the shared weights are still numbers."""

    @property
    def device(self) -> str:
        return str(self.request["device"])

    def build_model(self) -> None:
        self.model = self._made(trl_model.build)

    def model_for(self, attention: str | None, stage: Any) -> Any:
        """The one that the next trainer takes: fresh modules around the loaded tensors, or a new one where it is taken apart."""
        if not trl_launch.spreads(self.request):
            return trl_model.fresh(self.model, attention=attention)
        with stage.inside("load"):
            made = self._made(trl_model.spread)
        if attention is not None:
            made.set_attn_implementation(attention)
        return made

    def another(self) -> Any:
        """A second model with tensors of its own: what a reference model costs."""
        return trl_model.twin(self.model) if self.model is not None else self._made(trl_model.spread)

    def _made(self, how: Callable[..., Any]) -> Any:
        return how(
            self.request["model"],
            self.folder,
            device=self.device,
            seed=int(self.request.get("seed", 42)),
            trust_remote_code=bool(self.request.get("trust_remote_code")),
        )


def install_engines(loaded: Loaded, stage: Any) -> Any:
    cpu = loaded.device == "cpu"
    trl_engine.prepare_environment(cpu=cpu)
    generation = with_vllm()
    loaded.engines = trl_engine.Engines(stage, cpu=cpu, random_weights=loaded.request["model"]["weights"] == "random")
    loaded.engines.install(generation)
    return generation


def start_engine(loaded: Loaded, stage: Any) -> None:
    generation = install_engines(loaded, stage)
    trl_engine.start(generation, loaded.model, loaded.tokenizer, loaded.request, cpu=loaded.device == "cpu")
