"""optuna-dashboard over a study: constraints respected, notes and artifacts derived from the
records on request.

The study itself is not changed, so an old one and one under search display alike.
"""

from autotune.search.dashboard.serve import Extras, application, serve

__all__ = ["Extras", "application", "serve"]
