"""--memory-limit 95%: a share of the device."""

from __future__ import annotations

from autotune.core.units import GIB
from autotune.request.flags import flags_of
from autotune.request.request_parser import read_sources


def limit_bytes(text: str) -> int:
    flags = flags_of({"model": "Qwen2.5-0.5B", "gpus": "A100-40G", "memory_limit": text})
    return read_sources(flags, mode="predict").parse().job.memory_limit_bytes


def test_a_share_counts_from_the_device() -> None:
    assert limit_bytes("95%") == int(0.95 * 40 * GIB)
    assert limit_bytes("100%") == 40 * GIB


def test_a_size_stays_what_it_is() -> None:
    assert limit_bytes("38G") == 38 * GIB
