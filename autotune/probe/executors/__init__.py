"""Executors: the machines and processes that run probes. Each passes the same contract test.

base.py          interfaces Executor and ProbeRunner
local.py         this machine;  local_slots.py  its slots
ray.py           Ray cluster;  ray_node.py  part on a node;  cluster_plan.py  division into slots
concurrent_probes.py  one thread per slot
"""
