"""Texts of a diagnosis: remedies are sentences, and what lies behind a crash is named."""

from __future__ import annotations

import pytest

from autotune.cli.preflight import _crash
from autotune.core.measurement import Cost, Failure, Measurement, Memory, Outcome
from autotune.diagnosis import diagnose_lines
from autotune.diagnosis.diagnosis import Advice, Diagnosis, in_words
from autotune.failures.own_code import called_back, called_back_in

CRASH = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 88, in <module>
    trainer.train()
  File "/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 1400, in _rewards
    rewards = reward_func(prompts=prompts, completions=completions)
  File "/home/me/rewards.py", line 31, in format_reward
    return [float(match.group(1)) for match in matches]
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 7, in group
    raise error
AttributeError: 'NoneType' object has no attribute 'group'
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_length": "lower"}, "Lower max_length: why."),
        ({"max_length": "lower, to at most 8"}, "Lower max_length to at most 8: why."),
        ({"sleep": "on"}, "Turn sleep on: why."),
        ({"dtype": "bfloat16"}, "Set dtype to bfloat16: why."),
        ({"the log": "read"}, "Read the log: why."),
    ],
)
def test_a_remedy_is_a_sentence(change: dict[str, str], sentence: str) -> None:
    advice = Advice(change=change, why="why")
    diagnosis = Diagnosis(
        known=False,
        evidence="line",
        remedies=(advice,),
    )
    assert sentence in in_words(diagnosis, 100)


def test_the_users_function_that_a_package_called_is_named() -> None:
    """Neither the script that starts the training nor the package that raised it."""
    assert called_back_in(CRASH) == "format_reward in /home/me/rewards.py, line 31"
    frames = ("/home/me/train.py:<module> trainer.train()", "/v/site-packages/trl/t.py:train x")
    assert called_back(frames) is None
    assert called_back((*frames, "/home/me/r.py:reward 1 / 0")) == "reward in /home/me/r.py"


def test_a_log_names_it_too() -> None:
    diagnosis = diagnose_lines(CRASH.splitlines())
    assert not diagnosis.known
    assert "format_reward in /home/me/rewards.py" in diagnosis.remarks[0]


def test_preflight_says_that_the_run_will_crash() -> None:
    failure = Failure(evidence="AttributeError: no group", excerpt=CRASH)
    crashed = Measurement(
        candidate_id="a",
        outcome=Outcome.CRASH,
        memory=Memory(
            peak_bytes=None,
            limit_bytes=1,
            bound_by="nothing",
        ),
        cost=Cost(total_seconds=1.0, load_seconds=0.0),
        failure=failure,
    )
    expected = "in format_reward in /home/me/rewards.py, line 31: AttributeError: no group"
    assert _crash(crashed) == expected


def test_nccls_suspicion_is_passed_on() -> None:
    lines = [
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, remote process"
            " exited or there was a network error, NCCL version 2.21.5"
        ),
        "The remote process may have been killed by the OOM killer, see dmesg",
    ]
    diagnosis = diagnose_lines(lines)
    assert diagnosis.cause == "hang_or_nccl"
    assert any("host memory" in remark for remark in diagnosis.remarks)


def test_completions_change_nothing_in_the_engines_cache() -> None:
    """The engine allocates its cache once while it starts, by its share of the GPU."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/v/site-packages/trl/trainer/grpo_trainer.py", line 700, in __init__',
        "    self.llm = LLM(",
        (
            '  File "/v/site-packages/vllm/v1/worker/gpu_model_runner.py", line 4101, in'
            " _allocate_kv_cache_tensors"
        ),
        "    tensor = torch.zeros(size, dtype=torch.int8, device=self.device)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB.",
    ]
    settings = [name for advice in diagnose_lines(lines).remedies for name in advice.change]
    assert settings[0] == "vllm_gpu_memory_utilization"
    assert "num_generations" not in settings and "max_completion_length" not in settings
