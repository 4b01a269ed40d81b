"""unsloth: TRL's trainers, patched, on one GPU. It has no command line, so a script is written and
started.

Written for unsloth 2026.10.9 (`models/loader.py`, `models/llama.py`, `models/rl.py`,
`unsloth_zoo/vllm_utils.py`). unsloth rewrites settings without an error: the micro-batch becomes
`num_generations` if groups are incomplete, and standby overrides vLLM's share. Such settings are
refused, and the script records its effective configuration.

Its kernels replace layers, loss and checkpointing. They need at most the memory of a plain step,
the estimate and its upper end, and at least the training state, the lower end.
"""

from __future__ import annotations

import json
import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.composition import EngineSettings
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Settings, count_of, model_path, share_of
from autotune.frameworks.launched_run import (
    OUT,
    SYNTHETIC_ROWS,
    Launch,
    ReportedSettings,
    probe_steps,
    synthetic_prompts,
    synthetic_texts,
)
from autotune.frameworks.transformers_trainer import N_SYNTHETIC_ROWS, TransformersTrainer

OF_THE_MODEL = ("max_seq_length", "load_in_4bit", "full_finetuning", "offload_embedding")
OF_THE_ENGINE = ("fast_inference", "gpu_memory_utilization", "float8_kv_cache")
NOT_IN_CONFIG = frozenset(
    {
        *OF_THE_MODEL,
        *OF_THE_ENGINE,
        "lora_rank",
        "use_gradient_checkpointing",
        "vllm_standby",
        "max_prompt_length",
    }
)
"""Settings that the trainer's configuration class lacks."""

FUSED_PARTS = ("activations", "logits")
"""Memory that the kernels can avoid: chunked losses, and checkpoints offloaded to the host."""

TRAINER_CLASSES = {"sft": ("SFTTrainer", "SFTConfig"), "grpo": ("GRPOTrainer", "GRPOConfig")}
SCRIPT = Path(__file__).with_name("unsloth_script.txt")
REWARD = '''

def reward(completions, **rest):
    """Replace this by your own reward: it prefers short completions."""
    return [-float(len(completion)) for completion in completions]
'''


class Unsloth(TransformersTrainer):
    """TRL method under unsloth."""

    name = "unsloth"

    def ranks(self, settings: Settings, gpus: int) -> int:
        return 1

    def derived(self, settings: Settings, task: Task) -> Mapping[str, KnobValue]:
        return {"max_seq_length": sum(self.lengths(settings))} if self.online else {}

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        settings, dataset = candidate.settings, task.workload.dataset
        files = {} if dataset is not None else {SYNTHETIC_ROWS: self._synthetic_rows(settings)}
        standby = {
            "UNSLOTH_VLLM_STANDBY": "1",
            "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",
        }  # keeps the given vLLM share
        return Launch(
            argv=(str(task.workload.python), f"{OUT}/train.py"),
            figures=self.figures(settings, task, "log.jsonl", "num_tokens"),
            environment=standby if settings.get("vllm_standby") else {},
            files={"train.py": self._script(settings, task, plan, dataset), **files},
            effective=ReportedSettings(kind="json", file=f"{OUT}/settings.json"),
        )

    def _script(
        self, settings: Settings, task: Task, plan: ProbePlan | None, dataset: str | None
    ) -> str:
        model: dict[str, object] = {
            name: settings[name] for name in (*OF_THE_MODEL, *OF_THE_ENGINE) if name in settings
        }
        if settings.get("fast_inference"):
            model["max_lora_rank"] = settings.get("lora_rank")
        config: dict[str, object] = {
            name: value
            for name, value in settings.items()
            if name not in NOT_IN_CONFIG and value is not None
        }
        config |= {"logging_steps": 1, "report_to": "none", "seed": task.workload.seed}
        if not self.online:
            config["max_length"] = settings["max_seq_length"]
        elif settings.get("fast_inference"):
            config["use_vllm"] = True
        if plan is not None:
            config |= {
                "max_steps": probe_steps(plan) + 1,
                "save_strategy": "no",
                "learning_rate": 0.0,
            }
        adapter: dict[str, object] | None = None
        if not settings.get("full_finetuning"):
            rank = settings.get("lora_rank")
            adapter = {
                "r": rank,
                "lora_alpha": rank,
                "use_gradient_checkpointing": settings["use_gradient_checkpointing"],
            }
        trainer, config_class = TRAINER_CLASSES[self.method]
        title = f"{self.method.upper()} with unsloth: {task.workload.model.name}"
        rows = f'str(OUT / "{SYNTHETIC_ROWS}")' if dataset is None else _literal(dataset)
        return SCRIPT.read_text(encoding="utf-8").format(
            title=repr(title),
            config_class=config_class,
            trainer=trainer,
            model=_literal({"model_name": model_path(task), **model}),
            adapter=_literal(adapter),
            config=_literal(config),
            dataset=rows,
            settings=_literal(sorted(settings)),
            reward=REWARD if self.online else "",
            reward_argument="reward_funcs=reward, " if self.online else "",
        )

    def _synthetic_rows(self, settings: Settings) -> str:
        """Return different rows: of the longest length for SFT, prompts within the limit for
        GRPO.
        """
        if self.online:
            key, texts = (
                "prompt",
                synthetic_prompts(N_SYNTHETIC_ROWS, count_of(settings, "max_prompt_length")),
            )
        else:
            key, texts = (
                "text",
                synthetic_texts(N_SYNTHETIC_ROWS, count_of(settings, "max_seq_length")),
            )
        return "".join(json.dumps({key: text}) + "\n" for text in texts)

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        with_engine, quantised = (
            self.online and bool(settings.get("fast_inference")),
            bool(settings.get("load_in_4bit")),
        )
        rank = count_of(settings, "lora_rank")
        engine = EngineSettings(
            utilization=share_of(settings, "gpu_memory_utilization"),
            max_model_length=sum(self.lengths(settings)),
            max_num_seqs=self.total_rows(settings, task),
            sleep=bool(settings.get("vllm_standby")),
            quantised_bits=4 if quantised else None,
            shares_weights=True,
        )
        adapter = {"lora_r": rank, "lora_alpha": rank, "lora_target_modules": "all-linear"}
        return {
            "adapter": None if settings.get("full_finetuning") else adapter,
            "quantised": quantised,
            "checkpointing": bool(settings.get("use_gradient_checkpointing")),
            "attention": "sdpa",
            "generation": "none" if not self.online else "engine" if with_engine else "trainer",
            "engine": engine if with_engine else None,
            "syncs_adapter_only": True,
            "fused_parts": FUSED_PARTS,
        }

    def lengths(self, settings: Settings) -> tuple[int, int]:
        if self.online:
            return count_of(settings, "max_prompt_length"), count_of(
                settings, "max_completion_length"
            )
        return max(1, count_of(settings, "max_seq_length") - 1), 1


def _literal(value: object) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)


TRAINERS = (Unsloth("sft"), Unsloth("grpo"))
