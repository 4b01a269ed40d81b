"""Runs the user's script up to the start of training, and captures the arguments of its trainer.

The script is unchanged. While it runs, TRL's trainer classes return a placeholder; the real
construction waits for a candidate's settings. Any use of the placeholder except callbacks ends the
script, because only a trainer could serve it. Hence nothing is trained, saved or pushed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..tracing.patching import attribute
from .methods import METHODS


class CaptureDone(BaseException):
    """Ends the script. Not an Exception, so the script does not catch it by accident."""


class ScriptFailed(Exception):
    """The script did not reach a trainer; `kind` selects the message for the user."""

    def __init__(self, kind: str, text: str, **facts: Any) -> None:
        super().__init__(text)
        self.kind, self.facts = kind, facts


@dataclasses.dataclass(frozen=True)
class CapturedCall:
    """Position of a call in a source file."""

    file: str
    line: int
    span: tuple[int, int, int, int] | None = (
        None  # first line, last line, first column, column after the last; None below 3.11
    )
    maker: str | None = None  # class or module of the call if it is not in the user's own file


@dataclasses.dataclass(kw_only=True)
class CapturedConfig:
    """Configuration object with the values before the framework completed them."""

    config: Any
    raw: dict[str, Any]  # each field at the start of the construction: given value or default
    place: CapturedCall | None
    completed: dict[str, Any] = dataclasses.field(default_factory=dict)
    expanded: tuple[str, ...] = ()  # names that came from a `**mapping` of the call

    def settings(self) -> dict[str, Any]:
        """Return the values that differ from the class's defaults, given or assigned later."""
        defaults = defaults_of(self.config)
        return {
            name: value
            for name, default in defaults.items()
            if _differs(value := self.now(name), default)
        }

    def now(self, name: str) -> Any:
        return getattr(self.config, name) if name in self.changed else self.raw.get(name)

    @property
    def changed(self) -> frozenset[str]:
        """Fields assigned after the construction."""
        return frozenset(
            name
            for name, value in self.completed.items()
            if _differs(getattr(self.config, name, None), value)
        )


@dataclasses.dataclass(kw_only=True)
class CapturedTrainer:
    """Trainer that was not built, with everything needed to build it repeatedly."""

    method: str
    trainer_class: Any
    outer: tuple[tuple[Any, ...], dict[str, Any]]  # arguments of the script's call of its own class
    given: dict[str, Any]  # arguments that reached TRL's constructor, by parameter
    place: CapturedCall
    configured: CapturedConfig | None
    callbacks: list[Any] = dataclasses.field(default_factory=list)  # added after the construction
    ended_by: str | None = None  # attribute that the script used before training; None for `train`
    train_place: CapturedCall | None = None
    namespace: Any = None  # the script's module: its functions look up their globals there


class Capture:
    """Active patches, and the trainers captured so far."""

    def __init__(self) -> None:
        self.trainers: list[CapturedTrainer] = []
        self._configs: dict[int, CapturedConfig] = {}

    def construct(self, method: str, trainer_class: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Capture a construction, and return the placeholder."""
        # 1. The arguments of TRL's constructor, as passed on by the user's subclass.
        base = METHODS[method].classes()[1]
        reached: list[dict[str, Any]] = []
        real = base.__init__

        def record(self: Any, *inner: Any, **named: Any) -> None:
            bound = inspect.signature(real).bind(self, *inner, **named)
            reached.append(
                {name: value for name, value in bound.arguments.items() if name != "self"}
            )
            raise CaptureDone

        with attribute(base, "__init__", record), contextlib.suppress(CaptureDone):
            trainer_class.__init__(object.__new__(trainer_class), *args, **kwargs)
        if not reached:
            raise ScriptFailed(
                "odd_trainer", f"{trainer_class.__name__} never calls {base.__name__}.__init__"
            )
        # 2. The trainer.
        given = reached[0]
        config = given.get("args")
        one = CapturedTrainer(
            method=method,
            trainer_class=trainer_class,
            outer=(args, kwargs),
            given=given,
            place=_caller(),
            configured=self._configs.get(id(config)) if config is not None else None,
        )
        self.trainers.append(one)
        return _Placeholder(one)

    def recording(self, complete: Callable[..., None]) -> Callable[..., None]:
        """Return a `__post_init__` that records the configuration before and after `complete`."""

        def recorded(config: Any, *args: Any, **kwargs: Any) -> None:
            known = self._configs.get(id(config))
            if known is None or known.config is not config:  # the outermost call
                raw = {
                    field.name: getattr(config, field.name, None)
                    for field in dataclasses.fields(config)
                }
                place, expanded = _config_caller()
                self._configs[id(config)] = CapturedConfig(
                    config=config, raw=raw, place=place, expanded=expanded
                )
            complete(config, *args, **kwargs)
            done = self._configs[id(config)]
            done.completed = {name: getattr(config, name, None) for name in done.raw}

        return recorded


class _Placeholder:
    """Object that the script gets instead of its trainer."""

    def __init__(self, captured: CapturedTrainer) -> None:
        self.__dict__["_captured"] = captured

    def add_callback(self, callback: Any) -> None:
        self._captured.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        """Do nothing: probes leave callbacks out."""

    pop_callback = remove_callback

    def train(self, *_: Any, **__: Any) -> None:
        self._captured.train_place = _caller()
        raise CaptureDone

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._captured.ended_by = name
        raise CaptureDone

    def __setattr__(self, name: str, value: Any) -> None:
        self._captured.ended_by = name
        raise CaptureDone


@contextmanager
def patched(capture: Capture) -> Iterator[None]:
    """Make TRL's trainers return placeholders, and record its configurations. Other trainers are
    refused.
    """
    from transformers import Trainer, TrainingArguments

    def refuse(cls: Any, *_: Any, **__: Any) -> Any:  # it would load its model, and train
        raise ScriptFailed("other_trainer", cls.__name__)

    classes = {}
    for method in (name for name, method in METHODS.items() if method.in_scripts):
        with contextlib.suppress(
            ImportError
        ):  # older releases have no KTO outside of trl.experimental
            classes[method] = METHODS[method].classes()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_constructed_by(Trainer, refuse))
        for method, (_, trainer) in classes.items():
            stack.enter_context(
                _constructed_by(trainer, functools.partial(capture.construct, method))
            )
        for config in (TrainingArguments, *(config for config, _ in classes.values())):
            if "__post_init__" in vars(config):
                stack.enter_context(
                    attribute(config, "__post_init__", capture.recording(config.__post_init__))
                )
        yield


@contextmanager
def _constructed_by(trainer: Any, construct: Callable[..., Any]) -> Iterator[None]:
    """Replace the construction of a class and its subclasses."""
    trainer.__new__ = construct
    try:
        yield
    finally:
        # A deleted __new__ does not restore that of `object` in CPython: the class needs one of its
        # own from now on.
        trainer.__new__ = lambda cls, *_, **__: object.__new__(cls)


def catch(script: str, arguments: Sequence[str], method: str | None = None) -> CapturedTrainer:
    """Return the trainer that the script would train, of this method if one is given."""
    capture = Capture()
    with patched(capture):
        namespace = _run(script, arguments, capture)
    if len(capture.trainers) > 1:
        places = [
            f"{one.trainer_class.__name__} at line {one.place.line} of {Path(one.place.file).name}"
            for one in capture.trainers
        ]
        raise ScriptFailed("two_trainers", " and ".join(places))
    built = [one for one in capture.trainers if method is None or one.method == method]
    if not built:
        raise ScriptFailed(
            "no_trainer", ", ".join(one.trainer_class.__name__ for one in capture.trainers)
        )
    built[0].namespace = namespace
    return built[0]


def _run(script: str, arguments: Sequence[str], capture: Capture) -> types.ModuleType:
    """Run like `python script arguments`: as `__main__`, with its folder first on the path."""
    path = Path(script).absolute()
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    except CaptureDone:
        pass
    except SystemExit as ended:
        if not capture.trainers:
            raise ScriptFailed("ended", str(ended.code)) from None
    except ScriptFailed:
        raise
    except Exception as error:
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == str(path)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno or 0)
        innermost = lines[-1] if lines else None
        raise ScriptFailed("crashed", f"{type(error).__name__}: {error}", line=innermost) from error
    return main


def _caller() -> CapturedCall:
    """Return the call by the nearest frame outside this file."""
    frame: Any = sys._getframe()
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return _call_of(frame)


def _call_of(frame: Any) -> CapturedCall:
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return CapturedCall(code.co_filename, frame.f_lineno)
    first, last, begin, end = list(code.co_positions())[frame.f_lasti // 2]
    span = None if None in (first, last, begin, end) else (first, last, begin, end)
    return CapturedCall(code.co_filename, frame.f_lineno, span)


def _config_caller() -> tuple[CapturedCall | None, tuple[str, ...]]:
    """Return the user's call that made the configuration, and its `**mapping` names."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename in (__file__, "<string>")
        or frame.f_code.co_name in ("__post_init__", "__init__")
    ):
        frame = frame.f_back
    maker = None
    while frame is not None and _is_library(frame.f_code.co_filename):
        owner = frame.f_locals.get("self")
        name = type(owner).__name__ if owner is not None else str(frame.f_globals.get("__name__"))
        maker = f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        return None, ()
    place = dataclasses.replace(_call_of(frame), maker=maker)
    return place, () if maker else _expanded(frame, place)


def _is_library(file: str) -> bool:
    return (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((sys.base_prefix + "/lib/python", "<frozen"))
    )


def _expanded(frame: Any, place: CapturedCall) -> tuple[str, ...]:
    """Return the keys of each `**name` in the call; `*` for expressions with unknown keys."""
    try:
        tree = ast.parse(Path(place.file).read_bytes())
    except (OSError, SyntaxError):
        return ("*",)
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= place.line <= (
            node.end_lineno or node.lineno
        ):
            for keyword in node.keywords:
                if keyword.arg is None:
                    value = keyword.value
                    held = (
                        frame.f_locals.get(value.id, frame.f_globals.get(value.id))
                        if isinstance(value, ast.Name)
                        else None
                    )
                    names += [str(key) for key in held] if isinstance(held, Mapping) else ["*"]
    return tuple(names)


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of a configuration's arguments; None for those without one."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.init and field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.init:
            found[field.name] = None if field.default is dataclasses.MISSING else field.default
    return found


def _differs(one: Any, other: Any) -> bool:
    try:
        return one is not other and bool(one != other)
    except Exception:
        return True
