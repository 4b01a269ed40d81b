"""The Optuna study: the only room that imports optuna, and the only one that says "trial" and "sampler".

What to measure next is decided in two steps. `agenda` (no Optuna in it) says which candidates are
worth measuring now and why; the sampler then picks one of them. Both look at `beliefs`: the predictions,
corrected by everything measured so far.

    table         the candidates as arrays
    facts         what one outcome settles about others, for certain
    regression    a Gaussian process over the table;  beliefs  memory and speed by it;  costs  and seconds
    worth         gain for each second of measuring
    view          the trials so far;  agenda  what next, and when to stop;  finish  the finalists' turns
"""

from autotune.study.agenda import Means, Stop, Wait
from autotune.study.options import SearchOptions
from autotune.study.study import Asked, Study, open_study

__all__ = ["Asked", "Means", "SearchOptions", "Stop", "Study", "Wait", "open_study"]
