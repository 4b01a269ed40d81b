"""Memory of the host, pinned or not: pages that hold nothing take none of it."""

from __future__ import annotations

import pytest

from tests.emulator.on_cards import GIB, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_pinned_memory_has_its_values_and_takes_only_the_pages_that_were_written(
    python: str,
) -> None:
    program = """
        import json, torch
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        torch.zeros(1, device="cuda"), torch.zeros(1, pin_memory=True)
        before = resident()
        source = torch.empty(2**28)
        source[1000] = 3.0
        pinned = source.pin_memory()
        swap = torch.zeros(2**28, pin_memory=True)
        swap[5] = 1.0
        written = swap[5].item()
        del swap
        again = torch.zeros(2**28, pin_memory=True)  # torch's cache hands out the same block
        states = torch.zeros(2**28, device="cuda")
        offloaded = torch.empty_like(states, device="cpu").pin_memory()
        offloaded.copy_(states, non_blocking=True)
        values = [pinned[1000].item(), pinned[0].item(), written, again[5].item(),
            torch.arange(3).pin_memory().tolist()]
        made = [one.is_pinned() for one in (pinned, again, offloaded, torch.zeros_like(again,
            pin_memory=True))]
        print(json.dumps([values, made, resident() - before]))
    """
    ran = run(python, "A100-80G", program)
    assert ran.code == 0, ran.output
    values, pinned, resident_bytes = ran.answer
    assert values == [3.0, 0.0, 1.0, 0.0, [0, 1, 2]]
    assert pinned == 4 * [True]
    assert resident_bytes < GIB // 4


def test_memory_that_the_program_registered_is_zeroed_where_it_is(python: str) -> None:
    program = """
        import ctypes, json, torch
        torch.cuda.init()
        runtime, size = ctypes.CDLL(None), 2**16
        held = ctypes.create_string_buffer(b"a" * size, size)
        at = ctypes.c_void_p(ctypes.addressof(held))
        runtime.cudaHostRegister(at, ctypes.c_size_t(size), 0)
        runtime.cudaMemset(at, 0, ctypes.c_size_t(size - 1))
        print(json.dumps([held.raw.count(b"a"), held.raw[-1:].decode()]))
    """
    ran = run(python, "A100-80G", program)
    assert ran.code == 0, ran.output
    assert ran.answer == [1, "a"]


def test_a_copy_of_large_weights_on_the_host_is_zero_and_takes_nothing(python: str) -> None:
    program = """
        import json, torch
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        weights = torch.empty(2**24, device="cuda")
        before = resident()
        copies = [weights.cpu() for _ in range(32)]
        taken = resident() - before
        shape = weights.to("meta").shape  # no memory, and nothing to zero
        print(json.dumps([taken, any(copy.any().item() for copy in copies), list(shape)]))
    """
    ran = run(python, "A100-80G", program)
    assert ran.code == 0, ran.output
    resident_bytes, written, shape = ran.answer
    assert resident_bytes < GIB // 4 and not written and shape == [2**24]
