"""One module per framework and method: what a rank calls to load once and to measure candidate after candidate.

An adapter is a module with these functions, and nothing else of it is called:

    warm(load: dict) -> dict[str, str]
        Once, in the keeper: import everything that the first load will need, so that forks begin with it. Must not
        initialise a device nor leave threads behind: a fork would inherit neither in a working state. Returns versions.

    load(request: dict, stage: Stage) -> object
        Once in each rank, after the fork: the base model, and the engine where one is asked for. With several ranks, RANK,
        LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are already in the environment.

    measure(loaded: object, request: dict, stage: Stage) -> dict
        One candidate on what is loaded, through the framework's own loop. Must leave the loaded weights as they were.
        An exception may carry `partial`, a dict of what was found out before it.

    release(loaded: object) -> None
        After every measure, well ended or not: give back all memory but that of what is loaded.

    supported() -> tuple[str, str]
        The oldest and the newest version of the framework that is known to work.

Requests and results are JSON; `autotune.trainers` words the requests and `autotune.rig` reads the results.
"""
