"""fp16 whose loss scale cannot get any smaller."""

from __future__ import annotations

from parts import fail_at, on_gloo, plain_trainer, zero

on_gloo()
message = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
fail_at(
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step", Exception(message), call=3
)
plain_trainer(deepspeed=zero(2))
