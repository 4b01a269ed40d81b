"""Assignments like `num_generations=8` of --hold, --set, --search and --unknown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from autotune.core.errors import BadInput, UnknownName
from autotune.core.space import Knob, KnobValue, SearchSpace, setting_text
from autotune.core.yaml_document import read_scalar

KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def parse_holds(texts: Iterable[str], *, flag: str = "--hold") -> dict[str, KnobValue]:
    """Parse `["num_generations=8"]`. A name given twice is an error."""
    values: dict[str, KnobValue] = {}
    for text in texts:
        name, value = _split(text, flag, "K=V")
        if name in values:
            raise BadInput(f"{flag} {name} is given twice.", way_out="Keep one of the two.")
        values[name] = parse_value(value)
    return values


def parse_searches(
    texts: Iterable[str], *, flag: str = "--search"
) -> dict[str, tuple[KnobValue, ...]]:
    """Parse `["num_generations=4,8"]`."""
    choices: dict[str, tuple[KnobValue, ...]] = {}
    for text in texts:
        name, listed = _split(text, flag, "K=V1,V2")
        if name in choices:
            raise BadInput(
                f"{flag} {name} is given twice.",
                way_out=f"Give all values at once: {flag} {name}=V1,V2.",
            )
        parts = [part for part in listed.split(",") if part.strip()]
        values = [parse_value(part) for part in parts]
        if not values:
            raise BadInput(
                f"{flag} {name} was given no value.",
                way_out=f"Give at least one: {flag} {name}=V1,V2.",
            )
        choices[name] = tuple(dict.fromkeys(values))
    return choices


def parse_value(text: str) -> KnobValue:
    """Parse a value like YAML, so that flags and files agree; `1e-6` is a number, as in TRL."""
    value = read_scalar(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value.strip()
    if value is None or isinstance(value, bool | int | float):
        return value
    return text.strip()


def _split(
    text: str,
    flag: str,
    form: str,
) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise BadInput(
            f"{flag} {text!r} is not of the form {form}.",
            way_out=f"Write it like {flag} num_generations=8.",
        )
    return name.strip(), value


def check_names(
    names: Iterable[str],
    space: SearchSpace,
    settings: Collection[str] = (),
) -> None:
    """Raise UnknownName for names outside the space and the framework's `settings`."""
    for name in names:
        if name not in space and name not in settings:
            knobs = [knob.name for knob in space.knobs]
            listing = f"autotune show knobs --space {space.name}"
            names = [*knobs, *settings]
            raise UnknownName("knob", name, names, listing=listing)


def check_values(
    space: SearchSpace,
    choices: Mapping[str, Sequence[KnobValue]],
) -> None:
    """Raise BadInput for values of another type; values outside the choices are allowed."""
    for name, values in choices.items():
        knob = space[name]
        examples = [choice for choice in knob.choices if choice is not None]
        for value in values:
            if not _has_kind_of(knob, examples, value):
                kind = KIND_NAMES.get(type(examples[0]), "a name")
                raise BadInput(
                    f"{name} can't be {value!r:.80}.",
                    way_out=f"It takes {kind}, like {_enumerated(examples)}.",
                )


def _has_kind_of(
    knob: Knob,
    examples: Sequence[KnobValue],
    value: KnobValue,
) -> bool:
    """Return True if a value has the type of the knob's choices that are not None."""
    if not examples or value is None:
        return None in knob.choices or value is not None
    if any(isinstance(example, bool) for example in examples):
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if all(isinstance(example, int) for example in examples):
        return isinstance(value, int)
    if all(isinstance(example, int | float) for example in examples):
        return isinstance(value, int | float)
    return isinstance(value, str)


def _enumerated(examples: Sequence[KnobValue]) -> str:
    """Return `16, 8 or 4`."""
    *texts, last = [setting_text(example) for example in examples]
    return f"{', '.join(texts)} or {last}" if texts else last
