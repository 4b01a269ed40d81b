"""A script that ends itself with a word of its own."""

from __future__ import annotations

import sys

from parts import loop

loop(then=lambda _: sys.exit("the budget for the judge is spent"))
