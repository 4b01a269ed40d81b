"""Settings of Liger where liger-kernel is not installed: traced without it, and said so.

With liger-kernel 0.8.5, TRL 1.16 and DeepSeek-R1-Distill-Qwen-1.5B (16 rows of 2,560 tokens) the
step allocates 46.4 GiB; traced without it 48.4 GiB.
"""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")

from autotune.worker.tracing import kernels
from autotune.worker.trl.step_trace import _traced_settings

if importlib.util.find_spec("liger_kernel") is not None:
    pytest.skip("liger-kernel is installed", allow_module_level=True)


def specification(**settings: object) -> dict[str, object]:
    return {"settings": {"bf16": True, **settings}, "method": "sft", "model": {}}


@pytest.mark.parametrize("name", ["use_liger_kernel", "use_liger_loss"])
def test_the_trainer_does_not_get_the_setting_and_the_answer_says_so(name: str) -> None:
    spec = specification(**{name: True})
    assert _traced_settings(spec) == {"bf16": True}
    (note,) = kernels.liger_notes(spec)
    assert "not installed here" in note and "at most" in note
    with kernels.liger_installed(spec):
        pass  # nothing to import


def test_a_setting_that_is_off_stays_and_is_no_note() -> None:
    spec = specification(use_liger_kernel=False)
    assert _traced_settings(spec) == {"bf16": True, "use_liger_kernel": False}
    assert kernels.liger_notes(spec) == []
