"""Integrations with the user's own training process. Each framework is imported by the module named
after it.

trl.py               callback: watches memory during the real run, reports on out of memory
memory_margin.py     memory of this rank, its nearest limit, and the trend towards it
oom_report.py        out of memory: diagnosis and the next smaller configuration, as files
"""
