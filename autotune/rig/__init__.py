"""The parent's side of a probe: one keeper process per training interpreter, under a memory limit that binds its whole tree.

folder.py        the only owner of file names: scratch, log
output.py        what the rig's processes print, kept bounded
limits.py        one interface, and what enforces it here: cgroup v1, cgroup v2, or rlimit
cgroups.py       memory cgroups as files
meter.py         the tree's memory, sampled from outside
spawn.py         starts a keeper
keeper.py        the parent's handle on it: starts, asks, ends
conversation.py  one command and everything that was said in answer
assemble.py      answers of the ranks -> Measurement
process_rig.py   the Rig: all of the above, candidate after candidate
"""
