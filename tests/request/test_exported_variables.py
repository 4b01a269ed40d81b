"""Allocator settings that the shell exports are held, as the final run has them too."""

from __future__ import annotations

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.job import Hardware
from autotune.request.assignments import with_exported
from autotune.request.flags import Flags

NAME = "PYTORCH_CUDA_ALLOC_CONF"
GPU = Hardware(kind="cuda", name="A100-40G", count=1, memory_bytes=40 * 2**30, here=True)
CPU = Hardware(kind="cpu", name="cpu", count=1, memory_bytes=2**30, here=True)
SPACE = load_space("grpo")


@pytest.mark.parametrize(
    ("exported", "held"),
    [
        ({NAME: "max_split_size_mb:64"}, (f"{NAME}=max_split_size_mb:64",)),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, (f"{NAME}=expandable_segments:True",)),
        ({"PYTORCH_ALLOC_CONF": "a:1", NAME: "b:2"}, (f"{NAME}=a:1",)),
        ({}, ()),
        ({NAME: ""}, ()),
    ],
)
def test_an_exported_setting_is_held_under_the_name_that_vllm_reads(
    exported: dict[str, str], held: tuple[str, ...]
) -> None:
    flags, notes = with_exported(Flags(), SPACE, [NAME], GPU, exported)
    assert flags.hold == held
    assert len(notes) == len(held)


def test_flags_and_machines_without_gpus_win() -> None:
    exported = {NAME: "max_split_size_mb:64"}
    named = Flags(hold=(f"{NAME}=null",))
    assert with_exported(named, SPACE, [NAME], GPU, exported) == (named, [])
    assert with_exported(Flags(), SPACE, [NAME], CPU, exported) == (Flags(), [])
