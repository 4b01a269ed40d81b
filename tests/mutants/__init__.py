"""Mutants: small wrong changes of the code, each tried against the tests that execute it.

    make mutants              300 mutants, chosen by a seed
    python -m tests.mutants --number 20 --only autotune/estimate/timeline.py

A mutant that no test notices is a line that could be wrong without anybody seeing it. The result,
benchmarks/results/mutants.json and its page mutants.md, lists every mutant; survivors.yaml in this
folder says of those that survived why.

What a mutant costs is what its tests cost: all modules are loaded and all tests collected once, in
a process that forks for each mutant; the fork replaces the code of the functions that changed. Only
what an import executes (19 of 300) is imported again.
"""
