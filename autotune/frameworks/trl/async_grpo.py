"""TRL's asynchronous GRPO: settings, requests and composition.

Written for `trl.experimental.async_grpo` of TRL 1.16: a trainer, and vLLM's own server (`vllm
serve`) on GPUs that do not train. What is traced is one row of rollouts, the fullest that can
occur.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autotune.core.composition import Composition, SplitEngines
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH, Settings, count_of
from autotune.frameworks.engine_servers import SHARE, served
from autotune.frameworks.trl import async_grpo_rules, requests
from autotune.frameworks.trl.adapter_settings import LORA_SETTINGS, adapter_settings
from autotune.frameworks.trl.field_list import default
from autotune.frameworks.trl.load_settings import load_with
from autotune.frameworks.trl.packed_rows import (
    fullest_row,
    nearest_accumulation,
    rollouts_per_step,
    token_budget,
    window,
)
from autotune.frameworks.trl.precision import engine_dtype, loaded_dtype, precision_settings
from autotune.frameworks.trl.resident_models import NEW_BUFFERS
from autotune.frameworks.trl.settings import (
    ALWAYS_STATED,
    DEFAULT_PROMPT_LENGTH,
    SERVER,
    accumulation,
    is_read,
    ranks_of,
    server_gpus,
    server_parallel,
)
from autotune.frameworks.trl.trainers import (
    MAX_DEFAULT_ACCUMULATION,
    TrlScripted,
)

ASYNC_METHOD = "async-grpo"
SERVED: Mapping[str, KnobValue] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_gpu_memory_utilization": SHARE,
}
"""Settings of TRL's other trainers that this one always has: a server with vLLM's default share."""

NOT_IN_STEP = frozenset(
    {"token_budget", "max_inflight_tasks", "max_staleness", "weight_sync_steps", "queue_maxsize"}
)
"""Settings without effect on the training of one row."""


class TrlAsyncGrpo(TrlScripted):
    """Rollouts of a vLLM server on GPUs of its own, trained on as they arrive."""

    method = space = ASYNC_METHOD
    requires: Mapping[str, str] = {"trl": "trl>=1.16,<1.17"}
    completions_each = 0

    def ranks(self, settings: Settings, gpus: int) -> int:
        return ranks_of({**settings, **SERVED}, gpus)

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        """Return the candidate of these knobs; a knob of None is derived from the others."""
        settings = _settings_of(knobs, task)
        load = load_with(("dtype", "use_peft", *LORA_SETTINGS, *SERVER), settings, task)
        return Candidate(
            knobs=knobs,
            settings=settings,
            load=load,
        )

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        return next(async_grpo_rules.refusals(candidate.settings, task), None)

    def batch_shapes(self, task: Task) -> Iterator[dict[str, KnobValue]]:
        """Yield the accumulation alone, fewest first: it makes the global batch, whatever fills
        a row.
        """
        accumulations: Iterable[KnobValue] = range(1, MAX_DEFAULT_ACCUMULATION + 1)
        accumulation = task.workload.held_values.get(ACCUMULATION)
        if accumulation is not None:
            accumulations = [accumulation]
        for steps in accumulations:
            yield {ACCUMULATION: steps}

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        """Leave the server out, and its GPUs idle: a probe is the trainer alone, with rollouts
        at hand.
        """
        return {
            **super().load_request(candidate, task),
            "server": None,
            "idle": {"gpus": server_gpus(candidate.settings)},
        }

    def probe_request(
        self,
        candidate: Candidate,
        task: Task,
        plan: ProbePlan,
    ) -> Mapping[str, object]:
        return {
            **super().probe_request(candidate, task, plan),
            "dataset": None,
            "reward_funcs": None,
        }

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        """Return the specification of a trace: each micro-batch is the fullest row, by its
        number of rollouts.
        """
        ranks = ranks_of(candidate.settings, task.hardware.count)
        row = fullest_row(candidate.settings, ranks)
        prompt = count_of(candidate.settings, "max_prompt_length")
        request = {**requests.trace_request(candidate, task, prompt, row.completion)}
        settings = request["settings"]
        assert isinstance(settings, dict)
        for name in NOT_IN_STEP:
            settings.pop(name, None)
        settings |= {MICRO_BATCH: row.rollouts, "token_budget": 0}
        if row.groups > 1:
            request["groups"] = row.groups
        return request

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        """Return the policy alone, beside a server that is never waited for while rollouts are
        ahead.

        The completions of a step have the length of the traced ones, with which a row is full.
        """
        settings = candidate.settings
        ranks = ranks_of(settings, task.hardware.count)
        micro = rollouts_per_step(settings, ranks)
        fills_rows = bool(token_budget(settings))
        batch = micro * ranks * (count_of(settings, ACCUMULATION) or 1)
        return replace(
            super().compose(candidate, task),
            micro_batch=micro,
            generation_batch=batch,
            completion_length=fullest_row(settings, ranks).completion,
            split=_server(settings, task, batch),
            attention="flash_attention_3",
            packs_rows=True,
            token_budget=fills_rows,
            steps_by_rows=fills_rows,
            notes=tuple(_notes(settings)),
        )


def _settings_of(knobs: Knobs, task: Task) -> dict[str, KnobValue]:
    """Return all settings; their order is part of a candidate's identity."""
    # 1. Chosen settings and defaults.
    chosen = dict(task.workload.held_values)
    for name, value in knobs.items():
        if value is not None:
            chosen[name] = value
    settings: dict[str, KnobValue] = {"server_gpus": 1, **chosen}
    for name in ALWAYS_STATED[ASYNC_METHOD]:
        settings.setdefault(name, default(name, ASYNC_METHOD))
    settings |= SERVED
    # 2. Lengths and batch shape.
    settings.setdefault("max_prompt_length", DEFAULT_PROMPT_LENGTH)
    settings["vllm_max_model_length"] = window(settings)
    if ACCUMULATION not in chosen:
        ranks = max(1, ranks_of(settings, task.hardware.count))
        per_step = rollouts_per_step(settings, ranks) * ranks
        settings[ACCUMULATION] = accumulation(per_step, task, ASYNC_METHOD)
        if token_budget(settings) and task.workload.global_batch:
            settings[ACCUMULATION] = nearest_accumulation(task.workload.global_batch, per_step)
    # 3. Precision and adapter.
    settings |= precision_settings(chosen, task)
    settings |= adapter_settings(chosen, task)
    dtype = chosen.get("dtype", default("dtype", ASYNC_METHOD))
    settings["dtype"] = loaded_dtype(dtype, task.workload.model.config)
    return {name: value for name, value in settings.items() if is_read(name, settings)}


def _server(
    settings: Settings,
    task: Task,
    batch: int,
) -> SplitEngines:
    """Return vLLM's server. It pauses for new weights, and goes on with what it has begun.

    Rollouts wait in the queue, at most until they are too stale to be used.
    """
    staleness = count_of(settings, "max_staleness")
    generating = count_of(settings, "max_inflight_tasks")
    if generating < 0:  # TRL's default
        ranks = ranks_of(settings, task.hardware.count)
        micro = count_of(settings, MICRO_BATCH)
        steps = count_of(settings, ACCUMULATION)
        generating = max(1, staleness) * micro * steps * ranks
    queue = default("queue_maxsize", ASYNC_METHOD)
    waiting = count_of({"queue_maxsize": queue, **settings}, "queue_maxsize")
    sync_steps = max(1, count_of(settings, "weight_sync_steps"))
    usable = float(staleness * sync_steps)
    return served(
        task.hardware,
        gpus=server_gpus(settings),
        tensor_parallel=server_parallel(settings),
        window=window(settings),
        dtype=engine_dtype(task.workload.model.config),
        utilization=SHARE,
        overlap="stream",
        at_sync="pause",
        batches_ahead=min(usable, (generating + waiting) / batch),
        in_flight=max(1, generating),
    )


def _notes(settings: Settings) -> Iterator[str]:
    yield NEW_BUFFERS
    yield (
        "trains on rollouts of older weights, within max_staleness; a step of this trainer has"
        " never been measured by autotune"
    )
    if settings.get("use_peft"):
        yield (
            "the adapter is merged to be sent; a server with --enable-lora takes it as files, which"
            " is not modelled"
        )
    if token_budget(settings):
        yield (
            "rows are full: shorter completions make more of them in an optimizer step, not fewer"
            " micro-steps"
        )
