"""The numbers of a message, by their names: every number that a search can use is read, and
nothing that is not there.
"""

from __future__ import annotations

import pytest

from autotune.core.units import GIB, MIB
from autotune.failures import numbers
from autotune.failures.table import MEANINGS
from tests.every import for_each
from tests.failures.test_table import NAMES, read_log, sample


def gib(figure: float) -> int:
    return int(figure * GIB)


def mib(figure: float) -> int:
    return int(figure * MIB)


EXPECTED: dict[str, dict[str, int | float]] = {
    "vllm_reservation": {
        "asked_bytes": gib(125.75),
        "free_bytes": gib(7.34),
        "total_bytes": gib(139.72),
        "asked_share": 0.9,
        "free_share": pytest.approx(7.34 / 139.72),
    },
    "vllm_reservation.numbered": {
        "asked_bytes": gib(19.84),
        "free_bytes": gib(19.77),
        "total_bytes": gib(22.05),
        "asked_share": 0.9,
        "free_share": pytest.approx(19.77 / 22.05),
    },
    "vllm_reservation.cpu": {
        "asked_bytes": gib(14.07),
        "free_bytes": gib(12.68),
        "total_bytes": gib(14.09),
        "asked_share": 0.999,
        "free_share": pytest.approx(12.68 / 14.09),
    },
    "vllm_kv_too_small": {
        "asked_bytes": gib(0.14),
        "free_bytes": gib(0.06),
        "asked_length": 300000,
        "longest_length": 130944,
    },
    "vllm_kv_too_small.earlier": {
        "asked_bytes": 24 * GIB,
        "free_bytes": gib(3.18),
        "asked_length": 262144,
        "longest_length": 34736,
    },
    "vllm_kv_too_small.unestimated": {
        "asked_bytes": 24 * GIB,
        "free_bytes": gib(9.97),
        "asked_length": 1048576,
    },
    "vllm_kv_too_small_old": {"asked_length": 4096, "longest_length": 3792},
    "cuda_out_of_memory_old.ascend": {
        "asked_bytes": 2 * GIB,
        "free_bytes": gib(1.36),
        "total_bytes": gib(60.97),
        "allocated_bytes": gib(57.10),
        "idle_bytes": gib(58.61) - gib(57.10),
    },
    "vllm_sampler_warmup": {"asked_sequences": 1024},
    "length_refused": {"longest_length": 256},
    "length_refused.derived": {"asked_length": 500000, "longest_length": 400000},
    "cuda_other_process": {
        "asked_bytes": 20 * MIB,
        "free_bytes": mib(9.25),
        "total_bytes": gib(39.39),
        "allocated_bytes": gib(30.21),
        "idle_bytes": mib(217.48),
    },
    "cuda_other_process.itself": {
        "asked_bytes": 172 * MIB,
        "free_bytes": mib(53.19),
        "total_bytes": gib(7.78),
        "allocated_bytes": gib(5.58),
        "idle_bytes": mib(2.80),
        "process_bytes": gib(6.07),
        "others_bytes": gib(1.38) + 3 * 94 * MIB,
    },
    "cuda_out_of_memory": {
        "asked_bytes": gib(1.70),
        "free_bytes": 0,
        "total_bytes": 6 * GIB,
        "allocated_bytes": gib(2.93),
        "idle_bytes": gib(2.30),
    },
    "cuda_out_of_memory.container": {
        "asked_bytes": gib(1.74),
        "free_bytes": mib(605.88),
        "total_bytes": gib(23.57),
        "allocated_bytes": gib(20.21),
        "idle_bytes": mib(185.98),
    },
    "cuda_out_of_memory.itself": {
        "asked_bytes": gib(1.16),
        "free_bytes": gib(1.17),
        "total_bytes": gib(7.75),
        "allocated_bytes": gib(4.81),
        "idle_bytes": mib(18.97),
        "process_bytes": gib(5.02),
    },
    "cuda_out_of_memory.small_neighbour": {
        "asked_bytes": 132 * MIB,
        "free_bytes": mib(67.06),
        "total_bytes": gib(23.64),
        "allocated_bytes": gib(18.70),
        "idle_bytes": mib(353.02),
        "process_bytes": gib(22.90),
        "others_bytes": 662 * MIB,
    },
    "cuda_out_of_memory_old": {
        "asked_bytes": 128 * MIB,
        "free_bytes": mib(24.81),
        "total_bytes": gib(11.17),
        "allocated_bytes": gib(10.85),
        "idle_bytes": gib(10.86) - gib(10.85),
    },
    "cpu_out_of_memory": {"asked_bytes": 2**30},
    "cpu_out_of_memory_elsewhere": {"asked_bytes": 31850496000},
    "limit_foreseen": {"total_bytes": 360 * MIB},
    "numpy_memory_error": {"asked_bytes": 2 * GIB},
    "numpy_memory_error.whole": {"asked_bytes": 281 * GIB},
    "collective_timeout": {"timeout_seconds": 600.0},
    "collective_timeout.gloo": {"timeout_seconds": 8.0},
}


@for_each(NAMES)
def test_every_number_of_the_message_is_read(name: str) -> None:
    finding = read_log(sample(name))
    assert finding is not None
    assert finding.numbers == EXPECTED.get(name, {})
    assert set(finding.numbers) <= set(MEANINGS.numbers)


def test_each_number_is_found_in_some_sample() -> None:
    numbers_in_samples = {number for numbers in EXPECTED.values() for number in numbers}
    assert set(MEANINGS.numbers) - numbers_in_samples == {"allowed_bytes"}


def test_what_torch_was_allowed_to_take_is_a_number_of_its_own() -> None:
    text = sample("cuda_out_of_memory.itself").replace(
        "memory in use. Of", "memory in use. 5.00 GiB allowed; Of"
    )
    finding = read_log(text)
    assert finding is not None and finding.numbers["allowed_bytes"] == 5 * GIB


def test_figures_of_hundreds_of_digits_are_bounded() -> None:
    assert numbers._bytes("9" * 400, "GiB") == 2**63
