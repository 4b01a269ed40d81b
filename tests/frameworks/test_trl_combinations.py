"""Legal and illegal combinations under TRL: each refusal names its reason and an alternative."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.frameworks import trainer
from autotune.frameworks.trl import combinations
from autotune.frameworks.trl.settings import ranks_of
from tests.frameworks.conftest import make_task

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


def task(
    gpus: int = 2, *, local: bool = False, config: dict[str, Any] | None = None, **workload: Any
) -> Task:
    base_task = make_task(gpus, "cuda", tuning="lora", **workload)
    model = replace(base_task.workload.model, config={"num_attention_heads": 28, **(config or {})})
    return Task(
        workload=replace(base_task.workload, model=model),
        hardware=replace(base_task.hardware, here=local),
    )


def reason(job_task: Task, **knobs: Any) -> str | None:
    shape = {"per_device_train_batch_size": 8, "num_generations": 8}
    return trainer("trl").why_illegal(
        trainer("trl").complete({**shape, **knobs}, job_task), job_task
    )


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    "engine", [{}, {"use_vllm": True}, {"use_vllm": True, "vllm_mode": "server"}]
)
def test_every_way_of_spreading_goes_with_every_way_of_generating(
    sharding: str, engine: dict[str, Any]
) -> None:
    """But for FSDP1 with adapters: under full tuning its weights have the names that vLLM knows."""
    assert reason(replace_tuning(task(), "full"), sharding=sharding, **engine) is None


def replace_tuning(job_task: Task, tuning: str) -> Task:
    workload = replace(job_task.workload, tuning=tuning)  # type: ignore[arg-type]
    return replace(job_task, workload=workload)


@pytest.mark.parametrize(
    ("knobs", "config", "fragments"),
    [
        (
            {"sharding": "zero3", "ds3_gather_for_generation": False, "use_vllm": True},
            {},
            ["ds3_gather_for_generation", "vLLM"],
        ),
        ({"sharding": "fsdp1", "use_vllm": True}, {}, ["FSDP1", "adapter", "fsdp2"]),
        ({"sharding": "everywhere"}, {}, ["zero3", "'everywhere'"]),
        (
            {"sharding": "zero2", "offload_optimizer_device": "nvme"},
            {},
            ["offload_optimizer_device", "'nvme'"],
        ),
        ({"use_vllm": True}, GPTQ, ["GPTQ", "merge", "use_vllm=false"]),
        ({"use_vllm": True, "vllm_mode": "server"}, GPTQ, ["GPTQ", "merge"]),
        ({"use_peft": False}, GPTQ, ["GPTQ", "use_peft"]),
        ({"load_in_4bit": True}, GPTQ, ["quantised checkpoint", "gptq"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "server_gpus": 2},
            {},
            ["server_gpus (2)", "none of the 2 GPUs"],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "server_tensor_parallel_size": 2},
            {},
            ["server_tensor_parallel_size (2)", "must divide server_gpus (1)"],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True},
            {},
            ["sleep", "server"],
        ),
        (
            {"use_vllm": True, "vllm_tensor_parallel_size": 2},
            {"num_attention_heads": 7},
            ["(2)", "7 attention heads"],
        ),
        (
            {
                "use_vllm": True,
                "vllm_enable_sleep_mode": True,
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            {},
            ["expandable_segments", "sleep"],
        ),
        (
            {"attn_implementation": "flash_attention_2", "dtype": "float32", "bf16": False},
            {},
            ["flash_attention_2", "bfloat16"],
        ),
    ],
)
def test_what_cannot_be_says_why(
    knobs: dict[str, Any],
    config: dict[str, Any],
    fragments: list[str],
) -> None:
    refused = reason(task(config=config), **knobs)
    assert refused is not None
    for word in fragments:
        assert word in refused


@pytest.mark.parametrize(
    "knobs",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "use_vllm": True},
        {"sharding": "zero3", "ds3_gather_for_generation": False},
        {"sharding": "zero3", "offload_param_device": "cpu", "offload_optimizer_device": "cpu"},
        {"sharding": "zero3", "use_vllm": True, "vllm_enable_sleep_mode": True},
        {"use_vllm": True, "vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True},
        {"gradient_checkpointing_kwargs.use_reentrant": True},
        {"fp16": True},
        {"optim": "paged_adamw_8bit"},
        {
            "load_in_4bit": True,
            "use_vllm": True,
        },  # of a machine that is not here: its vLLM may be one that can
    ],
)
def test_what_can_be_is_legal(knobs: dict[str, Any]) -> None:
    assert reason(task(), **knobs) is None


@pytest.mark.parametrize(
    ("version", "legal"), [("0.20.0", False), ("0.20.1", True), ("0.26.0", True), (None, False)]
)
def test_expandable_segments_beside_sleep_mode_depend_on_vllms_version(
    version: str | None,
    legal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(combinations, "_installed", lambda python: {"vllm": version})
    knobs = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}
    assert (
        reason(task(local=True), **knobs, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        is None
    ) is legal
    # vLLM looks for this spelling alone.
    assert (
        reason(task(local=True), **knobs, PYTORCH_CUDA_ALLOC_CONF="expandable_segments: True")
        is not None
    )


@pytest.mark.parametrize(("gpu", "has"), [("T4", "7.5"), ("V100-32G", "7.0")])
def test_flash_attention_is_refused_where_the_gpu_is_too_old_for_its_kernels(
    gpu: str, has: str
) -> None:
    job_task = task()
    old = replace(job_task, hardware=replace(job_task.hardware, name=gpu))
    refused = reason(
        old,
        attn_implementation="flash_attention_2",
        fp16=True,
        bf16=False,
    )
    assert refused is not None
    assert all(word in refused for word in ("8.0", gpu, has, "sdpa"))
    assert reason(job_task, attn_implementation="flash_attention_2") is None


def test_a_package_that_is_missing_where_it_must_run_is_named() -> None:
    job_task = task(local=True)
    for package, knobs in {
        "flash-attn": {"attn_implementation": "flash_attention_2"},
        "deepspeed": {"sharding": "zero2"},
        "bitsandbytes": {"optim": "adamw_8bit"},
    }.items():
        refused = reason(job_task, **knobs)
        assert (refused is None) == is_installed(package)
        assert refused is None or f"pip install {package}" in refused


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_four_bits_and_vllm_are_refused_exactly_where_vllm_lacks_them() -> None:
    """The rule is by version; the installed vLLM is asked itself."""
    methods = (
        Path(str(find_spec("vllm").origin)).parent
        / "model_executor/layers/quantization/__init__.py"
    ).read_text()  # type: ignore[union-attr]
    refused = reason(task(local=True), load_in_4bit=True, use_vllm=True)
    assert (refused is None) == ('"bitsandbytes"' in methods)
    assert refused is None or "bitsandbytes" in refused


def test_peft_has_no_merge_for_gptq() -> None:
    """Reason for the refusal of GPTQ with vLLM."""
    from peft.tuners.lora.gptq import GPTQLoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert GPTQLoraLinear.merge is BaseTunerLayer.merge


def test_the_topology_is_a_choice_of_its_own_space() -> None:
    trl, job_task, topologies = trainer("trl"), replace_batch(task(4), 64), set()
    for knobs in load_space("grpo-topology").on(4).assignments():
        candidate = trl.complete(knobs, job_task)
        if trl.why_illegal(candidate, job_task) is None:
            topologies.add(
                (
                    knobs["sharding"],
                    knobs.get("vllm_mode"),
                    knobs.get("server_gpus"),
                    knobs.get("vllm_tensor_parallel_size"),
                )
            )
            assert candidate.load["ranks"] == ranks_of(candidate.settings, 4)
    for sharding in ("zero3", "fsdp2", "zero2", "ddp"):
        ways = {tuple(choices) for kind, *choices in topologies if kind == sharding}
        assert ways == {
            (None, None, None),
            ("colocate", None, 1),
            ("colocate", None, 2),
            ("server", 2, None),
        }


def replace_batch(job_task: Task, global_batch: int) -> Task:
    return replace(job_task, workload=replace(job_task.workload, global_batch=global_batch))


def test_one_gpu_is_offered_no_topology() -> None:
    space = load_space("grpo")
    assert "sharding" not in space.on(1) and "sharding" in space.on(2)
    assert {knob.name for knob in space.on(0).remedies} == {"use_peft", "load_in_4bit"}


def test_the_launch_is_part_of_what_is_loaded_and_the_rest_is_not() -> None:
    trl, job_task = trainer("trl"), task()
    shape = {"per_device_train_batch_size": 8}
    plain = trl.complete(shape, job_task).load_key
    for knobs in ({"sharding": "zero2"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        assert trl.complete({**shape, **knobs}, job_task).load_key != plain
    assert trl.complete({**shape, "sharding": "ddp"}, job_task).load_key == plain
    gathers = [
        trl.complete({**shape, "sharding": "zero3", "ds3_gather_for_generation": way}, job_task)
        for way in (True, False)
    ]
    assert gathers[0].load_key == gathers[1].load_key and gathers[0].id != gathers[1].id


def test_dotted_knobs_become_parts_of_trls_own_mappings() -> None:
    trl, job_task = (
        trainer("trl"),
        task(user_settings={"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}),
    )
    candidate = trl.complete(
        {"per_device_train_batch_size": 8, "gradient_checkpointing_kwargs.use_reentrant": True},
        job_task,
    )
    settings = trl.probe_request(candidate, job_task, ProbePlan())["settings"]
    assert settings["gradient_checkpointing_kwargs"] == {
        "preserve_rng_state": False,
        "use_reentrant": True,
    }  # type: ignore[index]


def test_versions_are_asked_once_and_of_the_training_environment() -> None:
    assert combinations.installed(task(local=True)).get("trl") == version("trl")
    assert combinations.installed(task(local=False)) == {}
