"""Method of a launch: by its entry point, or by a setting that names it."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.errors import BadInput
from autotune.core.user_script import StatedSetting
from autotune.frameworks.launch_kinds import LaunchKind, kind_of
from autotune.frameworks.measured_commands import MEASURED_INSTEAD
from autotune.frameworks.unset_variables import without_value

ANY = "any"  # a module that runs several methods


def method_of_launch(
    path: str,
    kind: LaunchKind,
    method: str,
    stated: Mapping[str, StatedSetting],
) -> str:
    """Return the method of the entry point, or the one that a setting names among several."""
    if method != ANY:
        return method
    setting = stated.get(kind.chosen_by or "")
    if setting is None and kind.method_default:
        return kind.method_default
    name = ""
    if setting is not None and setting.text:
        name = setting.text
    if name in kind.not_modelled:
        raise _not_modelled(path, kind, name, setting)
    switched = _switched_method(kind, stated)
    if switched is not None:
        return switched
    if name in kind.methods:
        return kind.methods[name]
    if name and kind.method_otherwise:
        return _method_of_unknown(kind, name)
    if setting is not None and not name:
        raise without_value(path, str(kind.chosen_by), setting)
    raise _not_modelled(path, kind, name, setting)


def _switched_method(
    kind: LaunchKind,
    stated: Mapping[str, StatedSetting],
) -> str | None:
    """Return the method that a switch states, whatever the name of its own setting says."""
    switch = stated.get(kind.method_switch)
    text = "" if switch is None or switch.text is None else switch.text.lower()
    return kind.switched_methods.get(text)


def _method_of_unknown(kind: LaunchKind, name: str) -> str:
    """Return the method of a name of the project's own, by a part of it."""
    for part, method in kind.methods_by_part.items():
        if part in name:
            return method
    assert kind.method_otherwise is not None
    return kind.method_otherwise


def _not_modelled(
    path: str,
    kind: LaunchKind,
    name: str,
    setting: StatedSetting | None,
) -> BadInput:
    """Return the refusal of a method, which a setting names or no setting."""
    place = path
    if setting is not None:
        place = f"{path}, line {setting.line}"
    way_out = f"Modelled are {', '.join(kind.methods)}. "
    name_in_trl = "reward" if name == "rm" else name
    if name_in_trl in kind_of("trl").modules:
        way_out += (
            f"The same training as TRL's is predicted: --method {name_in_trl} --model MODEL. "
        )
    return BadInput(
        f"{place}: {kind.chosen_by}={name or 'not given'} of {kind.framework} is not modelled.",
        way_out=way_out + MEASURED_INSTEAD,
    )
