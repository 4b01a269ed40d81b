"""prime-rl's attention: stated, or chosen by the card as `resolve_auto_attn` does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import frameworks
from tests.frameworks.stand_ins import case_of

ATTENTION = "trainer.model.attn"
PRIME_RL = frameworks.trainer("prime-rl", "grpo")


@pytest.mark.parametrize(
    ("gpu", "stated", "attention"),
    [
        ("H100", None, "flash_attention_3"),
        ("H200", "auto", "flash_attention_3"),
        ("B200", None, "flash_attention_4"),
        ("A100-80G", None, "flash_attention_2"),
        ("A6000", None, "flash_attention_2"),
        ("H100", "flash_attention_2", "flash_attention_2"),
    ],
)
def test_auto_is_the_cards_own(
    gpu: str,
    stated: str | None,
    attention: str,
) -> None:
    settings = {} if stated is None else {ATTENTION: stated}
    _, candidate, task = case_of("prime-rl", settings=settings)
    task = replace(task, hardware=replace(task.hardware, name=gpu))
    assert PRIME_RL.compose(candidate, task).attention == attention
    # The tensors are the same, and no package of a kernel is needed for a trace.
    request = PRIME_RL.trace_request(candidate, task)
    assert request["model"]["attn_implementation"] == "flash_attention_2"  # type: ignore[index]


def test_the_choice_is_stated() -> None:
    _, candidate, task = case_of("prime-rl")
    assert "flash_attention_3" in " ".join(PRIME_RL.compose(candidate, task).notes)


def test_layers_are_compiled_unless_that_is_turned_off() -> None:
    _, candidate, task = case_of("prime-rl")
    assert PRIME_RL.compose(candidate, task).compiles_layers
    _, candidate, task = case_of("prime-rl", settings={"trainer.model.compile": False})
    assert not PRIME_RL.compose(candidate, task).compiles_layers
