"""The side of a probe that lives in the training environment.

Standard library and the framework only: this folder is copied nowhere and installed nowhere, it is
run by path (`python .../autotune/inside`) under the interpreter of `--python`, where autotune and
its dependencies may be absent. It talks to its parent in JSON lines over a socket of its own,
never over stdout.

The processes, each the parent of the next:

    autotune ── the keeper (imports the framework once, then only forks and waits)
                 └── one rank per device (loads, then measures candidate after candidate)

What is said, one JSON object a line. Parent to keeper:

    {"do": "warm", "id": n, "load": {...}}               imports what this load will need; answered by `ready` or `unready`
    {"do": "load", "id": n, "ranks": r, "load": {...}, "guard_bytes": b | null, "slack_bytes": k, "device_limit_bytes": d | null}
    {"do": "measure", "id": n, "request": {...}, "guard_bytes": b | null, "slack_bytes": k, "device_limit_bytes": d | null}
    {"do": "unload", "id": n}                            ends the ranks, keeps the keeper
    {"do": "quit"}

`guard_bytes` is how much each rank may still grow before the limit of the machine's memory is reached, and `slack_bytes`
how much more it may map without touching it (where a cgroup counts what is touched); on a GPU,
`device_limit_bytes` is what each rank may reach on its own device.

Back (everything a rank says carries "rank"):

    {"event": "environment", "pid": p, "versions": {...}}                   before any heavy import: what is installed
    {"event": "ready", "pid": p, "seconds": s, "versions": {...}}           imports are done
    {"event": "unready", "error": {...}}                                    imports failed
    {"event": "loading" | "loaded", "id": n, "rank": r, "pid": p, "world_size": w, "seconds": s}
    {"event": "phase", "id": n, "rank": r, "phase": "rollout"}              at every change of phase
    {"event": "cycle", "id": n, "rank": r, "done": k, "of": m, "seconds": s, "tokens": t}
    {"event": "measured", "id": n, "rank": r, "base_bytes": b, "stays": true, "result": {...}}
    {"event": "failed", "id": n, "rank": r, "phase": "...", "error": {"type": "...", "text": "...", "traceback": "..."},
                        "base_bytes": b, "stays": true, "partial": {"peak_bytes": n, ...}}
    {"event": "lost", "id": n, "rank": r, "signal": s | null, "exit": e | null}      a rank ended without a word
    {"event": "unloaded", "id": n}
    {"event": "stuck", "id": n, "pids": [...]}                              these could not be ended (a device driver holds them)

A message begins and ends with a line feed, so half a line before it cannot swallow it; what is no JSON object is passed over.

A rank that failed with an exception stays alive where it could give its memory back ("stays"), and takes the
next candidate; a rank that was lost or did not stay is loaded anew by the parent's next `load`.

An adapter is a module with four functions (a file name ending in .py is taken as a path):

    warm(load_hint) -> versions       imports everything, once, in the keeper; touches no device, starts no thread it can avoid
    load(request, stage) -> loaded    in each rank: model, engine, whatever candidates share
    measure(loaded, request, stage) -> result
    release(loaded)                   gives back what the last `measure` left behind; what `load` made stays; after every measure.
                                      False says that this process cannot give it back: a fresh one takes the next candidate

`stage` is made anew for every load and measure: Stage(rank=, world_size=, emit=, limit_bytes=); `stage.phase` is the
name of the phase that runs now; `limit_bytes` is what this process's own anonymous and shared memory may reach, or, on
a GPU, its device's memory.
`tempfile.gettempdir()` is a scratch folder that the parent removes. The result of `measure`, for this rank alone:

    {"worst": speed | null, "typical": speed | null, "optimizer_steps": n, "effective": {...},
     "memory": {"peak_bytes": n, "phase_peak_bytes": {"rollout": n, ...},   CPU: its RssAnon + RssShmem. GPU: its device's
                "torch_allocated_bytes": n | null, "torch_reserved_bytes": n | null, "allocation_retries": n | null},
     "setup_seconds": s, "loop_seconds": s,
     "model_bytes": {"weights": n, "reference_weights": n, ...},   what its models' own tensors hold: `weighing.py`
     "models": [{"rank": r, "bytes": {...}}, ...],                 the same of all ranks of a run that was only started
     "exercised": {...},                                        what really happened: `autotune.measurement.Exercised`
     "world_size": w}                                           as the trainer itself sees it: it must be the number of ranks
    speed: {"completion_tokens": n, "cycle_seconds": [s, ...], "cycle_loss_tokens": [n, ...], "prompt_tokens": n,
            "phase_seconds": {"rollout": s, ..., "other": s}, "user_reward_seconds": s, "cut_short": false,
            "borrowed_seconds": s}        of the cycles' seconds, those of rollouts taken over from an earlier candidate

An exception may carry the same dictionary, as far as it got, in an attribute `partial`; and, where a program that the
adapter had started ended badly, how it did in an attribute `ended`: {"signal": s | null, "exit": e | null}. `failed` then says
so too, and its last words are what it printed.
"""
