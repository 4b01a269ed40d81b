"""`python -m autotune` is the program `autotune`."""

from autotune.cli import main

main()
