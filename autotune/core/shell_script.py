"""Commands that a run of a shell script would reach, with their words. Nothing is executed.

tree-sitter parses bash; this module follows the tree as bash would: assignments, `if`, `case`,
loops, functions, `shift`, `set --`, `getopts`, here-documents into `read`. A command is `certain`
unless a condition decides about it that only a run can decide: the output of another program, or a
file that is not there.

    shell_words.py     what a word means: quotes, variables, arrays, arithmetic
    shell_tests.py     `[ ... ]`, `[[ ... ]]` and `(( ... ))`
    shell_filters.py   `$(...)` of programs that only change text: echo, dirname, tr, wc
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from autotune.core.errors import BadInput
from autotune.core.shell_filters import output_of
from autotune.core.shell_tests import arithmetic_outcome, test_outcome
from autotune.core.shell_words import (
    MAX_TEXT,
    NAME,
    UNKNOWN,
    Budget,
    Expansion,
    NotClosed,
    Value,
    Word,
    bracket_end,
    double_quote_end,
    quote_end,
)

__all__ = ["UNKNOWN", "SimpleCommand", "Word", "commands_of"]

MAX_TURNS = 1000  # of one loop; a loop that a condition ends has far fewer


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """Simple command: its words, and the variables set for it or before it."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    line: int
    end: int  # offset behind its last word
    certain: bool


Truth = bool | None
"""Result of a command; None: known only by executing the script."""


def commands_of(
    text: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    script: str = UNKNOWN,
) -> list[SimpleCommand]:
    """Return the commands that a run of the script would reach, in order."""
    if len(text) > MAX_TEXT:
        raise BadInput(
            f"The script has more than {MAX_TEXT // 2**20} MiB.", way_out="Give a launch script."
        )
    source = _ParsedScript(text)
    variables: dict[str, Value] = {"PWD": str(Path.cwd()), **(environment or {})}
    shell = _Shell(Expansion(list(arguments), variables, script), source)
    try:
        shell.run_script()
    except RecursionError:
        raise BadInput(
            "The script's commands are nested too deeply to be read.",
            way_out="Give a launch script.",
        ) from None
    return shell.commands


# The text and its tree.


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


class _ParsedScript:
    """Text of a script and its tree, whose offsets are bytes; those of commands are characters."""

    def __init__(self, text: str) -> None:
        self.text = _with_unix_lines(text)
        encoded = self.text.encode("utf-8", "replace")
        self._byte_offsets: list[int] | None = None
        if not self.text.isascii():
            sizes = (len(char.encode("utf-8", "replace")) for char in self.text)
            self._byte_offsets = list(accumulate(sizes, initial=0))
        self.root = _parser().parse(encoded).root_node
        if self.root.has_error:
            _refuse_open_quotes(self.text)

    def span(self, node: Node) -> tuple[int, int]:
        return self._offset(node.start_byte), self._offset(node.end_byte)

    def raw(self, node: Node) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def _offset(self, byte: int) -> int:
        if self._byte_offsets is None:
            return byte
        return bisect_right(self._byte_offsets, byte) - 1


def _with_unix_lines(text: str) -> str:
    """Return the text with line ends of one character, at the same offsets."""
    return text.replace("\\\r\n", " \\\n").replace("\r\n", " \n")


def _refuse_open_quotes(text: str) -> None:
    """Raise BadInput for a quote or bracket that is never closed. Other errors of syntax stay: what
    the parser can't read is passed over.
    """
    place = 0
    while place < len(text):
        char = text[place]
        at_word = place == 0 or text[place - 1] in " \t\n;|&("
        try:
            if char == "\\":
                place += 2
            elif char == "#" and at_word:
                place = text.find("\n", place) if "\n" in text[place:] else len(text)
            elif char in "'`":
                place = quote_end(text, char, place + 1)
            elif char == '"':
                place = double_quote_end(text, place + 1)
            elif text.startswith(("$(", "${"), place):
                place = bracket_end(text, place + 1)
            else:
                place += 1
        except NotClosed as error:
            line = text.count("\n", 0, place) + 1
            mark = error.mark
            noun = "the quote" if mark in "'\"`" else "the bracket"
            raise BadInput(
                f"line {line}: {noun} {mark} is not closed.", way_out="Close it."
            ) from None


# The run.


class _Break(Exception):
    """`break`, or `continue` with `goes_on`."""

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on = goes_on


class _Return(Exception):
    """`return` of a function."""


class _Exit(Exception):
    """`exit` of the script."""


@dataclass
class _Shell:
    """State of a run: variables, functions, and the commands reached so far."""

    expansion: Expansion
    source: _ParsedScript
    commands: list[SimpleCommand] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)
    _locals: list[dict[str, Value | None]] = field(default_factory=list)
    _position: int = 1  # of getopts, `$OPTIND`
    _offset: int = 1  # of getopts inside a cluster of options
    _in_condition: bool = False

    def __post_init__(self) -> None:
        self.expansion.output_of = lambda command: output_of(command, self.expansion)

    @property
    def variables(self) -> dict[str, Value]:
        return self.expansion.variables

    def run_script(self) -> None:
        with contextlib.suppress(_Exit, _Return, _Break):
            self.run_all(self.source.root.named_children, certain=True)
        # Functions that nothing called: what they hold may run in another way.
        for name, body in self.functions.items():
            if name not in self._called:
                with contextlib.suppress(_Exit, _Return, _Break):
                    self.run(body, certain=False)

    def run_all(self, nodes: Sequence[Node], *, certain: bool) -> Truth:
        status: Truth = True
        for node in nodes:
            status = self.run(node, certain=certain)
        return status

    def run(
        self,
        node: Node,
        *,
        certain: bool,
        redirects: Sequence[Node] = (),
    ) -> Truth:
        """Follow one statement; return its result."""
        self.budget.spend(steps=1)
        match node.type:
            case "comment" | "heredoc_redirect" | "file_redirect":
                return True
            case "command":
                return self._command(node, certain, redirects)
            case "variable_assignment" | "variable_assignments":
                return self._assignments(node, certain)
            case "declaration_command":
                return self._declaration(node, certain)
            case "unset_command":
                for name in node.named_children:
                    self.variables.pop(self.source.raw(name), None)
                return True
            case "list":
                return self._list(node, certain)
            case "negated_command":
                return _negated(self.run(node.named_children[-1], certain=certain))
            case "redirected_statement":
                body = node.child_by_field_name("body")
                redirects = node.children_by_field_name("redirect")
                return body is None or self.run(body, certain=certain, redirects=redirects)
            case "if_statement":
                return self._if(node, certain)
            case "while_statement":
                return self._while(node, certain)
            case "for_statement":
                return self._for(node, certain)
            case "case_statement":
                return self._case(node, certain)
            case "function_definition":
                return self._define(node)
            case "test_command":
                return self._test(node)
            case "compound_statement" if node.children and node.children[0].type == "((":
                return arithmetic_outcome(self.source.raw(node)[2:-2], self.expansion)
            case "c_style_for_statement" | "ERROR":
                return self._uncertain(node.named_children)
            case _:  # program, groups, subshells, pipelines
                return self.run_all(node.named_children, certain=certain)

    @property
    def budget(self) -> Budget:
        return self.expansion.budget

    # Conditions.

    def _list(self, node: Node, certain: bool) -> Truth:
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        status = self.run(left, certain=certain)
        if status is None:
            self.run(right, certain=False)
            return None
        if status is is_and:
            return self.run(right, certain=certain)
        return status

    def _condition(self, nodes: Sequence[Node], certain: bool) -> Truth:
        """Return the result of the commands before `then` or `do`: of a program it is unknown."""
        before = self._in_condition
        self._in_condition = True
        try:
            return self.run_all(nodes, certain=certain)
        finally:
            self._in_condition = before

    def _if(self, node: Node, certain: bool) -> Truth:
        taken: Truth = False  # an earlier branch was
        for condition, body in _branches(node):
            if taken is True:
                break
            holds: Truth = True
            if condition:
                holds = self._condition(condition, certain and taken is False)
            if holds is False:
                continue
            is_certain = holds is True and taken is False
            status = self._branch(body, certain, is_certain)
            if is_certain:
                return status
            taken = None if holds is None else taken
        return True if taken is False else None

    def _branch(
        self,
        body: Sequence[Node],
        certain: bool,
        is_certain: bool,
    ) -> Truth:
        if is_certain:
            return self.run_all(body, certain=certain)
        return self._uncertain(body)

    def _uncertain(self, nodes: Sequence[Node]) -> Truth:
        """Follow what a run may reach or not; what would end the script there does not."""
        with contextlib.suppress(_Exit, _Return, _Break):
            self.run_all(nodes, certain=False)
        return None

    def _test(self, node: Node) -> Truth:
        tokens = [_TestToken(self.source.raw(leaf)) for leaf in _test_leaves(node)]
        return test_outcome([(self._test_text(token.raw), token.is_quoted) for token in tokens])

    def _test_text(self, raw: str) -> str:
        try:
            return self.expansion.joined(raw)
        except NotClosed:
            return UNKNOWN

    # Loops and cases.

    def _while(self, node: Node, certain: bool) -> Truth:
        is_until = node.children[0].type == "until"
        body = node.child_by_field_name("body")
        condition = [child for child in node.named_children if child.type != "do_group"]
        if body is None:
            return True
        for _ in range(MAX_TURNS):
            status = self._condition(condition, certain)
            if status is None:
                return self._uncertain([body])
            if status is is_until:
                return True
            if self._turn([body], certain):
                return True
            if _is_endless(self.source, condition):
                return True  # started again and again: one turn says what it does
        raise BadInput(
            f"line {node.start_point.row + 1}: the loop has no end that can be read.",
            way_out="Write the training command into a script without the loop.",
        )

    def _for(self, node: Node, certain: bool) -> Truth:
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if variable is None or body is None:
            return True
        name = self.source.raw(variable)
        values: list[Word] = []
        for value in node.children_by_field_name("value"):
            values += self._words_of(value)
        is_known = not any(UNKNOWN in value.text for value in values)
        if not certain or not is_known:
            self.variables[name] = UNKNOWN
            return self._uncertain([body])
        first = len(self.commands)
        for word in values:
            self.variables[name] = word.text
            if self._turn([body], certain):
                break
        if len(values) > 1:
            self._doubt(first)
        return True

    def _doubt(self, first: int) -> None:
        """Mark commands that a loop reaches several times: none of them is the one command."""
        for place in range(first, len(self.commands)):
            self.commands[place] = replace(self.commands[place], certain=False)

    def _turn(self, body: Sequence[Node], certain: bool) -> bool:
        """Follow one turn of a loop; return True if it ends the loop."""
        try:
            self.run_all(body, certain=certain)
        except _Break as end:
            return not end.goes_on
        return False

    def _case(self, node: Node, certain: bool) -> Truth:
        value_node = node.child_by_field_name("value")
        value = UNKNOWN if value_node is None else self._test_text(self.source.raw(value_node))
        items = [child for child in node.named_children if child.type == "case_item"]
        if UNKNOWN in value:
            for item in items:
                self._uncertain(_case_body(item))
            return None
        falls_through = False
        for item in items:
            if not falls_through and not self._matches(item, value):
                continue
            status = self.run_all(_case_body(item), certain=certain)
            ending = item.children[-1].type
            falls_through = ending == ";&"
            if ending not in (";&", ";;&"):
                return status
        return True

    def _matches(self, item: Node, value: str) -> bool:
        for pattern in item.children_by_field_name("value"):
            raw = self.source.raw(pattern)
            text = self._test_text(raw)
            is_quoted = pattern.type in ("string", "raw_string")
            if text == value if is_quoted else fnmatch.fnmatchcase(value, text):
                return True
        return False

    # Functions.

    def _define(self, node: Node) -> Truth:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[self.source.raw(name)] = body
        return True

    def _call(
        self,
        name: str,
        arguments: Sequence[Word],
        certain: bool,
    ) -> Truth:
        if self.budget.nesting <= 0:
            return None
        self._called.add(name)
        before = self.expansion.arguments
        self.expansion.arguments = [word.text for word in arguments]
        self._locals.append({})
        self.budget.nesting -= 1
        try:
            return self.run(self.functions[name], certain=certain)
        except _Return:
            return None
        finally:
            self.budget.nesting += 1
            self.expansion.arguments = before
            for local, value in self._locals.pop().items():
                if value is None:
                    self.variables.pop(local, None)
                else:
                    self.variables[local] = value

    # Assignments.

    def _assignments(self, node: Node, certain: bool) -> Truth:
        nodes = [node] if node.type == "variable_assignment" else node.named_children
        for assignment in nodes:
            self._assign(assignment, certain)
        return True

    def _assign(self, node: Node, certain: bool) -> tuple[str, Value]:
        """Return the name and the new value, which takes effect."""
        target = node.child_by_field_name("name")
        value_node = node.child_by_field_name("value")
        name = "" if target is None else self.source.raw(target)
        is_added = any(child.type == "+=" for child in node.children)
        value: Value = ""
        if value_node is not None and value_node.type == "array":
            value = self._array(value_node)
        elif value_node is not None:
            value = self._assigned(name, self.source.raw(value_node))
        if not certain:
            value = _unknown(value, node)
        name, index = _subscript(name)
        if index is not None and isinstance(value, str):
            return name, self._assign_item(name, index, value)
        if is_added:
            value = _added(self.variables.get(name, ""), value)
        self.variables[name] = value
        return name, value

    def _assigned(self, name: str, raw: str) -> str:
        try:
            return self.expansion.assigned(name, raw)
        except NotClosed:
            return UNKNOWN

    def _array(self, node: Node) -> Value:
        raws = [self.source.raw(child) for child in node.named_children if child.type != "comment"]
        if raws and all(_KEYED.match(raw) for raw in raws):
            table: dict[str, str] = {}
            for raw in raws:
                match = _KEYED.match(raw)
                if match is not None:
                    table[self._test_text(match["key"])] = self._test_text(raw[match.end() :])
            return table
        items: list[Word] = []
        for child in node.named_children:
            if child.type != "comment":
                items += self._words_of(child)
        return items

    def _assign_item(
        self,
        name: str,
        index: str,
        text: str,
    ) -> Value:
        held = self.variables.get(name, [])
        number = self.expansion.arithmetic(index)
        if isinstance(held, list) and number.isascii() and number.isdigit():
            place = int(number)
            if place <= len(held):
                items = list(held)
                items[place : place + 1] = [
                    Word(
                        text=text,
                        line=1,
                        span=None,
                    )
                ]
                self.variables[name] = items
                return items
        table = dict(held) if isinstance(held, dict) else {}
        table[self.expansion.joined(index)] = text
        self.variables[name] = table
        return table

    def _declaration(self, node: Node, certain: bool) -> Truth:
        keyword = node.children[0].type
        flags = [self.source.raw(child) for child in node.named_children]
        exports = keyword == "export" or (keyword != "local" and "-x" in flags)
        for child in node.named_children:
            if child.type == "variable_assignment":
                target = child.child_by_field_name("name")
                name = "" if target is None else self.source.raw(target)
                self._remember_local(keyword, name)
                name, value = self._assign(child, certain)
                if exports:
                    self.exported[name] = _as_text(value)
            elif child.type == "variable_name":
                name = self.source.raw(child)
                self._remember_local(keyword, name)
                if exports and name in self.variables:
                    self.exported[name] = _as_text(self.variables[name])
                elif "-A" in flags:
                    self.variables.setdefault(name, {})
        return True

    def _remember_local(self, keyword: str, name: str) -> None:
        if self._locals and keyword in ("local", "declare", "typeset"):
            self._locals[-1].setdefault(name, self.variables.get(name))

    # Simple commands.

    def _command(
        self,
        node: Node,
        certain: bool,
        redirects: Sequence[Node],
    ) -> Truth:
        # 1. Its words, and the variables set for it alone.
        own: dict[str, str] = {}
        command_words: list[Word] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                before = dict(self.variables)
                name, value = self._assign(child, certain)
                own[name] = _as_text(value)
                self.expansion.variables = before
            elif not child.type.endswith("_redirect"):
                expanded = self._words_of(child)
                if command_words and not expanded:
                    missing = (*command_words[-1].missing, *self.expansion.unset)
                    command_words[-1] = replace(command_words[-1], missing=missing)
                command_words += expanded
        if not command_words:
            self.variables.update(own)
            return True

        # 2. What bash itself does.
        name = command_words[0].text
        if name in self.functions:
            return self._call(name, command_words[1:], certain)
        built_in = _BUILT_IN.get(name)
        if built_in is not None:
            inputs = [*redirects, *node.named_children]
            return built_in(self, command_words, certain, inputs)

        # 3. A program.
        last = [child for child in node.named_children if not child.type.endswith("_redirect")][-1]
        self.commands.append(
            SimpleCommand(
                words=tuple(command_words),
                environment={**self.exported, **own},
                line=node.start_point.row + 1,
                end=self.source.span(last)[1],
                certain=certain,
            )
        )
        return None if self._in_condition else True

    def _words_of(self, node: Node) -> list[Word]:
        try:
            return self.expansion.words(
                self.source.raw(node), node.start_point.row + 1, self.source.span(node)
            )
        except NotClosed:
            return [
                Word(
                    text=UNKNOWN,
                    line=node.start_point.row + 1,
                    span=self.source.span(node),
                )
            ]

    def shift(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        count = command_words[1].text if len(command_words) > 1 else "1"
        if not certain or not (count.isascii() and count.isdigit()):
            self.expansion.arguments = [UNKNOWN for _ in self.expansion.arguments]
            return None
        if int(count) > len(self.expansion.arguments):
            return False
        self.expansion.arguments = self.expansion.arguments[int(count) :]
        return True

    def set_arguments(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        texts = [word.text for word in command_words[1:]]
        if "--" in texts:
            self.expansion.arguments = texts[texts.index("--") + 1 :]
        return True

    def change_folder(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        folders = [word.text for word in command_words[1:] if not word.text.startswith("-")]
        target = folders[0] if folders else self.expansion.text("HOME")
        folder = os.path.normpath(os.path.join(self.expansion.text("PWD"), target))  # noqa: PTH118
        is_known = certain and UNKNOWN not in folder
        self.variables["PWD"] = folder if is_known else UNKNOWN
        return True

    def read(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`read -r -d '' NAME <<EOF` and `read A B <<< TEXT`."""
        names = [word.text for word in command_words[1:] if NAME.fullmatch(word.text)]
        text = self._input(inputs) if certain else None
        if text is None:
            for name in names:
                self.variables[name] = UNKNOWN
            return None
        parts = [text] if len(names) == 1 else text.split(None, max(0, len(names) - 1))
        for index, name in enumerate(names):
            self.variables[name] = parts[index].strip() if index < len(parts) else ""
        return True

    def _input(self, inputs: Sequence[Node]) -> str | None:
        """Return the here-document or here-string of a command."""
        for node in inputs:
            if node.type == "herestring_redirect" and node.named_children:
                return self._test_text(self.source.raw(node.named_children[-1]))
            if node.type != "heredoc_redirect":
                continue
            parts = {child.type: child for child in node.named_children}
            if "heredoc_start" not in parts or "heredoc_body" not in parts:
                return ""
            body = self.source.raw(parts["heredoc_body"])
            if re.search(r"['\"\\]", self.source.raw(parts["heredoc_start"])):
                return body
            quoted = body.replace("\\\n", " ").replace('"', '\\"')
            return self._test_text(f'"{quoted}"')
        return None

    def get_option(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`getopts OPTIONS NAME`: the next option among the arguments."""
        if not certain or len(command_words) < 3:
            return None
        options, name = command_words[1].text, command_words[2].text
        arguments = self.expansion.arguments
        index = self._position - 1
        argument = arguments[index] if index < len(arguments) else ""
        if len(argument) < 2 or not argument.startswith("-") or argument == "--":
            self.variables[name] = "?"
            return False
        letter = argument[self._offset]
        remainder = argument[self._offset + 1 :]
        self._offset += 1
        if f"{letter}:" in options:
            self.variables["OPTARG"] = remainder
            if not remainder:
                self._position += 1
                following = arguments[index + 1 : index + 2]
                self.variables["OPTARG"] = following[0] if following else ""
            remainder = ""
        if not remainder:
            self._position += 1
            self._offset = 1
        self.variables["OPTIND"] = str(self._position)
        self.variables[name] = letter if letter in options.replace(":", "") else "?"
        return True

    def evaluate(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`eval TEXT`: the commands of the text, at the place of this command."""
        text = " ".join(word.text for word in command_words[1:])
        if self.budget.nesting <= 0 or UNKNOWN in text:
            return None
        nested = _Shell(self.expansion, _ParsedScript(text), exported=self.exported)
        nested.functions = self.functions
        nested._called = self._called
        self.budget.nesting -= 1
        try:
            status = nested.run_all(nested.source.root.named_children, certain=certain)
        finally:
            self.budget.nesting += 1
        line, end = command_words[0].line, 0
        for word in command_words:
            end = max(end, 0 if word.span is None else word.span[1])
        for command in nested.commands:
            moved = tuple(
                Word(
                    text=word.text,
                    line=line,
                    span=None,
                    unset=word.unset,
                    missing=word.missing,
                )
                for word in command.words
            )
            self.commands.append(
                SimpleCommand(
                    words=moved,
                    environment=command.environment,
                    line=line,
                    end=end,
                    certain=command.certain,
                )
            )
        return status

    def prefixed(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`exec`, `command` and `builtin`: the command behind it."""
        remainder = tuple(command_words[1:])
        if not remainder or remainder[0].text.startswith("-"):
            return None
        end = max(0 if word.span is None else word.span[1] for word in command_words)
        self.commands.append(
            SimpleCommand(
                words=remainder,
                environment=dict(self.exported),
                line=command_words[0].line,
                end=end,
                certain=certain,
            )
        )
        if command_words[0].text == "exec" and certain:
            raise _Exit
        return True

    def leave(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`exit`, `return`, `break` and `continue`."""
        if not certain:
            return None
        match command_words[0].text:
            case "exit":
                raise _Exit
            case "return":
                raise _Return
            case name:
                raise _Break(goes_on=name == "continue")

    def tested(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        return test_outcome([(word.text, True) for word in command_words[1:]])

    def unknown_array(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        """`mapfile` and `readarray`: lines that only a run knows."""
        if NAME.fullmatch(command_words[-1].text):
            self.variables[command_words[-1].text] = [
                Word(
                    text=UNKNOWN,
                    line=command_words[0].line,
                    span=None,
                )
            ]
        return None

    def true(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        return True

    def false(
        self,
        command_words: Sequence[Word],
        certain: bool,
        inputs: Sequence[Node],
    ) -> Truth:
        return False


_BuiltIn = Callable[[_Shell, Sequence[Word], bool, Sequence[Node]], Truth]

_BUILT_IN: Mapping[str, _BuiltIn] = {
    "shift": _Shell.shift,
    "set": _Shell.set_arguments,
    "cd": _Shell.change_folder,
    "pushd": _Shell.change_folder,
    "read": _Shell.read,
    "getopts": _Shell.get_option,
    "eval": _Shell.evaluate,
    "exec": _Shell.prefixed,
    "command": _Shell.prefixed,
    "builtin": _Shell.prefixed,
    "exit": _Shell.leave,
    "return": _Shell.leave,
    "break": _Shell.leave,
    "continue": _Shell.leave,
    "test": _Shell.tested,
    "mapfile": _Shell.unknown_array,
    "readarray": _Shell.unknown_array,
    ":": _Shell.true,
    "true": _Shell.true,
    "false": _Shell.false,
}


# Shapes of the tree.


def _branches(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield the condition and the body of each branch of `if`; that of `else` has none."""
    condition: list[Node] = []
    body: list[Node] = []
    in_body = False
    clauses = []
    for child in node.children:
        if child.type == "then":
            in_body = True
        elif child.type in ("elif_clause", "else_clause"):
            clauses.append(child)
        elif child.is_named:
            (body if in_body else condition).append(child)
    yield condition, body
    for clause in clauses:
        if clause.type == "else_clause":
            yield [], clause.named_children
        else:
            yield from _branches(clause)


def _case_body(item: Node) -> list[Node]:
    patterns = item.children_by_field_name("value")
    return [child for child in item.named_children if child not in patterns]


@dataclass(frozen=True)
class _TestToken:
    raw: str

    @property
    def is_quoted(self) -> bool:
        return self.raw[:1] in "'\""


_TEST_SHAPES = (
    "binary_expression",
    "unary_expression",
    "parenthesized_expression",
    "negated_command",
    "test_command",
)
_TEST_BRACKETS = ("[", "]", "[[", "]]")


def _test_leaves(node: Node) -> Iterator[Node]:
    """Yield operators and operands of a test, in the order of the text."""
    for child in node.children:
        if child.type in _TEST_SHAPES:
            yield from _test_leaves(child)
        elif child.type not in _TEST_BRACKETS:
            yield child


def _is_endless(source: _ParsedScript, condition: Sequence[Node]) -> bool:
    texts = [source.raw(node).strip() for node in condition]
    return texts in (["true"], [":"], ["[ 1 ]"], ["(( 1 ))"], ["((1))"])


# Values.

_KEYED = re.compile(r"\[(?P<key>[^\]]*)\]=")
_SUBSCRIPT = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<index>.*)\]", re.DOTALL)


def _subscript(target: str) -> tuple[str, str | None]:
    match = _SUBSCRIPT.fullmatch(target)
    return (target, None) if match is None else (match["name"], match["index"])


def _unknown(value: Value, node: Node) -> Value:
    """Return the value that an assignment has which a run may reach or not."""
    if isinstance(value, str):
        return UNKNOWN
    return [
        Word(
            text=UNKNOWN,
            line=node.start_point.row + 1,
            span=None,
        )
    ]


def _added(before: Value, value: Value) -> Value:
    """Return the value after `+=`."""
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **value}
    if isinstance(value, list):
        if isinstance(before, list):
            return [*before, *value]
        first = (
            [
                Word(
                    text=before,
                    line=1,
                    span=None,
                )
            ]
            if isinstance(before, str) and before
            else []
        )
        return [*first, *value]
    if isinstance(before, str) and isinstance(value, str):
        return before + value
    return UNKNOWN


def _as_text(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return " ".join(value.values())
    return " ".join(word.text for word in value)


def _negated(status: Truth) -> Truth:
    return None if status is None else not status
