"""Nothing secret is left in a text, and ordinary words stay."""

from __future__ import annotations

import pytest

from autotune.secrets import Secrets, is_secret, without_password

TOKEN = "hf_" + "abcDEF0123456789xyzXYZ01"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PASSWORD", "hub_token", "OPENAI_API_KEY", "token"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "PATH", "HF_TOKEN_PATH", "eos_token", "pad_token", "KEYBOARD", "tokenizer_name", "PWDX"],
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret(name)


def test_values_of_secret_variables_go_wherever_they_stand() -> None:
    secrets = Secrets({"WANDB_API_KEY": "0123456789abcdef", "HOME": "/home/ada"})
    assert secrets.hide("key=0123456789abcdef at /home/ada") == "key=*** at /home/ada"


def test_a_longer_secret_goes_before_one_that_it_begins_with() -> None:
    secrets = Secrets({"A_TOKEN": "longenough", "B_TOKEN": "longenough-and-more"})
    assert secrets.hide("longenough-and-more longenough") == "*** ***"


def test_known_forms_go_without_a_variable() -> None:
    assert Secrets({}).hide(f"401 for {TOKEN}!") == "401 for ***!"


def test_passwords_of_addresses() -> None:
    assert without_password("postgresql://ada:pass-word@host/db") == "postgresql://ada:***@host/db"
    assert Secrets({}).hide("at postgresql://ada:pw@host/db") == "at postgresql://ada:***@host/db"
    assert Secrets({"STUDY_URL": "postgresql://ada:unguessable@h/d"}).hide("said unguessable") == "said ***"


def test_settings_by_name_and_everything_inside() -> None:
    found = Secrets({}).hide_all({"hub_token": "anything", "max_tokens": 5, "deep": [{"text": TOKEN}], "token": None})
    assert found == {"hub_token": "***", "max_tokens": 5, "deep": [{"text": "***"}], "token": None}


@pytest.mark.parametrize("value", ["true", "1", "/etc/token", "short"])
def test_what_is_no_secret_stays(value: str) -> None:
    assert Secrets({"X_TOKEN": value}).hide(f"a {value} b") == f"a {value} b"
