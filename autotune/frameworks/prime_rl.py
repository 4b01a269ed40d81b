"""prime-rl: a trainer with FSDP2 on GPUs of its own, beside vLLM servers and an orchestrator.

Written for prime-rl 0.8.0 (`trainer/model.py`, `trainer/optim.py`,
`trainer/models/layers/lm_head.py`, and its configuration package). Assumptions of the stand-in
step:

- A micro-batch is one packed row of `trainer.model.seq_len` tokens, whatever the completions' lengths.
- Weights are stored in `optimization_dtype`, gathered in bfloat16 and reduced in `reduce_dtype`.
- The fused LM head holds the logits of `fused_lm_head_token_chunk_size` tokens in parts of the
  vocabulary; only hidden states and one figure per token are kept.
- With `ac_offloading`, inputs of checkpointed layers are on the host, except a few in flight.
- With `optim_cpu_offload`, the optimizer's state is on the device during its step only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.files import comments
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.frameworks.base import Settings, model_path
from autotune.frameworks.configuration_files import ABSENT
from autotune.frameworks.framework_facts import filled
from autotune.frameworks.launched_run import OUT, Launch, probe_steps
from autotune.frameworks.stand_in import StandIn

MODEL = "trainer.model"
IN_FLIGHT = 5  # default of `ac_offloading.max_inflight_activations`


class PrimeRl(StandIn):
    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        """Leave offloading out where there is no checkpointing, unless it is held: its default
        would turn that on again.
        """
        workload, name = task.workload, f"{MODEL}.ac_offloading"
        free = name not in workload.held or name in {*workload.stated, *workload.defaults}
        off = {name: False} if free and knobs.get(f"{MODEL}.ac") is False else {}
        return replace(super().complete({**off, **knobs}, task), knobs=knobs)

    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        count, gpus = self.table.count, task.hardware.count
        serves = (
            count(settings, "deployment.num_infer_gpus")
            if "deployment.num_infer_gpus" in settings
            else max(1, gpus // 2)
        )
        rank = self.lora_rank(settings, task)
        found: dict[str, KnobValue] = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # `utils/process.py`
            "deployment.gpus_per_node": gpus,
            "deployment.num_infer_gpus": serves,
            "deployment.num_train_gpus": max(1, gpus - serves),
            "inference.enable_lora": rank > 0,
            **({f"{MODEL}.lora.rank": rank} if rank else {}),
        }
        prompt, completion = (
            settings.get("max_prompt_length"),
            settings.get("orchestrator.train.sampling.max_completion_tokens"),
        )
        if isinstance(prompt, int) and isinstance(completion, int):
            found["orchestrator.seq_len"] = prompt + completion
        return found

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion, which `orchestrator.seq_len` bounds
        together.
        """
        longest = self.table.count(settings, "orchestrator.seq_len")
        given = self.table.count(settings, "orchestrator.train.sampling.max_completion_tokens")
        completion = min(given or longest // 2, longest - 1)
        return longest - completion, completion

    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        count, longest = self.table.count, sum(self.lengths(settings))
        trains, serves = (
            count(settings, f"deployment.num_{part}_gpus") for part in ("train", "infer")
        )
        parallel = max(1, count(settings, f"{MODEL}.cp"))
        budget, rows = (
            count(settings, f"{MODEL}.seq_len"),
            count(settings, "orchestrator.batch_size"),
        )
        packs = -(-rows * longest // max(1, budget))
        return {
            "tokens": -(-budget // parallel),
            "micro_batch": max(1, budget // max(1, longest)),
            "accumulation": max(1, packs * parallel // max(1, trains)),
            "generation_batch": rows,
            "ranks": trains,
            "serves": serves,
            "uses": trains + serves,
        }

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        truth = self.table.truth
        whole = 2 if self.table.text(settings, f"{MODEL}.optimization_dtype") == "bfloat16" else 4
        widths = {"master_bytes": whole, "frozen_master_bytes": whole, "reduce_bytes": 4}
        cuts, rank = (
            truth(settings, f"{MODEL}.reshard_after_forward"),
            settings.get(f"{MODEL}.lora.rank"),
        )
        return {
            "options": {"units": "layers", "head": "unit", "reshard_after_forward": cuts, **widths},
            "held_dtype": "float32" if whole == 4 else "bfloat16",
            # Without a rank there is no adapter, whatever its default.
            "adapter": (
                {"lora_r": rank, "lora_alpha": 32, "lora_target_modules": "all-linear"}
                if rank
                else None
            ),
            "loss_options": {
                "chunk": self.table.count(settings, f"{MODEL}.fused_lm_head_token_chunk_size")
            },
            "activations_in_flight": (
                IN_FLIGHT if truth(settings, f"{MODEL}.ac_offloading") else None
            ),
            "syncs_adapter_only": bool(rank),
            # vLLM's servers pause for new weights and go on.
            "split": self.server(
                settings,
                task,
                self.table.count(settings, "deployment.num_infer_gpus"),
                overlap="stream",
                at_sync="pause",
                batches_ahead=1.0,
                in_flight=self.table.count(settings, "orchestrator.max_inflight_episodes") or None,
            ),
        }

    def toml(self, settings: Settings, prefix: str = "") -> str:
        """Return the settings below a prefix as TOML with dotted keys."""
        named = {
            name.removeprefix(prefix): value
            for name, value in settings.items()
            if name.startswith(prefix)
        }
        own = {
            name: value
            for name, value in named.items()
            if value is not None and name not in self.facts.own_settings
        }
        words = {name: json.dumps(value, ensure_ascii=False) for name, value in own.items()}
        for name, value in own.items():
            if name.removeprefix("trainer.") in (
                "model.ac",
                "model.ac_offloading",
            ):  # a part: an empty table, or absent
                words[name] = "{}" if value else f'"{ABSENT}"'
        return "".join(f"{name} = {word}\n" for name, word in words.items())

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        """Return `rl`; a probe is the trainer alone in its benchmark mode, on full synthetic
        micro-batches.
        """
        settings, python = dict(candidate.settings), str(task.workload.python)
        if plan is None:
            text = self.toml({"model.name": model_path(task), **settings})
            return Launch(
                argv=(python, "-m", "prime_rl.entrypoints.rl", "@", f"{OUT}/recommended.toml"),
                figures=self.facts.figures,
                files={"recommended.toml": text},
            )
        bounds = filled(self.facts.bounded, {"steps": probe_steps(plan) + 1})
        text = self.toml({"trainer.model.name": model_path(task), **settings, **bounds}, "trainer.")
        ranks = self.table.count(settings, "deployment.num_train_gpus")
        argv = (
            python,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "-m",
            "prime_rl.trainer.rl.train",
        )
        return Launch(
            argv=(*argv, "@", f"{OUT}/trainer.toml"),
            figures=self.facts.figures,
            files={"trainer.toml": text},
        )

    def write_files(
        self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None
    ) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            self.title(task),
            (
                f"Written for prime-rl {self.table.version}. Start: rl @ yours.toml @"
                " recommended.toml; yours names environments."
            ),
            (
                "Delete a seq_len at the top of yours: prime-rl refuses it beside the two that it"
                " stands for."
            ),
        ]
        path = folder / "recommended.toml"
        path.write_text(
            comments(lines) + self.launch(candidate, task).files["recommended.toml"],
            encoding="utf-8",
        )
        return [path]


TRAINERS = (PrimeRl("prime-rl", "grpo"),)
