"""Mutants: small wrong changes of the code, each tried against the tests that execute it.

    make mutants              300 mutants, chosen by a seed; an hour on two cores
    python -m tests.mutants --number 20 --only autotune/estimate/timeline.py

A mutant that no test notices is a line that could be wrong without anybody seeing it. The result,
benchmarks/results/mutants.json, lists every mutant; tests/mutants/survivors.yaml says of those that
survived why.
"""
