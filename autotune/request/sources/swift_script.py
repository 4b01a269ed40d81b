"""Python script that starts ms-swift itself -> the words of the same command.

    sft_main(TrainArguments(model="Qwen/Qwen2.5-7B", train_type="full"))

is `swift sft --model Qwen/Qwen2.5-7B --train_type full`. The script is parsed, and not run: a value
that only a run knows is an unset variable of the command.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAIN_FUNCTIONS = {"sft_main": "sft", "pt_main": "pt", "rlhf_main": "rlhf"}
SWIFT_PACKAGE = "swift"
KINDS_OF_MODELS = "ModelType"  # of ms-swift 2: `ModelType.qwen2_7b_instruct`


@dataclass(frozen=True)
class _Assigned:
    """Last values of a script's names, and its variables of the environment."""

    values: Mapping[str, ast.expr]
    variables: Mapping[str, str]


def swift_command(text: str) -> str | None:
    """Return the command of a script that calls a main function of ms-swift; None: it calls none.

    Of several calls the first counts.
    """
    if SWIFT_PACKAGE not in text:
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    if not _imports_swift(tree):
        return None
    assigned = _assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) in MAIN_FUNCTIONS:
            command = []
            for name, value in assigned.variables.items():
                command.append(f"{name}={shlex.quote(value)}")
            command.append(SWIFT_PACKAGE)
            command.append(MAIN_FUNCTIONS[_name_of(node.func)])
            command.extend(_arguments(node, assigned))
            return " ".join(command)
    return None


def _imports_swift(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package, _, _ = (node.module or "").partition(".")
            if package == SWIFT_PACKAGE:
                return True
    return False


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _assigned(tree: ast.Module) -> _Assigned:
    values: dict[str, ast.expr] = {}
    variables: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case ast.Assign(
                targets=[
                    ast.Subscript(
                        value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name))
                    )
                ],
                value=ast.Constant(value=str(text)),
            ):
                variables[name] = text
    return _Assigned(
        values,
        variables,
    )


def _arguments(
    call: ast.Call,
    assigned: _Assigned,
) -> Iterator[str]:
    """Yield the options of a call: of its class of arguments, or of its list of words."""
    stated = call.args[:1] or [keyword.value for keyword in call.keywords]
    for argument in stated:
        if isinstance(argument, ast.Name) and argument.id in assigned.values:
            argument = assigned.values[argument.id]
        if isinstance(argument, ast.Call):
            for keyword in argument.keywords:
                yield from _option(keyword, assigned)
        elif isinstance(argument, ast.List):
            for item in argument.elts:
                yield from _texts(item, assigned)


def _option(
    keyword: ast.keyword,
    assigned: _Assigned,
) -> Iterator[str]:
    if keyword.arg is not None:
        texts = list(_texts(keyword.value, assigned))
        if texts:
            yield f"--{keyword.arg}"
            yield from texts
        return
    options = keyword.value
    if isinstance(options, ast.Name):
        options = assigned.values.get(options.id, options)
    if isinstance(options, ast.Dict):
        for key, value in zip(options.keys, options.values, strict=True):
            if isinstance(key, ast.Constant):
                yield from _option(ast.keyword(arg=str(key.value), value=value), assigned)


def _texts(
    value: ast.expr,
    assigned: _Assigned,
) -> Iterator[str]:
    """Yield a value as words of a command; of a name without a value here, a variable."""
    if isinstance(value, ast.Name) and value.id in assigned.values:
        value = assigned.values[value.id]
    if isinstance(value, ast.Attribute) and _name_of(value.value) == KINDS_OF_MODELS:
        yield value.attr.replace("_", "-")
        return
    if isinstance(value, ast.List | ast.Tuple):
        for item in value.elts:
            yield from _texts(item, assigned)
        return
    try:
        content = ast.literal_eval(value)
    except (ValueError, TypeError):
        yield f"${_name_of(value) or 'VALUE_OF_THE_SCRIPT'}"
        return
    if isinstance(content, bool):
        yield str(content).lower()
    elif isinstance(content, dict):
        yield shlex.quote(json.dumps(content))
    elif content is not None:
        yield shlex.quote(str(content))
