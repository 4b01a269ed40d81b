"""Executors: the machines and processes that run probes. Each passes the same contract test.

base.py          interfaces Executor and ProbeRunner
inline.py        function calls in this process, for simulations and tests
local.py         this machine;  local_slots.py  its share per slot;  slot.py  one slot
ray.py           Ray cluster;  ray_node.py  part on a node;  cluster_plan.py  division into slots
concurrent_probes.py  one thread per slot
"""
