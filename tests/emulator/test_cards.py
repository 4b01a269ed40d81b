"""Cards by the names of the catalog, and the description that the library reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import catalog
from autotune.catalog import constant
from autotune.core.errors import BadInput, UnknownName
from autotune.emulator.cards import EmulatedCard, EmulatedMachine, emulated_machine


def lines(machine: EmulatedMachine) -> list[dict[str, str]]:
    rows = []
    for line in machine.text((12, 8)).splitlines():
        _, *fields = line.split("\t")
        rows.append(dict(field.split("=", 1) for field in fields))
    return rows


def test_two_cards_are_described_as_the_catalog_has_them() -> None:
    machine, first, second = lines(emulated_machine("2xA100-40G"))
    assert (machine["driver"], machine["runtime"], machine["lag"]) == ("12080", "12080", "0")
    assert (first["name"], first["capability"], first["multiprocessors"]) == (
        "NVIDIA A100-SXM4-40GB",
        "8.0",
        "108",
    )
    assert int(first["memory_mib"]) + int(first["reserved_mib"]) == 40960
    assert first["uuid"] != second["uuid"] and first["uuid"].startswith("GPU-")
    assert int(first["nccl_mib"]) == constant("nccl_mib_two_nvlink").value
    assert int(first["context_mib"]) == round(
        108 * constant("context_mib_per_multiprocessor").value
    )


def test_what_nccl_takes_goes_by_the_link_and_the_number_of_cards() -> None:
    assert [card["nccl_mib"] for card in lines(emulated_machine("8xA100-40G"))[1:]] == ["688"] * 8
    assert lines(emulated_machine("2xRTX4090"))[1]["nccl_mib"] == "120"


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in catalog.gpus() if gpu.probes], ids=lambda gpu: gpu.name
)
def test_every_card_of_the_catalog_has_a_shape(gpu: catalog.Gpu) -> None:
    (_, card) = lines(emulated_machine(gpu.name))
    assert gpu.compute_capability == card["capability"]
    assert 0 < int(card["context_mib"]) < int(card["memory_mib"]) <= gpu.memory_mib
    assert any(name in card["name"].lower() for name in gpu.names), (
        "its name is one by which it is recognised"
    )
    assert int(card["shared_kib"]) in (64, 96, 100, 164, 228)


def test_a_memory_that_torch_reported_is_what_cuda_offers() -> None:
    gpu = replace(catalog.gpus()[0], seen_by="torch", memory_mib=20000)
    assert EmulatedCard(gpu=gpu).memory_mib == 20000


def test_what_else_is_on_a_card_and_its_state_are_told() -> None:
    machine = emulated_machine("2xL4", lag=7)
    cards = (replace(machine.cards[0], foreign_mib=1024), replace(machine.cards[1], state="lost"))
    head, first, second = lines(replace(machine, cards=cards, hides_processes=True))
    assert (head["lag"], head["hides_processes"]) == ("7", "1")
    assert (first["foreign_mib"], second["state"]) == ("1024", "lost")


@pytest.mark.parametrize(
    "hardware, reason",
    [
        ("17xA100-40G", "no number of cards from 1 to 16. Write it like 2xA100-40G."),
        ("0xA100-40G", "no number of cards from 1 to 16."),
        ("A100", "Say which: A100-40G or A100-80G."),
        ("MI300X", "is not an NVIDIA GPU, and only those are emulated."),
        ("cpu", "names no card that could be emulated. Name one"),
        ("2xlocal", "names no card that could be emulated."),
        ("", "no number of cards"),
    ],
)
def test_what_cannot_be_emulated_is_one_sentence_with_a_way_out(hardware: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason.replace("(", r"\(")):
        emulated_machine(hardware)


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'A100-40G'"):
        emulated_machine("2xA100-41G")


def test_a_card_is_cut_into_slices_by_mig_profile() -> None:
    card = EmulatedCard(gpu=emulated_machine("A100-40G").cards[0].gpu, slices=("3g.20gb", "1g.5gb"))
    kinds = [
        line.split("\t")[0] for line in EmulatedMachine(cards=(card,)).text((13, 0)).splitlines()
    ]
    assert kinds == ["machine", "sliced", "slice", "slice"]
    assert card.slice("3g.20gb") == (42, card.memory_mib // 2)
    assert card.slice("7g.40gb") == (98, card.memory_mib)
    for wrong in ("3g", "9g.20gb", "1g.80gb"):
        with pytest.raises(BadInput, match="no MIG profile of A100-40G"):
            card.slice(wrong)
