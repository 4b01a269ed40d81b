"""Secrets among the arguments of a command."""

from __future__ import annotations

import pytest

from autotune.core.secrets import without_secret_arguments, without_secret_settings


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py --api-key=abc --bs 4", "train.py --api-key=*** --bs 4"),
        ("train.py --hf_token abc --bs 4", "train.py --hf_token *** --bs 4"),
        ("env WANDB_API_KEY=abc train.py", "env WANDB_API_KEY=*** train.py"),
        ("train.py --token --verbose", "train.py --token --verbose"),
        ("train.py --max_tokens 512 --eos_token x", "train.py --max_tokens 512 --eos_token x"),
        ("train.py --db postgres://me:abc@host/x", "train.py --db postgres://me:***@host/x"),
    ],
)
def test_values_of_secret_names_are_replaced(command: str, shown: str) -> None:
    assert without_secret_arguments(command.split()) == shown.split()


def test_stored_settings_hold_no_secret() -> None:
    settings = {
        "hub_token": "abc",
        "learning_rate": 1e-6,
        "command": ["train.py", "--password", "abc"],
        "name": "hf_" + "a" * 30,
    }
    assert without_secret_settings(settings) == {
        "hub_token": "***",
        "learning_rate": 1e-6,
        "command": ["train.py", "--password", "***"],
        "name": "***",
    }


def test_a_token_of_known_form_is_replaced_wherever_it_stands() -> None:
    token = "hf_" + "a" * 30
    assert without_secret_arguments(["train.py", token]) == ["train.py", "***"]
    assert without_secret_settings({"command": ["train.py", token]}) == {
        "command": ["train.py", "***"]
    }
