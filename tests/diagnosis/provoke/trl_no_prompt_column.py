"""A data set whose column has another name."""

from __future__ import annotations

from parts import grpo, rows

grpo(data=rows(job="What is 2 + 2?"))
