"""A script that ends itself without a word."""

from __future__ import annotations

import os

from parts import loop

loop(then=lambda _: os._exit(3))
