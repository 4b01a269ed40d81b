"""A tracker that is not installed."""

from __future__ import annotations

from parts import sft

sft(report_to="mlflow")
