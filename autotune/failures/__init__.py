"""Classification of a failed run: message and exit status -> Outcome, phase, cause and numbers.

No other package reads the text of failures.

table.py              the tables under tables/: failure texts, purposes, phases
remedy_table.py       remedies by cause, phase and row
classify.py           exception, exit status or line -> Finding (findings.py)
    numbers.py        figures that a message contains
    log_lines.py      a line without its prefixes
    tracebacks.py     interleaved lines of several processes -> exceptions
environment_traps.py  known conflicts of versions and settings, from traps.yaml
"""
