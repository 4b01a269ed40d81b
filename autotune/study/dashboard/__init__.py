"""The study in optuna-dashboard: constraints respected, notes and artifacts made from the records while somebody looks.

Nothing is written into the study for this: a study of last year, or one that is being searched right now, shows the same.
"""

from autotune.study.dashboard.serve import Extras, application, serve

__all__ = ["Extras", "application", "serve"]
