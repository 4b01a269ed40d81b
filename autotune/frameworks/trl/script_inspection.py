"""The user's own training script: its inspection, and the trainer that measures it.

The script runs in the training environment (worker/trl/script_look.py) up to the start of its
training. Unsupported scripts are refused here.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

import autotune.worker
from autotune.core.dataset import PromptLengths
from autotune.core.errors import BadInput, TrainingEnvironmentError
from autotune.core.job import Hardware, Task
from autotune.core.measurement import ProbePlan
from autotune.core.secrets import without_side_effects
from autotune.core.space import Candidate
from autotune.core.user_script import Rewards, ScriptInspection, UserScript
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl.script_files import write_files

TIMEOUT_S = 1800.0  # includes the download and preparation of the script's dataset
SUPPORTED_TRAINERS = (
    "GRPOTrainer",
    "RLOOTrainer",
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "AsyncGRPOTrainer",
)
OTHER_TRAINERS: Mapping[str, str] = {
    "PPOTrainer": "Use --framework verl, openrlhf or open-reasoner-zero, with --method ppo.",
    "OnlineDPOTrainer": "Use --method online-dpo without a script.",
}
"""Trainers outside of scripts -> what can be used instead."""

ONE_TRAINER = "Give each a script of its own, or let an argument choose between them."
MANY = 2  # lower bound of the calls inside a loop


def look_at(
    path: str,
    arguments: tuple[str, ...],
    *,
    python: Path,
    hardware: Hardware,
    rewards: Rewards,
    method: str | None = None,
) -> UserScript:
    """Run the script up to its trainer in the training environment. Raises BadInput without one."""
    if not Path(path).is_file():
        raise BadInput(
            f"--script {path} is no file.",
            way_out="Give the path of the Python script that you train with.",
        )
    answer, log = _run(path, arguments, python, hardware, method)
    if "error" in answer:
        raise _refusal(path, python, answer["error"], log)
    look = msgspec.convert(answer, ScriptInspection, strict=False)
    digest = hashlib.sha256()
    for file in look.modules:
        digest.update(file.encode() + b"\0")
        if Path(file).is_file():
            digest.update(Path(file).read_bytes())
    script = UserScript(
        path=path,
        arguments=arguments,
        rewards=rewards,
        look=look,
        fingerprint=digest.hexdigest()[:16],
    )
    _refuse_unsupported(script)
    return script


def _run(
    path: str, arguments: tuple[str, ...], python: Path, hardware: Hardware, method: str | None
) -> tuple[Any, str]:
    worker = Path(autotune.worker.__file__).parent
    request = {
        "script": path,
        "arguments": list(arguments),
        "method": method,
        "device": hardware.kind,
    }
    try:
        done = subprocess.run(
            [str(python), str(worker), "look"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=without_side_effects(os.environ),
        )
    except OSError as error:
        raise TrainingEnvironmentError(f"{python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"{path} did not reach its trainer within {TIMEOUT_S:.0f} s.",
            way_out="Let it prepare its data once, and run again.",
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
        return TrainingEnvironmentError(
            f"{path} stops{line}: {text}. {python} lacks it: name another interpreter with"
            " --python."
        )
    separator = f"Pass its own arguments after two dashes: --script {path} -- ARGUMENTS."
    classes = " or ".join(SUPPORTED_TRAINERS)
    problems = {
        "crashed": (
            f"{path} stops{line}, before its trainer is built: {text}.",
            f"Check that `python {path}` trains. {separator}",
        ),
        "ended": (
            f"{path} exits with status {text} before it builds a trainer{_last_line(log)}",
            separator,
        ),
        "no_trainer": (
            f"{path} ends and builds no {classes}"
            + (f" of the requested method, only {text}." if text else "."),
            (
                "Leave --method out."
                if text
                else "Give the script that builds it, with the arguments that make it train."
            ),
        ),
        "two_trainers": (
            (
                f"{path} builds two trainers before it trains, {text}, and a recommendation is for"
                " one."
            ),
            ONE_TRAINER,
        ),
        "other_trainer": (
            (
                f"{path} builds {text}, whose training is not modelled, so that it can be neither"
                " predicted nor probed."
            ),
            OTHER_TRAINERS.get(text, f"Known are {', '.join(SUPPORTED_TRAINERS)}."),
        ),
        "odd_trainer": (
            f"{path}: {text}, so that its arguments are unknown.",
            "Call it from your class's __init__.",
        ),
    }
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
            f"{script.path} passes a ready-made optimizer to its trainer, which belongs to one"
            " model and cannot be rebuilt.",
            way_out="Name it with optim= in the configuration, and leave optimizers= out.",
        )
    for name in ("deepspeed", "fsdp"):
        if look.raw.get(name) or name in look.left:
            raise BadInput(
                f"{script.path} sets {name} in its configuration, and autotune shards models"
                " through accelerate.",
                way_out=f"Remove {name} and use --hold sharding=zero3 (or zero1, zero2, fsdp2).",
            )
    for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
        if look.raw.get(name) is not None or name in look.left:
            former = name.replace("activation", "gradient")
            raise BadInput(
                f"{script.path} sets {name}, which outweighs the {former} of a recommendation.",
                way_out=f"Write {former}: transformers 5 accepts it too.",
            )
    if (
        look.train_place is not None
        and (times := most_calls(look.train_place.file, look.train_place.line, "train")) > 1
    ):
        raise BadInput(
            f"{script.path} trains more than once ({look.train_place} is one of {times} calls, or"
            " in a loop), and a recommendation is for one training.",
            way_out="Let an argument choose which of them runs, and tune each.",
        )
    if (built := most_calls(look.trainer_place.file, None, *SUPPORTED_TRAINERS)) > 1:
        raise BadInput(
            f"{script.path} builds {built} trainers one after the other ({look.trainer_place} is"
            " the first), and a recommendation is for one.",
            way_out=ONE_TRAINER,
        )


def most_calls(file: str, line: int | None, *names: str) -> int:
    """Return the maximum number of calls of these names in one run; 1 for an unreadable source.

    With a line, calls of the same method on the same object as in that line are counted. The
    branches of an `if` are alternatives, and a call in a loop counts as several.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    found = [
        call
        for call in _calls(tree)
        if getattr(call.func, "attr", getattr(call.func, "id", None)) in names
    ]
    wanted = {
        ast.unparse(call.func)
        for call in found
        if line is None or call.lineno <= line <= (call.end_lineno or call.lineno)
    }
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(1, *(_most(scope.body, wanted) for scope in (tree, *functions)))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _most(body: Sequence[ast.stmt], wanted: set[str]) -> int:
    """Return the calls on the longest path. Statements after a branch that leaves are its
    alternative.
    """
    total = 0
    for index, statement in enumerate(body):
        if isinstance(statement, ast.If) and isinstance(
            statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break
        ):
            rest = [*statement.orelse, *body[index + 1 :]]
            return (
                total
                + _in_expressions([statement.test], wanted)
                + max(_most(statement.body, wanted), _most(rest, wanted))
            )
        total += _of(statement, wanted)
    return total


def _of(statement: ast.stmt, wanted: set[str]) -> int:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    if isinstance(statement, ast.If):
        branches = max(_most(statement.body, wanted), _most(statement.orelse, wanted))
        return _in_expressions([statement.test], wanted) + branches
    if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
        return _most(statement.body, wanted) * MANY + _most(statement.orelse, wanted)
    if isinstance(statement, ast.Try):
        tried = _most(statement.body, wanted) + _most(statement.orelse, wanted)
        saved = max((_most(handler.body, wanted) for handler in statement.handlers), default=0)
        return max(tried, saved) + _most(statement.finalbody, wanted)
    if isinstance(statement, ast.With | ast.AsyncWith):
        return _in_expressions([item.context_expr for item in statement.items], wanted) + _most(
            statement.body, wanted
        )
    if isinstance(statement, ast.Match):
        return max((_most(case.body, wanted) for case in statement.cases), default=0)
    return _in_expressions([statement], wanted)


def _in_expressions(nodes: Iterable[ast.AST], wanted: set[str]) -> int:
    return sum(1 for node in nodes for call in _calls(node) if ast.unparse(call.func) in wanted)


def script_trainer(inner: Trainer, script: UserScript) -> Trainer:
    """Return `inner` for a script of the user."""
    return cast("Trainer", _ScriptTrainer(inner, script))


class _ScriptTrainer:
    """TRL trainer inside a script of the user. Members that are not defined here are those of
    `inner`.
    """

    adapter = "trl.script_probe"

    def __init__(self, inner: Trainer, script: UserScript) -> None:
        self._inner, self._script = inner, script

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        """Return the inspected lengths. The number of rows within `limit` is exact to a
        percentile.
        """
        look = self._script.look
        if look.prompts is None or look.rows is None:
            return None
        percentiles = {int(share): length for share, length in look.prompts.items()}
        within = max(
            (share for share, length in percentiles.items() if limit is None or length <= limit),
            default=0,
        )
        return PromptLengths(
            rows=look.rows, kept=look.rows * within // 100, percentiles=percentiles
        )

    def image_rows(self, task: Task) -> None:
        """Return None: the script prepares its own rows."""

    row_lengths = image_rows

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        script = self._script
        return {
            **self._inner.load_request(candidate, task),
            "script": {
                "path": str(Path(script.path)),
                "arguments": list(script.arguments),
                "method": script.look.method,
                "gives_model": script.look.model.given,
                "rewards": script.rewards,
            },
        }

    def probe_request(
        self, candidate: Candidate, task: Task, plan: ProbePlan
    ) -> Mapping[str, object]:
        return {
            **self._inner.probe_request(candidate, task, plan),
            "dataset": None,
            "reward_funcs": None,
        }

    def write_files(
        self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None
    ) -> list[Path]:
        """Write a patch of the script, or its flags, and a launch script."""
        return write_files(candidate, task, folder, self._script)
