"""Where probes run. Every executor passes the same contract test.

base.py      the two interfaces, Executor and Rig
inline.py    in this process, by a callable: for simulations and for tests of what uses executors
local.py     on this machine, in the training environment's own interpreter
"""
