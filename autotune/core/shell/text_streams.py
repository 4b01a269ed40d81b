"""Texts that commands of a shell script hand on: by pipes, here-documents and `$(...)`, and in
files that the script writes.

    cat > config.yaml <<EOF      # the document is what `cat` receives, and then the file's text
    echo 1 2 | read A B          # what `echo` prints is what `read` receives

A part of a text that only a run has is UNKNOWN.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tree_sitter import Node

from autotune.core.shell.sourced_files import file_text
from autotune.core.shell.state import Received, ShellState, Truth, WrittenFile
from autotune.core.shell.variable_values import UNKNOWN

_STANDARD_OUTPUT = ("", "1")


@dataclass
class Redirections:
    """What the redirections of one statement do with its input and its output."""

    received: Received | None = None
    changes_input: bool = False
    files: list[tuple[str, bool]] = field(default_factory=list)  # name, and whether it is kept
    readers: list[Node] = field(default_factory=list)  # `> >(tee log)`
    leaves: bool = False  # the output goes elsewhere: `>&2`

    @property
    def changes_output(self) -> bool:
        return bool(self.files or self.readers or self.leaves)


def redirected(
    shell: ShellState,
    nodes: Sequence[Node],
    certain: bool,
    run: Callable[[], Truth],
) -> Truth:
    """Run a statement with these redirections."""
    redirections = _redirections_of(shell, nodes)
    received, printed = shell.received, shell.printed
    own_output: list[str] = []
    if redirections.changes_input:
        shell.received = redirections.received
    if redirections.changes_output:
        shell.printed = own_output
    try:
        return run()
    finally:
        shell.received, shell.printed = received, printed
        text = "".join(own_output)
        for name, is_kept in redirections.files:
            write_file(shell, name, text, is_kept=is_kept, certain=certain)
        for reader in redirections.readers:
            shell.output_of_nodes(reader.named_children, certain, Received(text))


def _redirections_of(shell: ShellState, nodes: Sequence[Node]) -> Redirections:
    redirections = Redirections()
    for node in _flat(nodes):
        match node.type:
            case "herestring_redirect" if node.named_children:
                text = shell.text_of(shell.source.raw(node.named_children[-1]))
                redirections.received = Received(f"{text}\n")
                redirections.changes_input = True
            case "heredoc_redirect":
                redirections.received = Received(here_document(shell, node))
                redirections.changes_input = True
            case "file_redirect":
                _add_file(shell, node, redirections)
    return redirections


def _flat(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield redirections; the parser puts those behind `<<EOF` into it."""
    for node in nodes:
        yield node
        if node.type == "heredoc_redirect":
            yield from (child for child in node.named_children if child.type == "file_redirect")


def _add_file(
    shell: ShellState,
    node: Node,
    redirections: Redirections,
) -> None:
    descriptor = ""
    sign = ""
    for child in node.children:
        if child.type == "file_descriptor":
            descriptor = shell.source.raw(child)
        elif not child.is_named:
            sign = sign or child.type
    target = node.child_by_field_name("destination")
    if target is None:
        return
    is_output = descriptor in _STANDARD_OUTPUT
    if sign == "<" and descriptor in ("", "0"):
        redirections.changes_input = True
        redirections.received = _received_from(shell, target)
    elif sign in (">&", "<&"):
        redirections.leaves |= sign == ">&" and is_output
    elif sign.startswith("&") or (sign.startswith(">") and is_output):
        if target.type == "process_substitution":
            redirections.readers.append(target)
        else:
            name = shell.text_of(shell.source.raw(target))
            redirections.files.append((name, sign.endswith(">>")))


def _received_from(
    shell: ShellState,
    target: Node,
) -> Received | None:
    """Return the input behind `<`: a file's text, or what `<(...)` prints."""
    if target.type == "process_substitution":
        return Received(shell.output_of_nodes(target.named_children, shell.is_certain))
    text = text_of_file(shell, shell.text_of(shell.source.raw(target)))
    if text is None:
        return None
    return Received(text)


def here_document(
    shell: ShellState,
    node: Node,
) -> str:
    """Return the text of a here-document; variables without a value are marked in it."""
    parts = {child.type: child for child in node.named_children}
    if "heredoc_start" not in parts or "heredoc_body" not in parts:
        return ""
    body = shell.source.raw(parts["heredoc_body"])
    mark = shell.source.raw(parts["heredoc_start"])
    if node.children[0].type == "<<-":
        body = re.sub(r"(?m)^\t+", "", body)
    if re.search(r"['\"\\]", mark):
        return body
    quoted = body.replace('"', '\\"')
    return shell.marked_text_of(f'"{quoted}"')


# Files.


def text_of_file(
    shell: ShellState,
    name: str,
) -> str | None:
    """Return the text of a file as the script has it at this place; None: it is not known."""
    path = _path_of(shell, name)
    if path is None:
        return None
    if path in shell.files:
        return shell.files[path].text
    if not shell.reads_files:
        return None
    return file_text(path)


def write_file(
    shell: ShellState,
    name: str,
    text: str,
    *,
    is_kept: bool = False,
    certain: bool = True,
    program: str = "",
) -> None:
    """Note the text that a file has from here on. `is_kept`: it stands behind what was there.

    `program`: the one that changes the file, if that is not read.
    """
    path = _path_of(shell, name)
    if path is None or path.startswith("/dev/"):
        return
    before = text_of_file(shell, name)
    if is_kept and before is not None:
        shell.budget.spend(text=len(before))
        text = before + text
    elif is_kept and os.path.exists(path):  # noqa: PTH110
        text = UNKNOWN
    if not certain and before is not None and before != text:
        text = UNKNOWN
    shell.files = {
        **shell.files,
        path: WrittenFile(text=text, line=shell.line_of_statement(), program=program),
    }


def _path_of(
    shell: ShellState,
    name: str,
) -> str | None:
    if not name or UNKNOWN in name or "\0" in name:
        return None
    if not name.startswith("/") and not shell.folder:
        return None
    return os.path.normpath(os.path.join(shell.folder, name))  # noqa: PTH118
