"""A script that loads a model is inspected at once where no name server knows the hub."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from autotune.catalog.model_lookup import OFFLINE_VARIABLES
from autotune.frameworks.trl import look_worker


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*look_worker.PROXIES, *OFFLINE_VARIABLES, "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    yield


def test_a_hub_that_no_name_server_knows_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_hosts = []

    def unknown(host: str, _: object) -> None:
        asked_hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert look_worker._offline() == {"HF_HUB_OFFLINE": "1"}
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/path")
    assert look_worker._offline() == {"HF_HUB_OFFLINE": "1"}
    assert asked_hosts == ["huggingface.co", "hub.example"]


def test_a_known_hub_and_a_proxy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert look_worker._offline() == {}
    monkeypatch.delattr(socket, "getaddrinfo")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert look_worker._offline() == {}
