"""Adapters for TRL: `grpo_probe` and `script_probe` measure, `step_trace` traces."""
