"""`--hold K=V` and `--search K=V1,V2`: what was typed, as knobs and values, or an error with the nearest that exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import yaml

from autotune.candidate import KnobValue
from autotune.errors import BadInput, UnknownName
from autotune.space import Knob, SearchSpace


def parse_holds(texts: Iterable[str], *, flag: str = "--hold") -> dict[str, KnobValue]:
    """`["num_generations=8"]` as values; the last of two for one knob would win silently, so two are refused."""
    held: dict[str, KnobValue] = {}
    for text in texts:
        name, value = _split(text, flag, "K=V")
        if name in held:
            raise BadInput(f"{flag} {name} is given twice.", way_out="Keep one of the two.")
        held[name] = parse_value(value)
    return held


def parse_searches(texts: Iterable[str], *, flag: str = "--search") -> dict[str, tuple[KnobValue, ...]]:
    """`["num_generations=4,8"]` as choices."""
    searched: dict[str, tuple[KnobValue, ...]] = {}
    for text in texts:
        name, values = _split(text, flag, "K=V1,V2")
        if name in searched:
            raise BadInput(f"{flag} {name} is given twice.", way_out=f"Give all values at once: {flag} {name}=V1,V2.")
        parts = [part for part in values.split(",") if part.strip()]
        if not parts:
            raise BadInput(f"{flag} {name} was given no value.", way_out=f"Give at least one: {flag} {name}=V1,V2.")
        searched[name] = tuple(dict.fromkeys(parse_value(part) for part in parts))
    return searched


def parse_value(text: str) -> KnobValue:
    """A value as YAML reads it, so that a flag and a file mean the same; `1e-6` is a number here as in TRL."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text.strip()
    if isinstance(value, str):
        return _number(value)
    return value if value is None or isinstance(value, bool | int | float) else text.strip()


def check_names(names: Iterable[str], space: SearchSpace, settings: Collection[str] = ()) -> None:
    """That each is a knob of the space, or one of the framework's other settings where these may be given."""
    known = [knob.name for knob in space.knobs]
    for name in names:
        if name not in space and name not in settings:
            raise UnknownName("knob", name, [*known, *settings], listing=f"autotune show knobs --space {space.name}")


def check_values(space: SearchSpace, choices: Mapping[str, Sequence[KnobValue]]) -> None:
    """That each value is of the knob's kind. Other values than the space's are welcome, other kinds are not."""
    for name, values in choices.items():
        knob = space[name]
        for value in values:
            if not _fits_kind(knob, value):
                raise BadInput(f"{name} can't be {value!r}.", way_out=f"It takes {_kind(knob)}, like {_like(knob)}.")


def _split(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise BadInput(f"{flag} {text!r} is not of the form {form}.", way_out=f"Write it like {flag} num_generations=8.")
    return name.strip(), value


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _examples(knob: Knob) -> list[KnobValue]:
    return [choice for choice in knob.choices if choice is not None]


def _fits_kind(knob: Knob, value: KnobValue) -> bool:
    examples = _examples(knob)
    if not examples or value is None:
        return None in knob.choices or value is not None
    if any(isinstance(example, bool) for example in examples):
        return isinstance(value, bool)
    if all(isinstance(example, int) for example in examples):
        return isinstance(value, int) and not isinstance(value, bool)
    if all(isinstance(example, int | float) for example in examples):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str)


def _kind(knob: Knob) -> str:
    example = _examples(knob)[0]
    if isinstance(example, bool):
        return "true or false"
    if isinstance(example, int):
        return "a whole number"
    return "a number" if isinstance(example, float) else "a name"


def _like(knob: Knob) -> str:
    words = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in _examples(knob)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
