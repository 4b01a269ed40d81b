"""python -m tests.fuzz [--seed N] [--share X]: all parsers, with a count at the end. Exit code 1
where one crashed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.drive import crashes
from tests.fuzz.parsers import PARSERS

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument(
    "--share",
    type=float,
    default=1.0,
    help="of each parser's usual number of inputs",
)
options = arguments.parse_args()

total, failed = 0, 0
for name, parser in PARSERS.items():
    with tempfile.TemporaryDirectory() as folder:
        failures = crashes(name, Path(folder), seed=options.seed, share=options.share)
    count = max(1, int(parser.inputs * options.share))
    total, failed = total + count, failed + len(failures)
    print(
        f"{name:16} {count:7} inputs, {len(failures)} crashes",
        *failures[:5],
        sep="\n  " if failures else " ",
        flush=True,
    )
print(f"{total} inputs, {failed} crashes")
sys.exit(bool(failed))
