"""verl's rollout by transformers (`rollout.name=hf`): no engine, the actor generates itself.

`workers/rollout/hf_rollout.py` of verl up to 0.6: the rows of a GPU in chunks of about
`rollout.micro_batch_size`, all of them without it. FSDP gathers each layer for each token, and
computes in bfloat16. The weights are on the device meanwhile, offloaded or not.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.job import Task
from autotune.core.user_script import LaunchScript, stated_number
from autotune.frameworks.base import Values
from autotune.frameworks.stand_in_step import SpecFields
from autotune.frameworks.verl_batches import ROLLOUT

HF_ROLLOUT = "hf"
CHUNK = f"{ROLLOUT}.micro_batch_size"


def generates_by_itself(values: Values) -> bool:
    """Return True if transformers generates with the actor, without an engine."""
    return values.text(f"{ROLLOUT}.name") == HF_ROLLOUT


def with_chunk_of_rows(launch: LaunchScript) -> LaunchScript:
    """Return the launch with the rows that are generated at once beside verl's own settings."""
    rollout = launch.stated.get(f"{ROLLOUT}.name")
    chunk = launch.stated.get(CHUNK)
    if chunk is None or rollout is None or rollout.text != HF_ROLLOUT:
        return launch
    stated = dict(launch.stated)
    del stated[CHUNK]
    return replace(
        launch,
        stated=stated,
        of_copy={**launch.of_copy, CHUNK: chunk},
    )


def own_generation(values: Values, task: Task) -> SpecFields:
    is_offloaded = values.is_on("actor_rollout_ref.actor.fsdp_config.optimizer_offload")
    return {
        "generation": "trainer",
        "generates_in": "bfloat16",
        "gathers_per_token": True,
        "pads_generation": True,
        "rows_at_once": _rows_at_once(task) or None,
        "offloaded_in_rollout": ("optimizer",) if is_offloaded else (),
    }


def _rows_at_once(task: Task) -> int:
    """Return the rows of a chunk as a launch states them; 0: it states none."""
    launch = task.workload.launch
    return 0 if launch is None else stated_number(launch.of_copy.get(CHUNK))


def engine_gpus(values: Values) -> int:
    """Return the GPUs of one engine with its replicas."""
    if generates_by_itself(values):
        return 1
    replicas = max(1, values.count(f"{ROLLOUT}.data_parallel_size"))
    return values.count(f"{ROLLOUT}.tensor_model_parallel_size") * replicas
