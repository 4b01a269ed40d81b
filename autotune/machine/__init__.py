"""Local hardware and environment: NVML, cgroups, CUDA devices, interpreters, file stamps."""
