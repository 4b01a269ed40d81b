"""Former spellings of settings are read for every release whose entry point is accepted, and what
nobody knows is said at the top of the answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune import frameworks
from autotune.frameworks.changed_launch import changed_script
from autotune.frameworks.launch_kinds import launch_kinds
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

SKYRL_BEFORE = """
uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \\
  trainer.policy.model.path="Qwen/Qwen2.5-0.5B-Instruct" \\
  trainer.placement.policy_num_gpus_per_node=4 \\
  generator.num_inference_engines=2 \\
  generator.inference_engine_tensor_parallel_size=2 \\
  generator.gpu_memory_utilization=0.6 \\
  generator.max_num_seqs=64 \\
  generator.enforce_eager=true \\
  generator.backend=vllm \\
  generator.async_engine=true \\
  trainer.use_sample_packing=false
"""
"""Keys of the configuration files before SkyRL 0.1, with values that are no defaults."""


def request_of(folder: Path, text: str, **flags: Any) -> ParsedRequest:
    script = folder / "run.sh"
    script.write_text(text)
    return parse_request(
        Flags(
            from_command=str(script),
            gpus="4xA100-80G",
            mode="predict",
            **flags,
        )
    )


def test_skyrls_keys_before_its_dataclasses(tmp_path: Path) -> None:
    request = request_of(tmp_path, SKYRL_BEFORE)
    settings = candidate_of_job(request).settings
    engine = "generator.inference_engine"
    assert settings[f"{engine}.tensor_parallel_size"] == 2
    assert settings[f"{engine}.gpu_memory_utilization"] == 0.6
    assert settings[f"{engine}.max_num_seqs"] == 64
    assert settings[f"{engine}.enforce_eager"] is True
    assert settings["trainer.remove_microbatch_padding"] is False
    assert settings[f"{engine}.num_engines"] == 2, "4 GPUs / 2, as the script has it"
    assert not any("not known" in line for line in request.assumed)


def test_a_changed_script_keeps_its_own_spelling(tmp_path: Path) -> None:
    launch = request_of(tmp_path, SKYRL_BEFORE).job.task.workload.launch
    assert launch is not None
    text = changed_script(
        launch,
        {
            "generator.inference_engine.gpu_memory_utilization": 0.5,
            "generator.inference_engine.max_num_batched_tokens": 4096,
        },
    )
    assert "generator.gpu_memory_utilization=0.5" in text
    assert "generator.max_num_batched_tokens=4096" in text, "added in the spelling of its release"
    assert "generator.inference_engine.gpu" not in text


@pytest.mark.parametrize("kind", launch_kinds(), ids=lambda kind: kind.framework)
def test_every_former_spelling_leads_to_a_setting(kind: Any) -> None:
    if kind.only_logs or kind.framework == "trl":
        return
    for name in {*kind.methods.values(), *kind.modules} - {"any"}:
        trainer = frameworks.trainer(kind.framework, name)
        settings_of_release = {
            *trainer.fields(),
            *trainer.canonical,
            *kind.follows_hardware,
            kind.model,
        }
        if kind.framework == "swift":
            settings_of_release |= frameworks.trainer("swift", "grpo").fields().keys()
            settings_of_release |= trainer.known_names
        assert set(kind.former.values()) <= settings_of_release, name


VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
    " algorithm.adv_estimator=grpo"
    " actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"
    " actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.n=8"
)
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base"
    " trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"
)


@pytest.mark.parametrize(
    ("start", "unknown"),
    [
        (VERL, "actor_rollout_ref.rollout.gpu_memory_utilisation"),
        (SKYRL, "generator.inference_engine.gpu_memory"),
    ],
)
def test_a_setting_that_nobody_knows_is_said_at_the_top(
    start: str,
    unknown: str,
    tmp_path: Path,
) -> None:
    request = request_of(tmp_path, f"{start} \\\n  {unknown}=0.3\n")
    line = request.assumed[0]
    assert "not known" in line and f"{unknown} (line 2)" in line
    assert not any(unknown in note for note in request.notes)
