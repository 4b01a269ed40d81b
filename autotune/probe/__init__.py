"""Parent side of a probe: one worker process per interpreter, under a limit on its process tree.

runner.py              probe runner: candidate after candidate on one loaded model
assembly.py            messages of the ranks -> Measurement
command_exchange.py    one command and its replies;  message_validation.py  form of messages
worker_process.py      start, commands and end of a worker;  spawn.py  its environment and folder
output_log.py          its output, of bounded size
limits.py              memory limit by cgroup v2, cgroup v1 or rlimit
process_meter.py       memory of the process tree, sampled, also over time
gpu_set.py             the GPUs: ballast, other processes;  gpu_notes.py  notes before a search
device_meter.py        device memory (NVML), sampled and attributed to processes
device_report.py       figures of the GPUs -> Measurement
ballast.py             process that occupies the rest of a larger GPU
executors/             slots on this machine or on a Ray cluster
"""
