"""Secrets are redacted and ordinary words stay."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.core.secrets import Secrets, is_secret, without_password

TOKEN = "hf_" + "abcDEF0123456789xyzXYZ01"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "DB_PASSWORD",
        "hub_token",
        "OPENAI_API_KEY",
        "token",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "PATH",
        "HF_TOKEN_PATH",
        "eos_token",
        "pad_token",
        "KEYBOARD",
        "tokenizer_name",
        "PWDX",
    ],
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
    assert (
        Secrets({"STUDY_URL": "postgresql://ada:unguessable@h/d"}).hide("said unguessable")
        == "said ***"
    )


def test_settings_by_name_and_everything_inside() -> None:
    hidden = Secrets({}).hide_all(
        {"hub_token": "anything", "max_tokens": 5, "deep": [{"text": TOKEN}], "token": None}
    )
    assert hidden == {"hub_token": "***", "max_tokens": 5, "deep": [{"text": "***"}], "token": None}


@pytest.mark.parametrize("value", ["true", "1", "/etc/token", "short"])
def test_other_values_stay(value: str) -> None:
    assert Secrets({"X_TOKEN": value}).hide(f"a {value} b") == f"a {value} b"


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASS",
        "SMTP_PASSPHRASE",
        "KEY_PHRASE",
        "GH_PAT",
        "GIT_CREDENTIALS",
        "NPM_AUTH",
        "MY_KEY",
        "DBPASSWORD",
        "HFTOKEN",
        "apiKey",
        "hubToken",
        "X-Api-Key",
        "db.password",
        "HF_TOKEN_2",
        "AWS_SECRET_ACCESS_KEY",
        "access_tokens",
        "client_secret",
        "Authorization",
    ],
)
def test_more_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "num_key_value_heads",
        "author",
        "AUTHOR",
        "authors",
        "key",
        "prompt_key",
        "sort_keys",
        "pass_at_k",
        "forward_pass",
        "PWD",
        "OLDPWD",
        "pattern",
        "path",
        "LD_LIBRARY_PATH",
        "max_new_tokens",
        "MAX_TOKEN",
        "bypass",
        "SSH_AUTH_SOCK",
        "auth_backend",
        "passive",
        "compass",
        "monkey",
        "tokens",
        "average_tokens_across_devices",
        "CREDENTIALS_FILE",
        "include_num_input_tokens_seen",
        "per_token_loss",
        "keyboard",
        "PATIENCE",
        "spatial",
        "num_keys",
        "image_token",
        "tokenizer",
        "SSL_CERT_KEY_PATH",
    ],
)
def test_more_names_of_ordinary_things(name: str) -> None:
    assert not is_secret(name)


ALPHABET = st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
LONG = st.text(ALPHABET, min_size=40, max_size=60)
VALUE = st.text(
    st.characters(codec="utf-8", exclude_characters="\0*"), min_size=8, max_size=80
).map(str.strip)
FORMS = [
    "hf_{}",
    "gho_{}",
    "ghp_{}",
    "ghs_{}",
    "github_pat_{}",
    "glpat-{}",
    "sk-{}",
    "sk_live_{}",
    "xoxb-{}",
    "nvapi-{}",
    "npm_{}",
    "eyJ{0}.eyJ{0}.{0}",
    "Bearer {}",
    "https://{}@github.com/a/b",
    "https://x-access-token:{}@host/a",
    "at /v1?token={}",
    "https://h/b?x=1&X-Amz-Signature={}",
    "https://h/?api_key={}&y=2",
    "-----BEGIN RSA PRIVATE KEY-----\n{0}\n{0}\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----",
]


@pytest.mark.parametrize("form", FORMS)
@given(LONG)
def test_secrets_by_their_form(form: str, body: str) -> None:
    shown = Secrets({}).hide(f"before {form.format(body)} after")
    assert body not in shown and shown.startswith("before ") and shown.endswith(" after")


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0*"), min_size=8, max_size=80)
    .map(str.strip)
    .filter(lambda text: len(text) >= 8)
)
def test_a_named_value_goes_whatever_it_is(value: str) -> None:
    assume(len(value) >= 8)
    plain = re.fullmatch(r"\d+|disabled", value, re.IGNORECASE) or (
        value[0] in "/~." and Path(value).exists()
    )
    shown = Secrets({"DB_PASS": value}).hide(f"<{value}> {quote(value, safe='')}")
    assert plain or (value not in shown and shown == "<***> ***")


def test_a_key_that_is_cut_off_goes_to_the_end() -> None:
    assert (
        Secrets({}).hide("key: -----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIrl\nAwEHoUQDQgAE")
        == "key: ***"
    )


def test_a_value_that_begins_with_a_slash() -> None:
    assert Secrets({"X_KEY": "/Ab9+xyz/QwErTy12"}).hide("a /Ab9+xyz/QwErTy12 b") == "a *** b"
    assert (
        Secrets({"X_KEY": "/etc/ssl/private.pem"}).hide("a /etc/ssl/private.pem b")
        == "a /etc/ssl/private.pem b"
    )


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=1024 num_key_value_heads=8 tokens/s=36601",
        "https://github.com/huggingface/trl/issues/1?page=2",
        "PATH=/usr/bin:/bin",
        "author: Ada Lovelace",
        "key=value, sort=desc",
        "see http://localhost:8080/dashboard",
        "ssh://git@host/a",
        "token 151643 is '<|endoftext|>'",
        "hf_transfer is installed",
        "sk-learn",
        "bearer of bad news",
        "loss?key",
        "a?b=c&d=e",
        "sha256:0123456789abcdef0123456789abcdef",
        "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert Secrets({"PATH": "/usr/bin:/bin", "AUTHOR": "Ada Lovelace"}).hide(text) == text
