"""Events of the wire, as the parent validates them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from autotune.core.secrets import Secrets
from autotune.probe import message_validation
from autotune.worker import protocol


def test_a_phase_that_does_not_exist_makes_a_message_void() -> None:
    """An outcome is named after the phase: `oom_9` is none."""
    lost = {"event": protocol.LOST, "rank": 0, "signal": 9}
    assert message_validation.valid_messages(
        [{**lost, "phase": "rollout"}, {**lost, "phase": "9"}], Secrets({})
    ) == [{**lost, "phase": "rollout"}]
    error = {"type": "OutOfMemoryError", "text": "no room"}
    failed = {
        "event": protocol.FAILED,
        "id": 1,
        "rank": 0,
        "error": error,
        "phase": "9",
    }
    (answer,) = message_validation.valid_messages([failed], Secrets({}))
    assert answer["error"]["type"] == "MalformedAnswer"
    assert "phase" not in answer


def test_models_of_a_launched_run_need_a_rank_and_bytes() -> None:
    measured = {"event": protocol.MEASURED, "id": 1, "rank": 0}
    good = {**measured, "result": {"models": [{"rank": 1, "bytes": {"weights": 7}}]}}
    bad = {**measured, "result": {"models": [{"rank": "first", "bytes": {"weights": 7}}]}}
    valid, refused = message_validation.valid_messages([good, bad], Secrets({}))
    assert valid == good
    assert refused["error"]["type"] == "MalformedAnswer"
    assert "rank" in refused["error"]["text"]


def test_a_norm_that_overflowed_is_unknown() -> None:
    """A figure that is not finite would make the whole reply void."""
    pytest.importorskip("torch")
    from autotune.worker.trl.trainer_run import finite

    assert [finite(number) for number in (None, float("nan"), float("inf"), 2)] == [
        None,
        None,
        None,
        2.0,
    ]


def test_a_script_that_replaces_json_does_not_silence_the_wire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts let `json.dumps` be another library's, which answers with bytes."""
    sending, receiving = socket.socketpair()
    monkeypatch.setattr(json, "dumps", lambda value: b"replaced")
    monkeypatch.setattr(json, "loads", lambda text: "replaced")
    sender, receiver = protocol.Wire(sending), protocol.Wire(receiving)
    assert sender.send({"event": protocol.PHASE, "path": Path("here")})
    assert receiver.take(5) == [{"event": protocol.PHASE, "path": "here"}]
    sender.close()
    receiver.close()
