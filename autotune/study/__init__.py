"""The Optuna study: the only room that imports optuna, and the only one that says "trial" and "sampler".

What to measure next is decided in two steps. `agenda` (no Optuna in it) says which candidates are
worth measuring now and why; the sampler then picks one of them.
"""

from autotune.study.agenda import Means, Stop
from autotune.study.study import Asked, Study, open_study

__all__ = ["Asked", "Means", "Stop", "Study", "open_study"]
