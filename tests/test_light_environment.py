"""What light tests hide is not found by their processes, and what they use is."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.cli.command import environment
from tests.light_environment import light_python_path

PROGRAM = """
import importlib.util
import sys

print(*[importlib.util.find_spec(name) is not None for name in sys.argv[1:]])
"""


@pytest.mark.parametrize("name", ["vllm", "bitsandbytes", "scipy"])
def test_a_hidden_package_is_not_found_by_a_process(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, "torch"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(PYTHONPATH=light_python_path()),
    )
    assert done.stdout.split() == ["False", str(find_spec("torch") is not None)]
