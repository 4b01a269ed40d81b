"""A data set of the hub that is not in the cache, offline."""

from __future__ import annotations

from datasets import load_dataset
from parts import grpo

grpo(data=load_dataset("trl-lib/DeepMath-103K", split="train"))
