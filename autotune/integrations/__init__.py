"""Integrations with the user's own training process. Each framework is imported by the module named after it.

trl.py               callback: watches memory during the real run, reports on out of memory
memory_gauges.py     memory of this rank and its nearest limit
memory_margin.py     extrapolation of the peak to the end of the run
running_trainer.py   the running trainer's configuration as a candidate
oom_report.py        out of memory: diagnosis and the next smaller configuration, as files
"""
