"""Runs the user's own script up to where its trainer would begin to train, and keeps what that trainer was to be built from.

Nothing of the script is changed. While it runs, TRL's trainer classes hand back a stand-in: their real construction is put off
until a candidate's settings are known. What the script asks of the stand-in besides callbacks ends the script, because it could
only be answered by a trainer; so nothing is trained, saved or pushed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METHODS: Mapping[str, str] = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO"}
"""Methods by the beginning of their classes' names."""

HARMLESS = frozenset({"add_callback", "remove_callback", "pop_callback"})
"""What may be asked of a trainer that is not built yet."""


class Stop(BaseException):
    """Ends the script. No Exception, so that no `except Exception` of the script's holds it up."""


class ScriptFailed(Exception):
    """The script did not come as far as a trainer; `kind` says why, for the words that a person reads."""

    def __init__(self, kind: str, text: str, **facts: Any) -> None:
        super().__init__(text)
        self.kind, self.facts = kind, facts


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a source file something was called."""

    file: str
    line: int
    span: tuple[int, int, int, int] | None = None
    """First line, last line, first column, column after the last; None below Python 3.11."""

    maker: str | None = None
    """The class or module that made the call, where it was not the user's own file."""


@dataclasses.dataclass(kw_only=True)
class Configured:
    """A configuration object as it was given, before the framework completed it."""

    config: Any
    raw: dict[str, Any]
    """Every field as it was when construction began: given, or the default."""

    place: Place | None
    completed: dict[str, Any] = dataclasses.field(default_factory=dict)
    expanded: tuple[str, ...] = ()
    """Names that came out of a `**mapping` of the call."""

    def settings(self) -> dict[str, Any]:
        """What differs from the class's defaults, as given or as changed since."""
        known = [field.name for field in dataclasses.fields(self.config) if field.init]
        return {name: value for name in known if _differs(value := self.now(name), default_of(self.config, name))}

    def now(self, name: str) -> Any:
        return getattr(self.config, name) if name in self.changed else self.raw.get(name)

    @property
    def changed(self) -> frozenset[str]:
        """Fields that were assigned after the construction."""
        return frozenset(name for name, value in self.completed.items() if _differs(getattr(self.config, name, None), value))


@dataclasses.dataclass(kw_only=True)
class Caught:
    """A trainer that was not built: everything it takes to build it as often as is wanted."""

    method: str
    trainer_class: Any
    outer: tuple[tuple[Any, ...], dict[str, Any]]
    """How the script called its own class."""

    given: dict[str, Any]
    """What reached TRL's constructor, by parameter."""

    place: Place
    configured: Configured | None
    callbacks: list[Any] = dataclasses.field(default_factory=list)
    """Added afterwards."""

    ended_by: str | None = None
    """What the script asked of its trainer before training; None where it was `train`."""

    train_place: Place | None = None
    namespace: Any = None
    """The script's own module: its functions look their globals up there."""


class Catcher:
    """The patches, while they are on."""

    def __init__(self) -> None:
        self.caught: list[Caught] = []
        self.stopped = False
        self._configured: dict[int, Configured] = {}

    def called(self, trainer_class: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of a construction."""
        given = self._reaching(trainer_class, method, args, kwargs)
        config = given.get("args")
        one = Caught(
            method=method, trainer_class=trainer_class, outer=(args, kwargs), given=given, place=_place(2),
            configured=self._configured.get(id(config)) if config is not None else None,
        )  # fmt: skip
        self.caught.append(one)
        return _StandIn(self, one)

    def _reaching(self, trainer_class: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of TRL's own constructor, through those of any class of the user's above it."""
        base = _classes()[method][0]
        reached: list[dict[str, Any]] = []
        real = base.__init__

        def record(self: Any, *inner: Any, **named: Any) -> None:
            bound = inspect.signature(real).bind(self, *inner, **named)
            reached.append({name: value for name, value in bound.arguments.items() if name != "self"})
            raise Stop

        base.__init__ = record
        try:
            trainer_class.__init__(object.__new__(trainer_class), *args, **kwargs)
        except Stop:
            pass
        finally:
            base.__init__ = real
        if not reached:
            raise ScriptFailed("odd_trainer", f"{trainer_class.__name__} never calls {base.__name__}.__init__")
        return reached[0]

    def begun(self, config: Any) -> None:
        """A configuration's construction begins; of nested calls the outermost counts."""
        if id(config) in self._configured and self._configured[id(config)].config is config:
            return
        raw = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
        place, expanded = _config_place()
        self._configured[id(config)] = Configured(config=config, raw=raw, place=place, expanded=expanded)

    def completed(self, config: Any) -> None:
        done = self._configured[id(config)]
        done.completed = {name: getattr(config, name, None) for name in done.raw}

    def stop(self) -> None:
        self.stopped = True
        raise Stop


class _StandIn:
    """What the script holds instead of its trainer."""

    def __init__(self, catcher: Catcher, caught: Caught) -> None:
        self.__dict__.update(_catcher=catcher, _caught=caught)

    def add_callback(self, callback: Any) -> None:
        self._caught.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        """Callbacks are left out of probes in any case."""

    pop_callback = remove_callback

    def train(self, *_: Any, **__: Any) -> None:
        self._caught.train_place = _place(1)
        self._catcher.stop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._caught.ended_by = name
        return self._catcher.stop()

    def __setattr__(self, name: str, value: Any) -> None:
        self._caught.ended_by = name
        self._catcher.stop()


def _classes() -> dict[str, tuple[Any, Any]]:
    """By method: the trainer and its configuration, of those that this TRL has."""
    found = {}
    for method, stem in METHODS.items():
        trainer, config = (importlib.import_module(f"trl.trainer.{method}_{kind}") for kind in ("trainer", "config"))
        found[method] = (getattr(trainer, f"{stem}Trainer"), getattr(config, f"{stem}Config"))
    return found


def classes_of(method: str) -> tuple[Any, Any]:
    return _classes()[method]


@contextmanager
def patched(catcher: Catcher) -> Iterator[None]:
    """TRL's trainers hand back stand-ins, and its configurations tell how they were made."""
    from transformers import TrainingArguments

    classes = _classes()
    with contextlib.ExitStack() as stack:
        for method, (trainer, _) in classes.items():
            stack.enter_context(_caught_construction(trainer, method, catcher))
        for config in (TrainingArguments, *(config for _, config in classes.values())):
            if "__post_init__" in vars(config):
                stack.enter_context(_told_completion(config, catcher))
        yield


@contextmanager
def _caught_construction(trainer: Any, method: str, catcher: Catcher) -> Iterator[None]:
    def caught(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return catcher.called(cls, method, args, kwargs)

    trainer.__new__ = caught
    try:
        yield
    finally:
        # Taken away, CPython would go on without the one of `object`: a class that has had one must keep one.
        trainer.__new__ = lambda cls, *_, **__: object.__new__(cls)


@contextmanager
def _told_completion(config: Any, catcher: Catcher) -> Iterator[None]:
    real = config.__post_init__

    def told(self: Any, *args: Any, **kwargs: Any) -> None:
        catcher.begun(self)
        real(self, *args, **kwargs)
        catcher.completed(self)

    config.__post_init__ = told
    try:
        yield
    finally:
        config.__post_init__ = real


def catch(script: str, arguments: Sequence[str], method: str | None = None) -> Caught:
    """The trainer that the script would train, of this method where one is named."""
    catcher = Catcher()
    with patched(catcher):
        namespace = _run(script, arguments, catcher)
    built = [one for one in catcher.caught if method is None or one.method == method]
    if len(catcher.caught) > 1:
        told = [f"{one.trainer_class.__name__} at {_words(one.place)}" for one in catcher.caught]
        raise ScriptFailed("two_trainers", " and ".join(told))
    if not built:
        others = ", ".join(one.trainer_class.__name__ for one in catcher.caught)
        raise ScriptFailed("no_trainer", others)
    built[0].namespace = namespace
    return built[0]


def _run(script: str, arguments: Sequence[str], catcher: Catcher) -> types.ModuleType:
    """As `python script arguments` would: as `__main__`, with its own folder first on the path."""
    path = Path(script).absolute()
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    except Stop:
        pass
    except SystemExit as ended:
        if not catcher.caught:
            raise ScriptFailed("ended", str(ended.code)) from None
    except ScriptFailed:
        raise
    except Exception as error:
        raise ScriptFailed("crashed", f"{type(error).__name__}: {error}", line=_line_in(error, str(path))) from error
    return main


def _line_in(error: BaseException, file: str) -> int | None:
    """The script's own line that was being run."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno or 0)
    return lines[-1] if lines else None


def _words(place: Place) -> str:
    return f"line {place.line} of {Path(place.file).name}"


def _place(depth: int) -> Place:
    """Of the nearest caller that is no part of this file."""
    frame: Any = sys._getframe(depth)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return _place_of(frame)


def _place_of(frame: Any) -> Place:
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return Place(code.co_filename, frame.f_lineno)
    first, last, begin, end = list(code.co_positions())[frame.f_lasti // 2]
    span = None if None in (first, last, begin, end) else (first, last, begin, end)
    return Place(code.co_filename, frame.f_lineno, span)


def _config_place() -> tuple[Place | None, tuple[str, ...]]:
    """Who made the configuration: the user's own call, or a parser between it and the user."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename in (__file__, "<string>") or frame.f_code.co_name in ("__post_init__", "__init__")
    ):
        frame = frame.f_back
    maker = None
    while frame is not None and _is_a_library(frame.f_code.co_filename):
        owner = frame.f_locals.get("self")
        whose = type(owner).__name__ if owner is not None else str(frame.f_globals.get("__name__"))
        maker = f"{whose}.{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        return None, ()
    place = dataclasses.replace(_place_of(frame), maker=maker)
    return place, () if maker else _expanded(frame, place)


def _is_a_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith((sys.base_prefix + "/lib/python", "<frozen"))


def _expanded(frame: Any, place: Place) -> tuple[str, ...]:
    """What `**name` of the call holds; of other expressions nothing is known, and `*` stands for them."""
    import ast

    try:
        tree = ast.parse(Path(place.file).read_bytes())
    except (OSError, SyntaxError):
        return ("*",)
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= place.line <= (node.end_lineno or node.lineno):
            for keyword in node.keywords:
                if keyword.arg is None:
                    names += _keys(keyword.value, frame)
    return tuple(names)


def _keys(value: Any, frame: Any) -> list[str]:
    import ast

    if not isinstance(value, ast.Name):
        return ["*"]
    held = frame.f_locals.get(value.id, frame.f_globals.get(value.id))
    return [str(key) for key in held] if isinstance(held, Mapping) else ["*"]


def default_of(config: Any, name: str) -> Any:
    """The default of the class; of what has none, None."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _differs(one: Any, other: Any) -> bool:
    try:
        return one is not other and bool(one != other)
    except Exception:
        return True
