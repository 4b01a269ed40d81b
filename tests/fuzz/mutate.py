"""Broken and hostile inputs, made from good ones by a seeded generator: the same seed makes the
same inputs.
"""

from __future__ import annotations

import random
from typing import Any

NASTY_TEXTS = (
    "",
    "\0",
    "\n",
    "\r\n",
    "\t",
    "\x1b[31m",
    "\ud800",
    "\u202e",
    "é",
    "\U0001d7d9\U0001d7d8",
    "\u0663",
    "-",
    "--",
    "1e309",
    "NaN",
    "-0",
    "9" * 400,
    "0x10",
    "1_000",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "&a",
    "*a",
    "<<: *a",
    "!!python/object/apply:os.system ['true']",
    "%YAML 9.9\n---\n",
    "? ",
    "| ",
    "'",
    '"',
    "\\",
    "$(true)",
    "`true`",
    "%s%n",
    "{0.__class__}",
    "../" * 30,
    "[" * 3000,
    "{a: " * 500,
    "- " * 300,
    "9" * 5000,
    "1" + ":1" * 3000,
    "2001-99-99",
    "\na: &a [1,1,1]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n",
    "\nx: &x {k: 1}\ny: {<<: [*x, *x]}\n",
    "&a [*a]",
    "<script>alert(1)</script>",
    "None",
    "null",
    "true",
    "a" * 5000,
)
NASTY_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    2**200,
    10**6,
    10**12,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "9",
    "\ud800",
    "a" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"$": {"$": {}}},
    [-1, "x"],
)


def text(dice: random.Random, seeds: list[str]) -> str:
    """A seed with a few wounds."""
    mutated = dice.choice(seeds)
    for _ in range(dice.randint(1, 4)):
        mutated = _wounded(dice, mutated, seeds)
    return mutated


def _wounded(
    dice: random.Random,
    content: str,
    seeds: list[str],
) -> str:
    start = dice.randint(0, len(content))
    end = min(len(content), start + dice.choice((0, 1, 2, 10, 100)))
    match dice.randint(0, 4):
        case 0:
            return content[:start] + content[end:]
        case 1:
            return content[:start] + dice.choice(NASTY_TEXTS) + content[end:]
        case 2:
            return content[:start] + content[start:end] * 3 + content[end:]
        case 3:
            donor = dice.choice(seeds)
            return content[:start] + donor[dice.randint(0, len(donor)) :]
        case _:
            return (
                content[:start]
                + chr(dice.choice((0, 9, 10, 13, 58, 91, 123, 127, 255, 0x3000, 0xFFFD, 0x1F600)))
                + content[start:]
            )


def value(dice: random.Random, seed: Any) -> Any:
    """A tree of JSON values in which a few have become something else."""
    if dice.random() < 0.04:
        return dice.choice(NASTY_VALUES)
    if isinstance(seed, dict):
        mutated = {name: value(dice, inner) for name, inner in seed.items() if dice.random() > 0.03}
        return (
            mutated
            if dice.random() > 0.03
            else {**mutated, dice.choice(NASTY_TEXTS): dice.choice(NASTY_VALUES)}
        )
    if isinstance(seed, list):
        return [value(dice, inner) for inner in seed if dice.random() > 0.03]
    return seed
