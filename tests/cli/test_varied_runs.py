"""`rehearse --vary`: where the value goes in the command, and the table of all values."""

from __future__ import annotations

import pytest

from autotune.cli.varied_runs import table, variation
from autotune.core.errors import BadInput


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("train.py --micro 1", "train.py --micro 4"),
        ("train.py --micro=1 --lr 2", "train.py --micro=4 --lr 2"),
        ("train.py trainer=x micro=1", "train.py trainer=x micro=4"),
        (
            "train.py --micro_batch 1 --micro 1 --micro 2",
            "train.py --micro_batch 1 --micro 1 --micro 4",
        ),
        ("train.py --bs {micro} --rows={micro}00", "train.py --bs 4 --rows=400"),
        ("train.py --micro {micro}", "train.py --micro 4"),
    ],
)
def test_the_value_goes_where_the_command_has_the_argument(command: str, changed: str) -> None:
    """The last one counts, as in argparse; a placeholder counts before any argument."""
    assert variation("micro=4").commands(command.split()) == [tuple(changed.split())]


def test_dashes_and_underscores_are_equal() -> None:
    commands = variation("micro-batch=2").commands(["train.py", "--micro_batch", "1"])
    assert commands == [("train.py", "--micro_batch", "2")]


@pytest.mark.parametrize("text", ["micro", "=1", "micro=", "micro=,"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="NAME=VALUE"):
        variation(text)


def test_a_command_without_the_argument_is_refused_with_the_way_out() -> None:
    with pytest.raises(BadInput, match="no argument micro") as refused:
        variation("micro=1").commands(["train.py", "--micro_batch", "1"])
    assert "{micro}" in str(refused.value.way_out)


def test_the_table_has_the_highest_peak_of_any_process() -> None:
    def process(peak: int, **phases: int) -> dict[str, object]:
        return {
            "peak_bytes": peak,
            "torch_allocated_bytes": 2**30,
            "torch_reserved_bytes": None,
            "phase_peak_bytes": phases,
        }

    fits = {"status": "fits", "processes": [process(2**31), process(3 * 2**30, forward=2**30)]}
    ended = {"status": "out_of_memory", "processes": [process(2**30)]}
    assert table("micro", {"1": fits, "16": ended}) == [
        "micro  ended          peak   allocated  reserved  forward",
        "1      fits           3 GiB  1 GiB      -         1 GiB",
        "16     out of memory  1 GiB  1 GiB      -         -",
    ]
