"""Description of the wire, compared with the parent's validation."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from autotune.core.secrets import Secrets
from autotune.probe import message_validation
from autotune.worker import protocol

EXAMPLES: dict[type, Any] = {int: 1, float: 0.5, str: "rollout", bool: True, dict: {}, list: []}


def example(hint: Any) -> Any:
    """Build a value of a type, with all fields of a TypedDict."""
    if typing.is_typeddict(hint):
        return {name: example(inner) for name, inner in typing.get_type_hints(hint).items()}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [] if arguments == (protocol.Message,) else [example(arguments[0])]
    if origin is dict:
        return {} if Any in arguments or arguments[1] == protocol.Message else {"rollout": example(arguments[1])}
    if arguments and origin not in (list, dict):  # of a union the first
        return example(arguments[0])
    return EXAMPLES[hint]


@pytest.mark.parametrize("event", [protocol.LOADED, protocol.MEASURED, protocol.FAILED, protocol.CYCLE, protocol.READY])
def test_a_message_with_all_described_fields_is_valid(event: str) -> None:
    message = {**example(protocol.Event), "event": event}
    assert message_validation.valid_messages([message], Secrets({})) == [message]


def test_no_field_of_an_event_is_described_twice() -> None:
    commands, events = typing.get_type_hints(protocol.Command), typing.get_type_hints(protocol.Event)
    assert set(commands) & set(events) == {"id"}


def test_a_phase_that_does_not_exist_makes_a_message_void() -> None:
    """An outcome is named after the phase: `oom_9` is none."""
    lost = {"event": protocol.LOST, "rank": 0, "signal": 9}
    assert message_validation.valid_messages([{**lost, "phase": "rollout"}, {**lost, "phase": "9"}], Secrets({})) == [
        {**lost, "phase": "rollout"}
    ]
    failed = {**example(protocol.Event), "event": protocol.FAILED, "phase": "9"}
    (answer,) = message_validation.valid_messages([failed], Secrets({}))
    assert answer["error"]["type"] == "MalformedAnswer" and "phase" not in answer


def test_models_of_a_launched_run_need_a_rank_and_bytes() -> None:
    measured = {"event": protocol.MEASURED, "id": 1, "rank": 0}
    good = {**measured, "result": {"models": [{"rank": 1, "bytes": {"weights": 7}}]}}
    bad = {**measured, "result": {"models": [{"rank": "first", "bytes": {"weights": 7}}]}}
    kept, refused = message_validation.valid_messages([good, bad], Secrets({}))
    assert kept == good
    assert refused["error"]["type"] == "MalformedAnswer" and "rank" in refused["error"]["text"]


def test_a_norm_that_overflowed_is_unknown() -> None:
    """A figure that is not finite would make the whole reply void."""
    pytest.importorskip("torch")
    from autotune.worker.trl.trainer_run import finite

    assert [finite(number) for number in (None, float("nan"), float("inf"), 2)] == [None, None, None, 2.0]
