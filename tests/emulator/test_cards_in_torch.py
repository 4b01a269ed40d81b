"""CUDA builds of torch, unmodified, on emulated cards: what they see, what they are refused,
what they can read.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autotune.emulator.cards import LONGEST_LAG, emulated_machine
from tests.emulator.on_cards import GIB, MIB, Ran, cards, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def answer_of(ran: Ran) -> object:
    assert ran.code == 0, ran.output
    return ran.answer


def test_torch_sees_the_cards_of_the_catalog(python: str) -> None:
    program = """
        import json, torch
        one = torch.cuda.get_device_properties(1)
        count, total = torch.cuda.device_count(), torch.cuda.mem_get_info(1)[1]
        print(json.dumps([count, one.name, one.major, one.multi_processor_count,
            one.total_memory == total, total]))
    """
    machine = emulated_machine("2xH100")
    expected = [2, "NVIDIA H100 80GB HBM3", 9, 132, True, machine.cards[1].memory_mib * MIB]
    assert answer_of(run(python, machine, program)) == expected


@pytest.mark.parametrize(
    "visible, expected", [("1", [1, 1]), ("", [0, 0]), ("2,0,7,1", [2, 2]), ("by uuid", [1, 2])]
)
def test_cuda_visible_devices(
    python: str,
    visible: str,
    expected: list[int],
) -> None:
    program = """
        import json, os, sys, torch
        lines = open(os.environ["AUTOTUNE_EMULATED_MACHINE"]).read().splitlines()
        fields = [field for line in lines for field in line.split("\\t")]
        uuids = [field[5:] for field in fields if field.startswith("uuid=")]
        if os.environ["CUDA_VISIBLE_DEVICES"] == "by uuid":
            os.environ["CUDA_VISIBLE_DEVICES"] = uuids[2]
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        first = uuids.index("GPU-" + str(torch.cuda.get_device_properties(0).uuid)) if count else 0
        print(json.dumps([count, first]))
    """
    assert answer_of(run(python, "3xL4", program, CUDA_VISIBLE_DEVICES=visible)) == expected


def test_a_full_card_raises_torchs_own_error(python: str) -> None:
    program = """
        import json, torch
        held = []
        try:
            while True:
                held.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            said = str(error)
        del held
        torch.cuda.empty_cache()
        print(json.dumps([torch.cuda.memory_stats()["num_ooms"],
            torch.cuda.memory_reserved() < 2**22, said]))
    """
    with cards(python, "A100-40G") as stand:
        ran = stand.run(program)
        refusals, all_back, message = answer_of(ran)
        assert (refusals, all_back) == (1, True)
        assert "GPU 0 has a total capacity of 39.51 GiB" in message
        (process,) = ran.report.processes
        assert 39 * GIB < process.peak_bytes[0] <= 39.52 * GIB and process.refused >= 1
        again = stand.run("import torch; print(torch.cuda.mem_get_info()[0])")
        assert answer_of(again) > 39 * GIB, "a process that ended gives its memory back"


def test_processes_share_a_card_and_a_killed_one_leaves_nothing(python: str) -> None:
    holds = """
        import sys, torch
        held = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
        print("held", flush=True)
        sys.stdin.read()
    """
    tries = """
        import json, torch
        try:
            torch.empty(25 << 30, dtype=torch.uint8, device="cuda")
            print(json.dumps(""))
        except torch.OutOfMemoryError as error:
            print(json.dumps(str(error)))
    """
    with cards(python, "A100-40G") as stand:
        neighbour = stand.start(holds)
        assert neighbour.stdout is not None and "held" in neighbour.stdout.readline()
        message = answer_of(stand.run(tries))
        assert f"Process {neighbour.pid} has 20." in str(message)
        neighbour.kill()
        neighbour.communicate()
        assert answer_of(stand.run(tries)) == ""


def test_memory_of_others_that_are_not_emulated(python: str) -> None:
    machine = emulated_machine("L4")
    machine = replace(machine, cards=(replace(machine.cards[0], foreign_mib=10_000),))
    program = """
        import ctypes, json, torch
        first = torch.cuda.mem_get_info()[0]
        ctypes.CDLL(None).emu_set_foreign(0, ctypes.c_int64(2**30))
        print(json.dumps([first, torch.cuda.mem_get_info()[0]]))
    """
    before, after = answer_of(run(python, machine, program))  # type: ignore[misc]
    assert before < (machine.cards[0].memory_mib - 10_000) * MIB
    assert before - after == GIB


@pytest.mark.parametrize("state", ["busy", "lost"])
def test_a_card_that_cannot_be_had(python: str, state: str) -> None:
    machine = emulated_machine("2xL4")
    second = replace(machine.cards[1], state=state)  # type: ignore[arg-type]
    machine = replace(machine, cards=(machine.cards[0], second))
    program = """
        import json, torch
        torch.empty(8, device="cuda:0")
        try:
            torch.empty(8, device="cuda:1")
        except RuntimeError as error:
            print(json.dumps(str(error).splitlines()[0]))
    """
    assert "busy or unavailable" in str(answer_of(run(python, machine, program)))


def test_small_tensors_and_integers_are_true(python: str) -> None:
    program = """
        import json, threading, torch
        x = torch.arange(6, device="cuda").reshape(2, 3)
        mask = x > 2
        big = torch.arange(2**20, device="cuda")
        found = [x.sum().item(), x[mask].tolist(), mask.nonzero().tolist(),
            x.float().mean().item(), big[-1].item(), repr(x)]
        with torch.inference_mode():
            found.append(torch.tensor([1.6, 2.2], device="cuda").to(torch.int32).tolist())
        def elsewhere():
            found.append((torch.tensor([3, 4], device="cuda") + 1).tolist())
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        w = torch.tensor([2.0, 3.0], device="cuda", requires_grad=True)
        (w * w).sum().backward()
        found.append(w.grad.tolist())
        print(json.dumps(found))
    """
    shown = "tensor([[0, 1, 2],\n        [3, 4, 5]], device='cuda:0')"
    expected = [
        15,
        [3, 4, 5],
        [[1, 0], [1, 1], [1, 2]],
        2.5,
        2**20 - 1,
        shown,
        [1, 2],
        [4, 5],
        [4.0, 6.0],
    ]
    assert answer_of(run(python, "L4", program)) == expected


def test_the_gradient_of_dpos_loss_is_computed_without_the_buffer_that_only_a_cpu_saves(
    python: str,
) -> None:
    ran = run(
        python,
        "A100-40G",
        """
        import json, torch
        x = torch.tensor([-1.0, 0.0, 2.0], device="cuda", requires_grad=True)
        torch.nn.functional.logsigmoid(x).sum().backward()
        print(json.dumps([round(value, 4) for value in x.grad.tolist()]))
        """,
    )
    assert ran.answer == [0.7311, 0.5, 0.1192]
    assert not ran.report.failed


@pytest.mark.parametrize("elements", [100, 3_000_000])
def test_a_cached_block_holds_nothing_of_its_former_tensor(python: str, elements: int) -> None:
    """An old -100 read as bfloat16 is not a number, and DeepSpeed's count of such gradients
    began with one.
    """
    program = f"""
        import json, torch
        held = torch.full(({elements} // 4,), -100, device="cuda")
        place = held.data_ptr()
        del held
        found = []
        for made in (torch.zeros, torch.empty):
            one = made({elements}, dtype=torch.bfloat16, device="cuda")
            found += [one.data_ptr() == place, float(one[:50].float().abs().sum())]
            one[:50].view(torch.int16).fill_(-100)
            one.zero_()
            found.append(float(one[:50].float().abs().sum()))
            one[:50].view(torch.int16).fill_(-100)
            del one
        print(json.dumps(found))
    """
    assert answer_of(run(python, "A100-40G", program)) == [True, 0.0, 0.0] * 2


def test_looking_whether_torch_is_there_does_not_use_the_hook_up(python: str) -> None:
    program = """
        import importlib.util, json
        importlib.util.find_spec("torch")
        importlib.util.find_spec("torch")
        import torch
        print(json.dumps(torch.tensor([1, 2], device="cuda").sum().item()))
    """
    assert answer_of(run(python, "L4", program)) == 3


def test_printing_a_large_tensor_names_it(python: str) -> None:
    program = 'import json, torch; print(json.dumps(str(torch.ones(4096, 4096, device="cuda"))))'
    assert (
        answer_of(run(python, "L4", program))
        == "tensor(..., device='cuda:0', size=(4096, 4096), dtype=torch.float32)"
    )


def test_integers_that_were_too_large_are_reported_and_floats_are_not(python: str) -> None:
    program = """
        import torch
        many = torch.ones(3000, 3000, dtype=torch.int64, device="cuda")
        (many & 1)
        torch.randn(3000, 3000, device="cuda") @ torch.randn(3000, 3000, device="cuda")
    """
    ran = run(python, "L4", program)
    assert ran.code == 0, ran.output
    assert any("bitwise_and" in operation for operation in ran.report.skipped)
    assert not any("mm" in operation or "randn" in operation for operation in ran.report.skipped)


def test_a_training_step_touches_little_of_the_host_and_calls_nothing_unjudged(python: str) -> None:
    program = """
        import json, resource, torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, device="cuda",
            dtype=torch.bfloat16) for _ in range(24)])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(2):
            model(torch.randn(2048, 8192, device="cuda",
                dtype=torch.bfloat16)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([torch.cuda.max_memory_allocated(), grown // 1024]))
    """
    ran = run(python, "A100-40G", program)
    allocated, grown_mib = answer_of(ran)  # type: ignore[misc]
    parameters = 24 * (8192 * 8192 + 8192)
    assert 4 * 2 * parameters < allocated < 4.5 * 2 * parameters, (
        "weights, gradients and two moments of bfloat16"
    )
    assert grown_mib < 400
    assert ran.report.unjudged == {}
    phases = ran.report.processes[0].phase_peak_bytes
    assert phases["load"][0] < phases["backward"][0] <= phases["optimizer"][0]


def test_work_that_finishes_late_keeps_more_memory_waiting(python: str) -> None:
    program = """
        import json, torch
        side = torch.cuda.Stream()
        for _ in range(40):
            block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(side):
                block.zero_()
            block.record_stream(side)
            del block
        waiting = torch.cuda.memory_reserved()
        torch.cuda.synchronize()
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
        print(json.dumps([waiting, torch.cuda.memory_reserved()]))
    """
    at_once, _ = answer_of(run(python, "A100-40G", program))  # type: ignore[misc]
    machine = emulated_machine("A100-40G", lag=LONGEST_LAG)
    late, after = answer_of(run(python, machine, program))  # type: ignore[misc]
    assert at_once == 2**28
    assert late == 40 * 2**28 == after, (
        "what waits becomes free with the next synchronisation, and is used again"
    )


def test_who_only_asks_whether_work_is_done_does_not_wait_for_ever(python: str) -> None:
    program = """
        import json, torch
        event = torch.cuda.Event()
        event.record()
        asked = 1
        while not event.query():
            asked += 1
        print(json.dumps(asked))
    """
    started = time.monotonic()
    machine = emulated_machine("L4", lag=LONGEST_LAG)
    assert answer_of(run(python, machine, program)) > 1  # type: ignore[operator]
    assert time.monotonic() - started < 60


def test_a_forked_child_cannot_use_what_its_parent_initialised(python: str) -> None:
    program = """
        import ctypes, json, os, torch
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        before = driver.cuDeviceGetCount(ctypes.byref(count))
        torch.empty(1, device="cuda")
        after = driver.cuDeviceGetCount(ctypes.byref(count))
        pid = os.fork()
        if pid == 0:
            os._exit(driver.cuDeviceGetCount(ctypes.byref(count)) * 10 + driver.cuInit(0))
        child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([before, after, child]))
    """
    assert answer_of(run(python, "L4", program)) == [
        3,
        0,
        33,
    ], "CUDA_ERROR_NOT_INITIALIZED, as of the real driver"


def test_a_forked_child_uses_cuda_where_its_parent_only_imported_torch(python: str) -> None:
    program = """
        import json, os, torch
        if os.fork() == 0:
            print(json.dumps(torch.ones(3, device="cuda").sum().item()), flush=True)
            os._exit(0)
        os.wait()
    """
    assert answer_of(run(python, "L4", program)) == 3.0


def test_expandable_segments_grow_and_give_back(python: str) -> None:
    program = """
        import json, torch
        for gib in (1, 2, 3, 5):
            torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
        grown = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        print(json.dumps([grown, torch.cuda.memory_reserved(), torch.tensor([5],
            device="cuda").item()]))
    """
    variable = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    answer = answer_of(run(python, "A100-40G", program, **variable))
    grown, left_bytes, value = answer  # type: ignore[misc]
    assert 5 * GIB <= grown < 5.1 * GIB and left_bytes == 0 and value == 5


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_tensors_go_to_another_process_and_are_charged_once(python: str, expandable: str) -> None:
    # torch pickles functions by name, so the program must be a file.
    body = """
import json, torch, torch.multiprocessing as mp
def other(there, back):
    tensor = there.get()
    back.put((tensor[:3].tolist(), torch.cuda.mem_get_info()[0]))
    tensor[0] = 9
    back.put(None)
    there.get()
if __name__ == "__main__":
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=other, args=(there, back))
    process.start()
    tensor = torch.zeros(2**28, dtype=torch.int32, device="cuda")
    tensor[:3] = torch.tensor([1, 2, 3], device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    there.put(tensor)
    seen, free_there = back.get(timeout=100)
    back.get(timeout=100)
    print(json.dumps([seen, free - free_there, tensor[0].item()]), flush=True)
    there.put(None)
    process.join()
"""
    variable = dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), f"expandable_segments:{expandable}"
    )
    with cards(python, "A100-40G") as stand:
        file = stand.stand.folder / "shares.py"
        file.write_text(body)
        ran = stand.run(
            f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')", **variable
        )
    values, charged, changed = answer_of(ran)  # type: ignore[misc]
    assert values == [1, 2, 3] and changed == 9
    assert charged < GIB, "a context and its kernels, and not the tensor once more"


def test_gradients_of_a_shared_weight_are_summed_in_place(python: str) -> None:
    """Autograd sums out of place while a dispatch mode is on, which is the emulator's own and
    not the program's.
    """
    program = """
        import json, torch
        weight = torch.ones(2**24, device="cuda", requires_grad=True)
        def peak(backward):
            weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            backward()
            return torch.cuda.max_memory_allocated() >> 20
        small = torch.ones(4, device="cuda", requires_grad=True)
        ((small * 2).sum() + (small * 3).sum()).backward()
        summed = peak(lambda: ((weight * 2).sum() + (weight * 3).sum()).backward())
        picked = torch.zeros(2**20, 1, dtype=torch.long, device="cuda")
        print(json.dumps([
            summed,
            peak(lambda: weight.view(2**20, 16).gather(1, picked).sum().backward()),
            small.grad.tolist(),
        ]))
    """
    summed, gathered, values = answer_of(run(python, "A100-40G", program))  # type: ignore[misc]
    assert summed == 3 * 64, "the weight, and a gradient of each use"
    assert gathered <= 2 * 64 + 8 + 4 + 4, "the weight, its gradient, positions and what was picked"
    assert values == [5.0] * 4


@pytest.mark.parametrize("card", ["L4", "H200"])
def test_kernels_that_are_chosen_by_the_card(python: str, card: str) -> None:
    """CUB asks which image of a kernel runs, and has none for 8.9; attention prefers cuDNN from
    Hopper on.
    """
    program = """
        import json, torch
        mask = torch.tensor([True, False] * 16384, device="cuda")
        spread = torch.zeros(32768, device="cuda").masked_scatter(mask, torch.ones(16384,
            device="cuda"))
        heads = [torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16,
            requires_grad=True) for _ in range(3)]
        torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
        print(json.dumps([list(spread.shape), list(heads[0].grad.shape)]))
    """
    assert answer_of(run(python, card, program)) == [[32768], [2, 8, 512, 64]]


def test_deepspeeds_fused_adam_steps_without_nvcc(python: str) -> None:
    program = """
    import json, torch
    from deepspeed.ops.adam import FusedAdam
    weights = torch.nn.Parameter(torch.empty(1 << 24, device="cuda"))
    optimizer = FusedAdam([weights])
    for _ in range(2):
        weights.grad = torch.empty_like(weights)
        optimizer.step()
    print(json.dumps(torch.cuda.memory_allocated()))
    """
    ran = run(python, "A100-40G", program, PATH="/usr/bin:/bin", CUDA_HOME="")
    assert ran.code == 0, ran.output
    assert 4 * 64 * MIB <= ran.answer < 4 * 64 * MIB + MIB  # weights, gradients, two moments
