"""The arithmetic of a smaller card on a larger one. Pure functions."""

from __future__ import annotations

from autotune.units import GIB

LEAST_BALLAST_BYTES = GIB
"""A ballast's own context takes some hundred MiB: a smaller difference than this cannot be held exactly."""


def needs_ballast(limit_bytes: int, total_bytes: int) -> bool:
    """Whether the rest of the card is to be held. Where the two differ by less, torch's own cap must do."""
    return total_bytes - limit_bytes >= LEAST_BALLAST_BYTES


def usable_bytes(limit_bytes: int, reserved_bytes: int | None) -> int:
    """What a job can have of a card of `limit_bytes`: drivers keep a part for themselves, there as here."""
    return max(0, limit_bytes - (reserved_bytes or 0))


def share_scale(usable: int, total_usable: int) -> float:
    """By what a share of the device's memory, as an engine takes it, is multiplied so that it is the smaller card's.

    vLLM reserves its share of all that CUDA shows as the device's total, whoever holds it.
    """
    if total_usable <= 0:
        raise ValueError(f"a card of {total_usable} bytes has no shares")
    return min(1.0, usable / total_usable)
