"""Parent side of a probe: one worker process per interpreter, under a limit on its process tree.

runner.py              candidate after candidate on one loaded model
command_exchange.py    a command and the ranks' messages (command_reply.py)
assembly.py            messages of the ranks -> Measurement;  message_validation.py  their form
root_failure.py        messages of a failed command -> Failure
worker_process.py      start, messages and end of a worker;  spawn.py  its environment
output_log.py          output of its processes
limits.py              memory limit by cgroup v2, cgroup v1 or rlimit
process_meter.py       memory of the process tree, sampled, also over time
gpu_set.py             the GPUs, and other processes on them
ballast.py             ballast that occupies the rest of a larger GPU
device_meter.py        device memory (NVML), sampled and attributed to processes
device_report.py       figures of the GPUs -> Measurement; notes before a search
executors/             slots on this machine or on a Ray cluster
"""
