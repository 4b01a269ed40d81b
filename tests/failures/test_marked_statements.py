"""Source lines of several statements, of which Python marks the one that was running."""

from __future__ import annotations

import pytest

from autotune.diagnosis import diagnose_lines

LINE = "    loss = model(batch).sum(); loss.backward(); optimizer.step()"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
INNER = {
    "model(batch)": "torch/nn/modules/linear.py",
    "loss.backward()": "torch/autograd/graph.py",
    "optimizer.step()": "torch/optim/adamw.py",
}
FUNCTIONS = {"model(batch)": "forward", "loss.backward()": "run_backward", "optimizer.step()": "st"}


def logged(running: str) -> list[str]:
    """Return the log of an error in one of the line's statements, as Python 3.11 prints it."""
    marks = " " * LINE.index(running) + "^" * len(running)
    return [
        "Traceback (most recent call last):",
        '  File "/home/user/train.py", line 9, in <module>',
        LINE,
        marks,
        f'  File "/venv/lib/{INNER[running]}", line 125, in {FUNCTIONS[running]}',
        OUT_OF_MEMORY,
    ]


@pytest.mark.parametrize(
    "running, phase",
    [
        ("model(batch)", "forward"),
        ("loss.backward()", "backward"),
        ("optimizer.step()", "optimizer"),
    ],
)
def test_the_marked_statement_names_the_phase(running: str, phase: str) -> None:
    diagnosis = diagnose_lines(logged(running))
    assert diagnosis.is_memory
    assert diagnosis.phase == phase
