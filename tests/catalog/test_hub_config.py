"""A config.json from the hub, answered by a local HTTP server that HF_ENDPOINT names."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from autotune.catalog.model_lookup import MAX_FETCHED_BYTES, find_model
from autotune.core.errors import BadInput
from autotune.request.flags import Flags
from autotune.request.request_parser import parse_request

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "vocab_size": 1000,
}


class Hub(ThreadingHTTPServer):
    paths: list[str]
    answers: dict[str, bytes]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        self.server.paths.append(self.path)
        answer = self.server.answers.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.paths, server.answers = (
        [],
        {"/nobody/new-1b/resolve/main/config.json": json.dumps(CONFIG).encode()},
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_an_unknown_hub_id_is_fetched_and_the_answer_says_so(hub: Hub) -> None:
    model = find_model("nobody/new-1b")
    assert model.config == CONFIG and model.folder is None
    assert model.origin == "config.json fetched from the hub"
    assert hub.paths == ["/nobody/new-1b/resolve/main/config.json"]


def test_an_adapter_has_the_shape_of_its_base_model(hub: Hub) -> None:
    adapter = {"base_model_name_or_path": "Qwen/Qwen2.5-7B", "r": 16}
    path = "/nobody/adapter/resolve/main/adapter_config.json"
    hub.answers[path] = json.dumps(adapter).encode()
    model = find_model("nobody/adapter")
    assert model.config == find_model("Qwen/Qwen2.5-7B").config
    assert (model.name, model.origin) == (
        "nobody/adapter",
        "catalogue, base Qwen/Qwen2.5-7B of the adapter",
    )
    hub.answers[path] = b'{"base_model_name_or_path": "nobody/adapter"}'
    with pytest.raises(BadInput, match="neither in the catalogue"):
        find_model("nobody/adapter")


def test_a_known_model_is_not_asked_for(hub: Hub) -> None:
    assert find_model("Qwen/Qwen2.5-7B").origin == "catalogue"
    assert hub.paths == []


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_nothing_is_fetched(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(BadInput, match="neither in the catalogue"):
        find_model("nobody/new-1b")
    assert hub.paths == []


def test_the_flag_keeps_a_request_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(BadInput, match="neither in the catalogue"):
        parse_request(
            Flags(
                model="nobody/new-1b",
                gpus="H100",
                mode="predict",
                offline=True,
            )
        )
    assert hub.paths == [] and os.environ["HF_HUB_OFFLINE"] == "1"


def test_what_is_missing_or_too_large_is_refused_as_without_a_network(hub: Hub) -> None:
    hub.answers["/nobody/large/resolve/main/config.json"] = b" " * (MAX_FETCHED_BYTES + 1)
    for name in ("nobody/none", "nobody/large"):
        with pytest.raises(BadInput, match="neither in the catalogue"):
            find_model(name)


def test_what_is_no_config_is_refused(hub: Hub) -> None:
    hub.answers["/nobody/page/resolve/main/config.json"] = b"<html></html>"
    with pytest.raises(BadInput, match="cannot be read"):
        find_model("nobody/page")
