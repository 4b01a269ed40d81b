"""The parent's side of a probe: one keeper process per training interpreter, under a memory limit that binds its whole tree.

folder.py        the only owner of file names: scratch, log
output.py        what the rig's processes print, kept bounded
limits.py        one interface, and what enforces it here: cgroup v1, cgroup v2, or rlimit
cgroups.py       memory cgroups as files
meter.py         the tree's memory, sampled from outside
host_memory.py   beside a GPU rig: is it the machine that is full, and whom did the kernel end?
gpus.py          the GPUs of a rig: who else is on them, are they as before, are they as small as the limit?
device_meter.py  their memory, sampled from outside;  occupancy.py  whose it is;  neighbours.py  who that is, in words
baseline.py      waits until a GPU is as empty as before
ballast.py       holds the rest of a larger GPU;  small_card.py  the arithmetic of that
device_report.py what the GPUs showed -> Measurement;  forewarning.py  what is worth saying before
spawn.py         starts a keeper
keeper.py        the parent's handle on it: starts, asks, ends
conversation.py  one command and everything that was said in answer
assemble.py      answers of the ranks -> Measurement
process_rig.py   the Rig: all of the above, candidate after candidate
"""
