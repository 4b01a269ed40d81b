"""Functions that a script gives to a launcher, which runs them on another machine or in processes
of their own: Modal, Ray, accelerate's notebook_launcher and torch's spawn.

Nothing is launched in an inspection: the function is called here, as the first of its processes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..tracing.patching import attribute
from .missing_arguments import Report
from .placeholder import Anything

STARTING_PACKAGES = frozenset({"modal", "ray"})
"""Packages whose launchers are replaced even where they are installed: Ray starts processes."""

_entry_points: list[Callable[..., Any]] = []
_functions: list[Callable[..., Any]] = []
_is_used = [False]


def remaining() -> list[Callable[..., Any]]:
    """Return the functions that a launcher would call, and that the script itself did not: its
    entry points, else each function for another machine that needs no argument.
    """
    if _is_used[0]:
        return []
    if _entry_points:
        return _entry_points
    return [function for function in _functions if _needs_nothing(function)]


def _needs_nothing(function: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        for parameter in inspect.signature(function).parameters.values():
            is_needed = parameter.default is inspect.Parameter.empty
            is_of_call = parameter.kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            if is_needed and not is_of_call:
                return False
        return True
    return False


class _Remote:
    """Function or class for another machine, which is called here."""

    def __init__(self, target: Any) -> None:
        self._target = target
        functools.update_wrapper(self, target, updated=())

    def __call__(self, *args: Any, **options: Any) -> Any:
        _is_used[0] = True
        return self._target(*args, **options)

    remote = local = spawn = remote_gen = __call__

    def options(self, *_: Any, **__: Any) -> _Remote:
        return self

    with_options = options

    def map(
        self,
        rows: Any,
        *_: Any,
        **__: Any,
    ) -> list[Any]:
        return [self(row) for row in rows]

    def bind(self, *args: Any, **options: Any) -> Any:
        return functools.partial(self, *args, **options)


class _App(Anything):
    """Modal's app: its decorators keep functions, and note the GPUs that they ask for."""

    report: Report | None = None

    def function(
        self,
        *_: Any,
        gpu: Any = None,
        **__: Any,
    ) -> Callable[[Any], _Remote]:
        def decorated(function: Any) -> _Remote:
            if gpu:
                _functions.append(function)
                if self.report is not None:
                    self.report("remote gpus", f"Modal for {gpu}")
            return _Remote(function)

        return decorated

    def local_entrypoint(self, *_: Any, **__: Any) -> Callable[[Any], Any]:
        def decorated(function: Any) -> Any:
            if _needs_nothing(function):
                _entry_points.append(function)
            return function

        return decorated


def _remote_of_ray(*args: Any, **_: Any) -> Any:
    """Return Ray's decorator, with or without options."""
    is_bare = len(args) == 1 and callable(args[0]) and not isinstance(args[0], Anything)
    if is_bare:
        return _Remote(args[0])
    return _Remote


def _same(value: Any = None, *_: Any, **__: Any) -> Any:
    return value


class _Workers:
    """Ray's trainer: its loop is called as that of the first worker."""

    report: Report | None = None

    def __init__(
        self,
        train_loop_per_worker: Any = None,
        *_: Any,
        train_loop_config: Any = None,
        scaling_config: Any = None,
        **__: Any,
    ) -> None:
        self._loop = train_loop_per_worker
        self._config = train_loop_config
        self._workers = getattr(scaling_config, "num_workers", None)

    def fit(self) -> Any:
        if self._workers is not None and self.report is not None:
            self.report("launched processes", f"{self._workers} by ScalingConfig(num_workers)")
        needs_config = not _needs_nothing(self._loop) or self._config is not None
        if needs_config:
            return self._loop(self._config or {})
        return self._loop()


class _Scaling:
    """Ray's number of workers."""

    def __init__(self, num_workers: Any = 1, *_: Any, **__: Any) -> None:
        self.num_workers = num_workers


def fill(
    module: types.ModuleType,
    report: Report,
) -> None:
    """Give a placeholder of a launcher the parts that call a script's function."""
    parts: dict[str, Any] = {}
    if module.__name__ == "modal":
        app = type("App", (_App,), {"report": staticmethod(report)})
        parts = {"App": app, "Stub": app, "is_local": lambda: True}
    elif module.__name__ == "ray":
        parts = {"remote": _remote_of_ray, "get": _same, "is_initialized": lambda: True}
    elif module.__name__.startswith("ray.train"):
        trainer = type("TorchTrainer", (_Workers,), {"report": staticmethod(report)})
        parts = {"TorchTrainer": trainer, "ScalingConfig": _Scaling}
    elif module.__name__.startswith("ray.air"):
        parts = {"ScalingConfig": _Scaling}
    vars(module).update(parts)


@contextmanager
def called_here(report: Report) -> Iterator[None]:
    """Call the functions that accelerate and torch would start in processes."""
    import accelerate
    import torch.multiprocessing

    def notebook_launcher(
        function: Any,
        args: Any = (),
        num_processes: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        if num_processes:
            report("launched processes", f"{num_processes} by notebook_launcher")
        return function(*args)

    def spawn(
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        *_: Any,
        **__: Any,
    ) -> Any:
        report("launched processes", f"{nprocs} by torch.multiprocessing.spawn")
        return fn(0, *args)

    with (
        attribute(accelerate, "notebook_launcher", notebook_launcher),
        attribute(accelerate, "debug_launcher", notebook_launcher),
        attribute(torch.multiprocessing, "spawn", spawn),
    ):
        yield
