"""Validation of the messages that a worker's processes send.

The user's own code runs in a rank's process and can write anything to the connection. The parent
uses only messages of the agreed form; a rank with a malformed reply counts as failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from autotune.core.files import read_by_threads
from autotune.core.measurement import Count, LoopActivity, ModelMemory, Phase, Seconds, TorchMemory
from autotune.core.plain_text import without_terminal_codes
from autotune.core.secrets import Secrets
from autotune.worker import protocol
from autotune.worker.protocol import Message

_Text = Annotated[str, msgspec.Meta(max_length=2**22)]
_Part = Annotated[str, msgspec.Meta(max_length=64)]


class _Error(msgspec.Struct):
    """Exception of the worker or of a rank."""

    type: _Text
    text: _Text
    traceback: _Text | None = None
    frames: list[_Text] = []  # innermost frames as file:function, outermost first
    chain: list[_Link] = []  # the error, its cause, the cause of that


class _Link(msgspec.Struct):
    type: _Text
    text: _Text


class RankSpeed(msgspec.Struct):
    """Timed cycles of one run on one rank."""

    completion_tokens: Count  # length of each completion; of drawn lengths the mean
    cycle_seconds: list[Seconds]
    cycle_loss_tokens: list[Count]
    prompt_tokens: Count

    phase_seconds: dict[str, Seconds] = {}
    """Exclusive, `protocol.OTHER` among them; their sum is that of `cycle_seconds`."""

    user_reward_seconds: Seconds = 0.0
    cut_short: bool = False

    borrowed_seconds: Seconds = 0.0
    """Part of `cycle_seconds` measured for an earlier candidate with the same rollouts."""

    drawn: bool = False  # each completion had a length of its own
    left_out_cycles: Count = 0  # after the warm-up, before the speed was steady
    steady: bool | None = None

    def __post_init__(self) -> None:
        if len(self.cycle_seconds) != len(self.cycle_loss_tokens):
            raise ValueError("cycle_seconds and cycle_loss_tokens need one entry per cycle")
        if any(seconds <= 0 for seconds in self.cycle_seconds):
            raise ValueError("cycle_seconds must be positive")


class _Memory(msgspec.Struct):
    """Memory of one rank. CPU: RssAnon + RssShmem. GPU: the rank's share of its device."""

    peak_bytes: Count | None = None
    longest_peak_bytes: Count | None = None  # before completions of varied lengths were run
    phase_peak_bytes: dict[Phase, Count] | None = None
    torch_by_phase: dict[str, TorchMemory] | None = None
    torch_allocated_bytes: Count | None = None
    torch_reserved_bytes: Count | None = None
    torch_reserved_why: _Text | None = None  # reason for an unknown reserved figure
    allocation_retries: Count | None = None
    allocation_failures: Count | None = None
    device_uuid: _Text | None = None

    model_bytes: dict[_Part, Count] | None = None
    """The models' own tensors by part, see `worker/model_memory.py`."""


@read_by_threads
class RankResult(_Memory):
    """Result of one measure on one rank, complete or partial."""

    # The same figures in a message of some adapters; `rank_result` moves them up
    memory: _Memory = msgspec.field(default_factory=_Memory)
    worst: RankSpeed | None = None  # run at the longest lengths
    typical: RankSpeed | None = None  # run at typical lengths
    optimizer_steps: Count | None = None

    effective: dict[str, Any] | None = None
    """Settings read back from the trainer, the model and the engine."""

    exercised: LoopActivity | None = None
    setup_seconds: Seconds | None = None
    loop_seconds: Seconds | None = None
    world_size: Count | None = None  # ranks according to the trainer: as many as the probe has
    models: list[ModelMemory] | None = None  # `model_bytes` of all ranks of a launched run


@read_by_threads
class _Received(msgspec.Struct):
    """Fields of an event that the parent relies on; others, such as those of progress, are
    display text.
    """

    event: Annotated[str, msgspec.Meta(max_length=64)]
    id: int | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**20)] | None = None
    phase: Phase | None = None
    signal: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)] | None = None
    base_bytes: Count | None = None  # memory of the rank before the request
    stays: bool = True  # False: the rank exits and the parent loads it again
    error: _Error | None = None
    result: RankResult | None = None
    partial: RankResult | None = None  # what a failed rank knew by then
    versions: dict[str, str] | None = None
    afresh: _Text | None = None


_REPLIES = (protocol.LOADED, protocol.MEASURED, protocol.FAILED)
_REQUIRED_FIELD = {
    protocol.FAILED: "error",
    protocol.UNREADY: "error",
    protocol.ENVIRONMENT_EVENT: "versions",
}


def valid_messages(messages: list[Message], secrets: Secrets) -> list[Message]:
    """Return the valid messages, secrets masked; a malformed reply becomes its rank's failure."""
    valid = []
    for received in messages:
        message = _checked(_as_text(received))
        if message is not None:
            valid.append(secrets.hide_all(message))
    return valid


def rank_result(message: Message) -> RankResult:
    """Return the result in a valid message; an empty one if it has none."""
    fields = message.get("result") or message.get("partial") or {}
    return msgspec.convert({**fields, **fields.get("memory", {})}, RankResult)


def _as_text(value: Any) -> Any:
    """Replace lone surrogates (undecodable bytes in JSON) by `?`: UTF-8 cannot encode them. Codes
    that control a terminal are removed.
    """
    if isinstance(value, str):
        return without_terminal_codes(value.encode("utf-8", "replace").decode())
    if isinstance(value, dict):
        return {_as_text(name): _as_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_as_text(inner) for inner in value]
    return value


def _checked(message: Message) -> Message | None:
    fault = _fault(message)
    if fault is None:
        return message
    rank = message.get("rank")
    number = message.get("id")
    is_reply = message.get("event") in _REPLIES
    if not is_reply or type(rank) is not int or type(number) is not int or rank < 0:
        return None
    return {
        "event": protocol.FAILED,
        "id": number,
        "rank": rank,
        "stays": False,
        "error": {
            "type": "MalformedAnswer",
            "text": f"A rank's reply does not have the agreed form: {fault}.",
        },
    }


def _fault(message: Message) -> str | None:
    try:
        received = msgspec.convert(message, type=_Received)
        for name, number in _numbers(message):
            if not math.isfinite(number):
                return f"a figure in it is not finite: {name}"
    except (msgspec.ValidationError, RecursionError) as error:
        return str(error)[:300]
    required = _REQUIRED_FIELD.get(received.event)
    if required is not None and getattr(received, required) is None:
        return f"it lacks `{required}`"
    return None


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the figures that enter calculations, with their names: `effective` settings are
    display text.
    """
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != "effective":
                yield from _numbers(inner, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, place)
