"""Several values of one argument in a rehearsal."""

from __future__ import annotations

import pytest

from autotune.cli.rehearse import _exit_of_runs
from autotune.cli.varied_runs import table, variation
from autotune.core.errors import BadInput
from autotune.core.units import GIB


@pytest.mark.parametrize(
    ("command", "with_4"),
    [
        ("train.py --micro 1 --lr 2", "train.py --micro 4 --lr 2"),
        ("train.py --micro=1", "train.py --micro=4"),
        ("train.py micro=1", "train.py micro=4"),
        ("train.py +micro=1", "train.py +micro=4"),
        ("train.py --batch 8 --per-device {micro}x8", "train.py --batch 8 --per-device 4x8"),
        ("train.py --micro 1 --micro 2", "train.py --micro 1 --micro 4"),
    ],
)
def test_the_argument_takes_the_value(command: str, with_4: str) -> None:
    (arguments,) = variation("micro=4").commands(command.split())
    assert " ".join(arguments) == with_4


def test_dashes_and_underscores_are_equal() -> None:
    commands = variation("max-length=1,2").commands(["t.py", "--max_length", "9"])
    assert [arguments[-1] for arguments in commands] == ["1", "2"]


def test_a_command_without_the_argument_is_refused_with_the_form() -> None:
    with pytest.raises(BadInput, match="no argument micro") as refused:
        variation("micro=1,2").commands(["train.py", "--micros", "1"])
    assert "{micro}" in str(refused.value)


@pytest.mark.parametrize("text", ["micro", "micro=", "=1", "micro=,"])
def test_a_variation_without_name_or_values_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="form"):
        variation(text)


def test_the_table_has_the_highest_peak_of_all_processes() -> None:
    def process(peak: int, backward: int) -> dict[str, object]:
        return {
            "peak_bytes": peak * GIB,
            "torch_allocated_bytes": None,
            "torch_reserved_bytes": peak * GIB,
            "phase_peak_bytes": {"backward": backward * GIB},
        }

    lines = table(
        "micro",
        {
            "1": {"status": "fits", "processes": [process(3, 2), process(4, 1)]},
            "16": {"status": "out_of_memory", "processes": []},
        },
    )
    assert [line.split() for line in lines] == [
        ["micro", "ended", "peak", "allocated", "reserved", "backward"],
        ["1", "fits", "4", "GiB", "-", "4", "GiB", "2", "GiB"],
        ["16", "out", "of", "memory", "-", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["fits", "out_of_memory"], 0),
        (["out_of_memory", "out_of_memory"], 3),
        (["fits", "failed"], 1),
    ],
)
def test_the_exit_code_is_that_of_the_best_run_unless_one_failed(
    statuses: list[str], code: int
) -> None:
    assert _exit_of_runs(statuses) == code
