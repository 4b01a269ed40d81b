"""Way out of every training that is not read: its command is measured."""

from __future__ import annotations

MEASURING_COMMAND = (
    "autotune run --framework command --metrics FILE --search NAME=V1,V2 -- COMMAND {NAME}"
)
"""Words that a user may take as they are: the speed and the searched option have to be named."""

MEASURED_INSTEAD = f"Where its GPUs are, the command itself is measured: {MEASURING_COMMAND}."
OWN_TRAINER = "--script train.py -- ARGUMENTS"
OTHER_PROGRAMS = f"For your own trainer: {OWN_TRAINER}. {MEASURED_INSTEAD}"
