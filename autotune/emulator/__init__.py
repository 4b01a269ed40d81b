"""Emulated GPUs: CUDA builds of torch and of training frameworks run unmodified on a machine
without a GPU.

A preloaded library replaces NVIDIA's. It accounts for memory like a driver (capacity per card,
contexts, out-of-memory errors, all processes of a machine together) and computes nothing. The host
code, from the caching allocator to the trainer, is the installed one. Values of small tensors and
of integers are kept true (`inject/`).

    cards.py            cards from the catalog, and the file that describes them to the library
    entry_points.py     names that the library must define, and the text of the generated ones
    build.py            the training environment, and the library for it: compiled, and kept
    launch.py           commands on emulated cards, and NVML of these for the process that watches
    reports.py          peaks of its processes, and reasons for doubt
    csrc/               the library
    inject/             code inside the training processes

Not emulated: time, numerics, existence of a kernel for a card, real sizes of a driver.
docs/emulated-gpus.md has the list.
"""
