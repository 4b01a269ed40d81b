"""A data set read into more memory than the machine grants."""

from __future__ import annotations

import numpy
from parts import loop

loop(then=lambda _: numpy.ones((400, 1024, 1024)))
