"""ms-swift's own command line: its parser and its argument classes. Prints what it understood.

Run by a Python that has ms-swift; arguments are `sft` or `rlhf`, then those of `swift sft`.
"""

from __future__ import annotations

import json
import sys

from swift.arguments import RLHFArguments, SftArguments  # type: ignore[import-not-found]
from swift.utils import parse_args  # type: ignore[import-not-found]

kind, *command_line = sys.argv[1:]
arguments, unknown = parse_args(SftArguments if kind == "sft" else RLHFArguments, command_line)
assert not unknown, f"not understood: {unknown}"
plain = (bool, int, float, str, type(None))
print(
    "\n"
    + json.dumps(
        {name: value for name, value in vars(arguments).items() if isinstance(value, plain)}
    )
)
