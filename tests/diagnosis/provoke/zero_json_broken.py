"""A DeepSpeed configuration file that is no JSON."""

from __future__ import annotations

from pathlib import Path

from parts import plain_trainer

Path("zero.json").write_text('{"zero_optimization": {"stage": 2},}')
plain_trainer(deepspeed="zero.json")
