"""Classification of a failed run: message and exit status -> Outcome, phase, cause and numbers.

No other package reads the text of failures.

table.py              rows of the closed table; each row has a recorded sample in the tests
    patterns.py, tables/  the tables as YAML files, and their loader
    numbers.py            figures that a message contains
    frames.py             purpose of the memory and phase, from the frames of a traceback
    classify.py           exception or exit status -> Finding
    remedies.py           remedies by cause, with the direction in which a setting must move
    environment_traps.py  known conflicts of versions and settings, from traps.yaml
    log_lines.py, tracebacks.py   interleaved lines of several processes -> exceptions
"""
