"""NVML of emulated cards as autotune reads it: cards that do not answer, and memory of others
that comes and goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.emulator.cards import EmulatedCard, EmulatedMachine, emulated_machine
from tests.emulator.on_cards import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = str(Path(__file__).parents[2])
L4 = emulated_machine("L4").cards[0]

HEAD = (Path(__file__).parent / "programs/nvml_head.py.txt").read_text()


def on(
    python: str,
    machine: EmulatedMachine,
    program: str,
) -> Any:
    return run(python, machine, HEAD + program, PYTHONPATH=ROOT).answer


@pytest.mark.parametrize("state", ["lost", "forbidden", "memoryless"])
def test_a_card_that_does_not_answer_hides_no_other(python: str, state: Any) -> None:
    machine = EmulatedMachine(cards=(L4, EmulatedCard(gpu=L4.gpu, state=state), L4))
    program = """
found = Gpus(2, 22 << 30, Path(sys.executable))
print(json.dumps({
    "count": hardware("local").count, "index": [one.index for one in devices_here()],
    "why": found.nvml.unreadable,
    "named": [one.index for one in devices_here(variable="1,2,0")], "names": found.visible,
    "uuids": [one.uuid for one in devices_here()], "notes": gpu_notes(hardware("local"),
        22 << 30)}))
"""
    report = on(python, machine, program)
    assert (report["count"], report["index"], report["named"]) == (2, [0, 2], [2, 0])
    assert list(report["why"]) == ["1"]
    assert sum(note.startswith("GPU 1 is left out: ") for note in report["notes"]) == 1
    # CUDA may count such cards or not: here it is given names that cannot be mistaken.
    assert report["names"] == ",".join(report["uuids"])


def test_growth_of_others_is_not_the_probes_and_others_that_leave_hide_nothing(python: str) -> None:
    program = """
other = Holder(1000)
found = gpus(); found.settle()
ours = []
meter = DeviceMeter(found.nvml, found.uuids, {found.uuids[0]: found.slots[0].before}, lambda: ours,
    interval_seconds=1000)
mine = Holder(2000); ours.append(mine.pid)
meter.enter("backward"); meter.look()
peak = lambda: meter.peaks()[found.uuids[0]]
other.more(5000); meter._sample(); meter.look()
grown = (peak().peak_bytes >> 20, peak().newcomers[other.pid] >> 20)
other.end(); mine.more(1000); meter._sample(); meter.look()
left = peak()
print(json.dumps([grown, left.peak_bytes >> 20, left.phase_peak_bytes["backward"] >> 20,
    left.listed_peak_bytes >> 20]))
meter.close(); mine.end()
"""
    (peak, growth), *after = on(python, emulated_machine("L4"), program)
    assert 2000 <= peak < 2600, "5000 MiB of another process were called the probe's"
    assert growth == 5000
    assert after == [peak + 1000] * 3, "another process that left hid growth of the probe"


def test_numbers_of_another_namespace_are_no_evidence(python: str) -> None:
    """The host's number of a stranger may equal one of ours."""
    program = """
found = gpus(); found.settle()
mine = Holder(2000)
meter = DeviceMeter(found.nvml, found.uuids, {found.uuids[0]: found.slots[0].before},
    lambda: [mine.pid, mine.pid + 10_000_000],
                    interval_seconds=1000)
meter._own_namespace = True
meter.look()
seen = meter.peaks()[found.uuids[0]]
print(json.dumps([seen.peak_bytes >> 20, seen.listed_peak_bytes, seen.why, seen.newcomers]))
meter.close(); mine.end()
"""
    peak, listed, why, newcomers = on(
        python, EmulatedMachine(cards=(L4,), pid_shift=10_000_000), program
    )
    assert 2000 <= peak < 2600
    assert (listed, newcomers) == (None, {}) and "outside of this container" in why


def test_memory_that_others_keep_becomes_the_new_base(python: str) -> None:
    program = """
from autotune.core.errors import ProbeError
found = gpus(); found.settle()
other = Holder(6000)
words = []
for _ in range(2):
    try:
        found.settle()
    except ProbeError as error:
        words.append(str(error))
print(json.dumps([words, found.effective_limit_bytes >> 20]))
other.end()
"""
    notes, limit = on(python, emulated_machine("L4"), program)
    assert len(notes) == 1 and "not as empty" in notes[0]
    assert limit < 17_000


def test_slices_of_mig_are_named_by_uuid_and_cuda_shows_one(python: str) -> None:
    gpu = emulated_machine("A100-40G").cards[0].gpu
    machine = EmulatedMachine(cards=(EmulatedCard(gpu=gpu, slices=("3g.20gb", "2g.10gb")),))
    program = """
from autotune.core.errors import BadInput
devices = devices_here()
try:
    hardware("local")
except BadInput as error:
    refused = str(error)
found = Gpus(1, devices[1].memory_bytes, Path(sys.executable), variable=devices[1].uuid)
found.settle()
os.environ["CUDA_VISIBLE_DEVICES"] = found.visible
mine = Holder(5000); used = found.nvml.used_bytes(devices[1].uuid) >> 20
torch = '''
import json, torch
properties = torch.cuda.get_device_properties(0)
print(json.dumps([torch.cuda.device_count(), properties.total_memory >> 20,
    properties.multi_processor_count]))
'''
said = subprocess.run([sys.executable, "-c", torch], capture_output=True, text=True).stdout
print(json.dumps({"names": [one.name for one in devices],
    "mib": [one.memory_bytes >> 20 for one in devices],
    "whole": len({one.slice_of for one in devices}),
    "refused": refused, "used": used, "torch": json.loads(said)}))
mine.end()
"""
    report = on(python, machine, program)
    assert report["names"] == [
        f"NVIDIA A100-SXM4-40GB MIG {profile}" for profile in ("3g.20gb", "2g.10gb")
    ]
    assert 19_000 < report["mib"][0] < 20_480 and 9_500 < report["mib"][1] < 10_240
    assert report["whole"] == 1 and "one slice only" in report["refused"]
    assert 5000 <= report["used"] < 5700
    assert report["torch"] == [1, report["mib"][1], 28]
