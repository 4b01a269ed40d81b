"""A script that does not come to its trainer is stopped; a pause of its own takes no time."""

from __future__ import annotations

import asyncio
import time

import pytest

from autotune.worker.trl.time_limit import TooLong, limited, no_pauses


def test_a_loop_without_an_end_is_stopped() -> None:
    """It catches every error of its own, as scripts that try again do."""
    start = time.process_time()
    with pytest.raises(TooLong), limited(0.5):
        while time.process_time() - start < 30:
            try:
                raise ConnectionError
            except Exception:
                pass


def test_what_ends_in_time_goes_on() -> None:
    with limited(5):
        pass
    with limited(None):
        time.sleep(0.01)


def test_pauses_of_the_user_take_no_time() -> None:
    start = time.monotonic()
    with no_pauses(lambda file: False):
        time.sleep(20)
        asyncio.run(asyncio.sleep(20))
    assert time.monotonic() - start < 10
    with no_pauses(lambda file: True):
        time.sleep(0.2)
    assert time.monotonic() - start >= 0.2
