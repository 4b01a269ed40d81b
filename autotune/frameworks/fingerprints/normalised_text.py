"""Text of a file without what has no effect, and a short hash of it.

Comments, docstrings, blank lines, quotes, line breaks inside of brackets and trailing commas are
left out of Python's text, as formatters change them. Positions of tokens are used, and not their
kinds, because Python 3.12 has others for f-strings.
"""

from __future__ import annotations

import hashlib
import io
import json
import tokenize
from collections.abc import Iterator

import yaml

DIGITS_OF_HASH = 6  # of 16 values each: one file has less than 200 texts
IGNORED_TOKENS = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER})
TOKENS_OF_LINES = {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
CLOSING = frozenset(")]}")
F_STRING_START = getattr(tokenize, "FSTRING_START", None)
F_STRING_END = getattr(tokenize, "FSTRING_END", None)


def fingerprint(name: str, text: str) -> str | None:
    """Return the hash of a file's text; None: it cannot be parsed."""
    try:
        if name.endswith(".py"):
            normalised = python_text(text)
        else:
            content = yaml.safe_load(text)
            normalised = json.dumps(content, sort_keys=True, default=str)
    except (SyntaxError, tokenize.TokenError, yaml.YAMLError, RecursionError):
        return None
    return hashlib.sha256(normalised.encode()).hexdigest()[:DIGITS_OF_HASH]


def python_text(text: str) -> str:
    """Return the statements of a program, one per line."""
    lines: list[str] = []
    tokens: list[str] = []
    for kind, word in _words(text):
        if kind not in TOKENS_OF_LINES:
            if word in CLOSING and tokens and tokens[-1] == ",":
                tokens.pop()
            tokens.append(word)
            continue
        if tokens and not _is_docstring(tokens):
            lines.append(" ".join(tokens))
        tokens = []
        if kind != tokenize.NEWLINE:
            lines.append(TOKENS_OF_LINES[kind])
    return "\n".join(lines)


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the tokens; an f-string is one."""
    rows = text.splitlines(keepends=True)
    depth = 0
    start = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == F_STRING_START:
            if depth == 0:
                start = token.start
            depth += 1
        elif token.type == F_STRING_END:
            depth -= 1
            if depth == 0:
                yield tokenize.STRING, _quoted(_between(rows, start, token.end))
        elif depth == 0 and token.type not in IGNORED_TOKENS:
            is_string = token.type == tokenize.STRING
            yield token.type, _quoted(token.string) if is_string else token.string


def _quoted(word: str) -> str:
    return word.replace("'", '"')


def _between(
    rows: list[str],
    start: tuple[int, int],
    end: tuple[int, int],
) -> str:
    """Return the text between two positions, whose rows count from 1."""
    first, last = start[0] - 1, end[0] - 1
    if first == last:
        return rows[first][start[1] : end[1]]
    return "".join([rows[first][start[1] :], *rows[first + 1 : last], rows[last][: end[1]]])


def _is_docstring(tokens: list[str]) -> bool:
    """Return True for a statement that is a text, or several that are one."""
    return all(word.endswith('"') for word in tokens)
