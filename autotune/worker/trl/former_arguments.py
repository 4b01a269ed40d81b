"""Arguments of configurations that former releases accepted: mapped in a copy of the call.

While `accepted` is active, a renamed argument arrives under its present name, a removed one is
dropped, and `given` has both with their values. Calls, flags and YAML files of TRL's parser are
covered; objects have the former names as attributes too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..tracing.patching import attribute


class FormerArguments:
    """Former names with what became of them, and the ones that a script gave."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._renamed: Mapping[str, str] = table.get("renamed", {})
        self._removed = frozenset(table.get("removed", ()))
        self._moved: Mapping[str, Any] = table.get("moved", {})
        self.given: dict[str, Any] = {}

    def is_former(self, name: str) -> bool:
        return name in self._renamed or name in self._removed

    def present(self, accepted: Collection[str], stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments under names that are accepted; unknown ones stay as they are."""
        arguments = {}
        for name, value in stated.items():
            if name in accepted or not self.is_former(name):
                arguments[name] = value
                continue
            self.given[name] = value
            present_name = self._renamed.get(name, name)
            if present_name in accepted and present_name not in stated:
                arguments[present_name] = value
        return arguments

    def present_flags(self, known: Collection[str], words: Sequence[str]) -> list[str]:
        """Return the words of a command line with former flags replaced or left out."""
        result: list[str] = []
        remaining = list(words)
        while remaining:
            word = remaining.pop(0)
            flag, equals, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("--") or flag in known or not self.is_former(name):
                result.append(word)
                continue
            values = [value] if equals else []
            while not equals and remaining and not remaining[0].startswith("--"):
                values.append(remaining.pop(0))
            self.given[name] = " ".join(values) if values else True
            present_flag = f"--{self._renamed.get(name)}"
            if present_flag in known:
                result += [present_flag, *values]
        return result

    def attribute_of(self, config: Any, name: str) -> Any:
        """Return the value of a former attribute, or of one that another class has now."""
        present_name = self._renamed.get(name)
        if present_name is not None and present_name in vars(config):
            return vars(config)[present_name]
        if self.is_former(name):
            return self.given.get(name)
        if name in self._moved:
            return self._moved[name]
        raise AttributeError(f"{type(config).__name__!r} object has no attribute {name!r}")


@contextmanager
def accepted(former: FormerArguments, bases: Sequence[Any]) -> Iterator[None]:
    """Let the configurations below these classes, and TRL's parser, accept former arguments."""
    with ExitStack() as stack:
        for base in bases:
            stack.enter_context(_accepted_by_calls(former, base))
            stack.enter_context(attribute(base, "__getattr__", _reader(former)))
        for owner, name, wrapped in _parsers(former):
            stack.enter_context(attribute(owner, name, wrapped))
        yield


def _reader(former: FormerArguments) -> Callable[[Any, str], Any]:
    def read(config: Any, name: str) -> Any:
        return former.attribute_of(config, name)

    return read


@contextmanager
def _accepted_by_calls(former: FormerArguments, base: Any) -> Iterator[None]:
    """Wrap the constructor of each class when its first object is made: dataclasses of the user
    have constructors of their own.
    """
    originals: dict[Any, Any] = {}

    def construct(config_class: Any, *_: Any, **__: Any) -> Any:
        for owner in config_class.__mro__:
            if "__init__" in vars(owner) and owner is not object:
                if owner not in originals:
                    originals[owner] = owner.__init__
                    owner.__init__ = _translating(former, owner.__init__)
                break
        return object.__new__(config_class)

    base.__new__ = construct
    try:
        yield
    finally:
        base.__new__ = lambda cls, *_, **__: object.__new__(cls)
        for owner, original in originals.items():
            owner.__init__ = original


def _translating(former: FormerArguments, construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def translating(config: Any, *args: Any, **stated: Any) -> None:
        names = getattr(config, "__dataclass_fields__", {})
        construct(config, *args, **former.present(names, stated))

    return translating


def _parsers(former: FormerArguments) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the replaced methods of the parsers of flags and of YAML files."""
    from transformers import HfArgumentParser
    from trl import TrlParser

    # Some releases of TRL have a copy of transformers' parser.
    for owner in {HfArgumentParser, *TrlParser.__mro__}:
        if "parse_args_into_dataclasses" in vars(owner):
            parse = owner.parse_args_into_dataclasses
            yield owner, "parse_args_into_dataclasses", _parsing(former, parse)
    set_defaults = TrlParser.set_defaults_with_config

    @functools.wraps(set_defaults)
    def set_present(parser: Any, **stated: Any) -> Any:
        names = {action.dest for action in parser._actions}
        return set_defaults(parser, **former.present(names, stated))

    yield TrlParser, "set_defaults_with_config", set_present


def _parsing(former: FormerArguments, parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_present(parser: Any, args: Any = None, *rest: Any, **options: Any) -> Any:
        words = sys.argv[1:] if args is None else args
        known = parser._option_string_actions
        return parse(parser, former.present_flags(known, words), *rest, **options)

    return parse_present
