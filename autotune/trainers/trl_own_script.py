"""The user's own training script, as a first look at it tells: what it trains, with which settings, made where.

The look runs in the training environment, in a process of its own (inside/adapters/trl_script_look.py), up to where the script's
trainer would train. What it can't use is said here, each with the way out.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import autotune.inside
from autotune.errors import BadInput, TrainingEnvironmentError
from autotune.own_script import Look, OwnScript, Rewards
from autotune.trainers.trl_calls import most_calls

TIMEOUT_SECONDS = 1800.0
"""A script may fetch and map its dataset before it comes to its trainer."""

BUILT = ("GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer")
SPREADING = ("deepspeed", "fsdp")


def look_at(
    path: str, arguments: tuple[str, ...], *, python: Path, rewards: Rewards, method: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> OwnScript:  # fmt: skip
    """Run the script up to its trainer, in the training environment; BadInput where there is none to tune."""
    if not Path(path).is_file():
        raise BadInput(f"--script {path} is no file.", way_out="Give the path of the Python script that you train with.")
    answer, log = _asked(path, arguments, python, method, timeout_seconds)
    if "error" in answer:
        raise _refusal(path, python, answer["error"], log)
    look = msgspec.convert(answer, Look, strict=False)
    script = OwnScript(path=path, arguments=arguments, rewards=rewards, look=look, fingerprint=_fingerprint(look.modules))
    _refuse_what_is_not_one_training(script)
    return script


def _asked(path: str, arguments: tuple[str, ...], python: Path, method: str | None, timeout: float) -> tuple[Any, str]:
    inside = Path(autotune.inside.__file__).parent
    request = {"script": path, "arguments": list(arguments), "method": method}
    try:
        done = subprocess.run(
            [str(python), str(inside), "look"], input=json.dumps(request), capture_output=True, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise TrainingEnvironmentError(f"{python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"{path} did not come to its trainer within {timeout:.0f} s.", way_out="Let it prepare its data once, and run again."
        ) from error
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        raise _ended(path, done.returncode, done.stderr) from None


def _ended(path: str, code: int, log: str) -> BadInput:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return BadInput(
        f"{path} {how} before it built a trainer{_last(log)}", way_out="See that `python {path}` trains, then try again."
    )


def _refusal(path: str, python: Path, error: Mapping[str, Any], log: str) -> Exception:
    kind, text = str(error["kind"]), str(error["text"])
    line = f" in line {error['line']}" if error.get("line") else ""
    if kind == "crashed" and text.startswith("ModuleNotFoundError"):
        return TrainingEnvironmentError(
            f"{path} stops{line}: {text}. Name the interpreter that has it with --python; this is {python}."
        )
    words = {
        "crashed": (
            f"{path} stops{line}, before its trainer is built: {text}.",
            f"See that `python {path}` trains. Its own arguments go behind two dashes: --script {path} -- ARGUMENTS.",
        ),
        "ended": (
            f"{path} ends by itself with status {text} before it builds a trainer{_last(log)}",
            f"Its own arguments go behind two dashes: --script {path} -- ARGUMENTS.",
        ),
        "no_trainer": (
            f"{path} comes to its end and builds no {' or '.join(BUILT)}"
            + (f" of the method that was asked for, only {text}." if text else "."),
            "Leave --method out." if text else "Give the script that builds it, with the arguments that make it train.",
        ),
        "two_trainers": (
            f"{path} builds two trainers before it trains, {text}, and a recommendation is for one.",
            "Give each a script of its own, or let an argument choose between them.",
        ),
        "odd_trainer": (f"{path}: {text}, so there is no telling what it is built from.", "Call it from your class's __init__."),
    }
    what, way_out = words[kind]
    return BadInput(what, way_out=way_out)


def _last(log: str) -> str:
    """The last thing it said, in front of the sentence's end."""
    lines = [line.strip() for line in log.strip().splitlines() if line.strip()]
    return f": {lines[-1][-300:].rstrip('.')}." if lines else "."


def _refuse_what_is_not_one_training(script: OwnScript) -> None:
    look = script.look
    if look.optimizers:
        raise BadInput(
            f"{script.path} hands its trainer an optimizer ready-made, which belongs to one model and can't be made again.",
            way_out="Name it with optim= in the configuration, and leave optimizers= out.",
        )
    for name in SPREADING:
        if look.raw.get(name) or name in look.left:
            raise BadInput(
                f"{script.path} sets {name} in its configuration, and autotune spreads models through accelerate.",
                way_out=f"Leave {name} out and say how: --hold sharding=zero3 (or zero1, zero2, fsdp2).",
            )
    if look.train_place is not None:
        times = most_calls(look.train_place.file, look.train_place.line, "train")
        if times > 1:
            raise BadInput(
                f"{script.path} trains more than once ({look.train_place} is one of {times} calls, or in a loop), and a "
                "recommendation is for one training.",
                way_out="Let an argument choose which of them runs, and tune each.",
            )
    _refuse_more_trainers(script)


def _refuse_more_trainers(script: OwnScript) -> None:
    place = script.look.trainer_place
    built = most_calls(place.file, None, *BUILT)
    if built > 1:
        raise BadInput(
            f"{script.path} builds {built} trainers one after the other ({place} is the first), and a recommendation is for one.",
            way_out="Give each a script of its own, or let an argument choose between them.",
        )


def _fingerprint(files: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.encode() + b"\0")
        if Path(file).is_file():
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]
