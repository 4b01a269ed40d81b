"""Executors: the machines and processes that run probes. Each passes the same contract test.

base.py          interfaces Executor and ProbeRunner; one thread per slot
local.py         this machine;  emulated.py  emulated GPUs on it
ray.py           Ray cluster;  ray_cluster.py  its connection and slots;  ray_node.py  division into slots, part on a node
"""
