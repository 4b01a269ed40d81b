"""Part of a probe that runs in the training environment.

This folder is neither copied nor installed. The interpreter given by `--python` runs it by path
(`python .../autotune/worker`), so it imports only the standard library and the framework:

    autotune ── worker (imports the framework once, then forks ranks and relays their messages)
                  └── one rank per device (loads, then measures one candidate after another)

`protocol.py` describes the messages between them; they travel over a socket, never over stdout.

An adapter is a module with these functions. A name ending in .py is a path to such a module.

    warm(load) -> versions      imports everything, once, in the worker process. It must not
                                initialise a device or leave threads running: forks inherit neither
                                in a working state.
    load(request, recorder) -> loaded
                                in each rank: the model, the engine, everything candidates share.
                                With several ranks, RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
                                MASTER_PORT are set before the call.
    measure(loaded, request, recorder) -> result
                                runs one candidate through the framework's own loop, and leaves the
                                loaded weights unchanged.
    release(loaded)             after each measure: frees all memory except that of `load`. False
                                means that this process cannot free it and has to be replaced.
    supported() -> (oldest, newest)
                                tested releases of the framework; optional.

`recorder` is a `PhaseRecorder`, new for each load and measure. `recorder.limit_bytes` bounds the
process's anonymous and shared memory, or the memory of its GPU. `tempfile.gettempdir()` is a
scratch folder that the parent removes. An exception may carry `partial`, a result as far as it got,
and `ended`, the exit of a program that the adapter started: {"signal": s | None, "exit": e | None}.
"""
