"""Inspection of the user's own training script: trainer, settings and their places in the source.

The script runs in the training environment (worker/trl/script_look.py) up to the start of its
training. Unsupported scripts are refused here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import autotune.worker
from autotune.core.errors import BadInput, TrainingEnvironmentError
from autotune.core.job import Hardware
from autotune.core.secrets import without_side_effects
from autotune.core.user_script import Rewards, ScriptInspection, UserScript
from autotune.frameworks.trl.source_calls import most_calls

TIMEOUT_S = 1800.0  # includes the download and preparation of the script's dataset
TRAINER_CLASSES = (
    "GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "AsyncGRPOTrainer",
)  # fmt: skip
OTHER_TRAINERS: Mapping[str, str] = {
    "PPOTrainer": "Use --method ppo, with TRL up to 1.12.",
    "OnlineDPOTrainer": "Use --method online-dpo without a script.",
}
"""Trainers outside of scripts -> what can be used instead."""

ONE_TRAINER = "Give each a script of its own, or let an argument choose between them."


def look_at(
    path: str, arguments: tuple[str, ...], *, python: Path, hardware: Hardware, rewards: Rewards, method: str | None = None
) -> UserScript:  # fmt: skip
    """Run the script up to its trainer in the training environment. Raises BadInput without one."""
    if not Path(path).is_file():
        raise BadInput(f"--script {path} is no file.", way_out="Give the path of the Python script that you train with.")
    answer, log = _run(path, arguments, python, hardware, method)
    if "error" in answer:
        raise _refusal(path, python, answer["error"], log)
    look = msgspec.convert(answer, ScriptInspection, strict=False)
    digest = hashlib.sha256()
    for file in look.modules:
        digest.update(file.encode() + b"\0")
        if Path(file).is_file():
            digest.update(Path(file).read_bytes())
    script = UserScript(path=path, arguments=arguments, rewards=rewards, look=look, fingerprint=digest.hexdigest()[:16])
    _refuse_unsupported(script)
    return script


def _run(path: str, arguments: tuple[str, ...], python: Path, hardware: Hardware, method: str | None) -> tuple[Any, str]:
    worker = Path(autotune.worker.__file__).parent
    request = {"script": path, "arguments": list(arguments), "method": method, "device": hardware.kind}
    try:
        done = subprocess.run(
            [str(python), str(worker), "look"], input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False, env=without_side_effects(os.environ),
        )  # fmt: skip
    except OSError as error:
        raise TrainingEnvironmentError(f"{python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"{path} did not reach its trainer within {TIMEOUT_S:.0f} s.", way_out="Let it prepare its data once, and run again."
        ) from error
    try:
        return json.loads(done.stdout), done.stderr
    except ValueError:
        code = done.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        raise BadInput(
            f"{path} {how} before it built a trainer{_last_line(done.stderr)}",
            way_out=f"Check that `python {path}` trains, then try again.",
        ) from None


def _refusal(path: str, python: Path, error: Mapping[str, Any], log: str) -> Exception:
    kind, text = str(error["kind"]), str(error["text"])
    line = f" in line {error['line']}" if error.get("line") else ""
    if kind == "crashed" and text.startswith("ModuleNotFoundError"):
        return TrainingEnvironmentError(f"{path} stops{line}: {text}. {python} lacks it: name another interpreter with --python.")
    separator = f"Pass its own arguments after two dashes: --script {path} -- ARGUMENTS."
    classes = " or ".join(TRAINER_CLASSES)
    problems = {
        "crashed": (
            f"{path} stops{line}, before its trainer is built: {text}.",
            f"Check that `python {path}` trains. {separator}",
        ),
        "ended": (f"{path} exits with status {text} before it builds a trainer{_last_line(log)}", separator),
        "no_trainer": (
            f"{path} ends and builds no {classes}" + (f" of the requested method, only {text}." if text else "."),
            "Leave --method out." if text else "Give the script that builds it, with the arguments that make it train.",
        ),
        "two_trainers": (
            f"{path} builds two trainers before it trains, {text}, and a recommendation is for one.", ONE_TRAINER,
        ),
        "other_trainer": (
            f"{path} builds {text}, whose training is not modelled, so that it can be neither predicted nor probed.",
            OTHER_TRAINERS.get(text, f"Known are {', '.join(TRAINER_CLASSES)}."),
        ),
        "odd_trainer": (f"{path}: {text}, so that its arguments are unknown.", "Call it from your class's __init__."),
    }  # fmt: skip
    problem, way_out = problems[kind]
    return BadInput(problem, way_out=way_out)


def _last_line(log: str) -> str:
    """Return the last line of the log as the end of a sentence."""
    lines = [line.strip() for line in log.strip().splitlines() if line.strip()]
    return f": {lines[-1][-300:].rstrip('.')}." if lines else "."


def _refuse_unsupported(script: UserScript) -> None:
    look = script.look
    if look.optimizers:
        raise BadInput(
            f"{script.path} passes a ready-made optimizer to its trainer, which belongs to one model and cannot be rebuilt.",
            way_out="Name it with optim= in the configuration, and leave optimizers= out.",
        )
    for name in ("deepspeed", "fsdp"):
        if look.raw.get(name) or name in look.left:
            raise BadInput(
                f"{script.path} sets {name} in its configuration, and autotune shards models through accelerate.",
                way_out=f"Remove {name} and use --hold sharding=zero3 (or zero1, zero2, fsdp2).",
            )
    for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
        if look.raw.get(name) is not None or name in look.left:
            former = name.replace("activation", "gradient")
            raise BadInput(
                f"{script.path} sets {name}, which outweighs the {former} of a recommendation.",
                way_out=f"Write {former}: transformers 5 accepts it too.",
            )
    if look.train_place is not None and (times := most_calls(look.train_place.file, look.train_place.line, "train")) > 1:
        raise BadInput(
            f"{script.path} trains more than once ({look.train_place} is one of {times} calls, or in a loop), and a "
            "recommendation is for one training.",
            way_out="Let an argument choose which of them runs, and tune each.",
        )
    if (built := most_calls(look.trainer_place.file, None, *TRAINER_CLASSES)) > 1:
        raise BadInput(
            f"{script.path} builds {built} trainers one after the other ({look.trainer_place} is the first), "
            "and a recommendation is for one.",
            way_out=ONE_TRAINER,
        )
