"""Affordable candidates: their probe leaves time to confirm what is recommended after it.

A gain that was not confirmed is not recommended. The baseline is, as it needs no gain. So with an
incumbent b, a candidate i is affordable if the remaining seconds exceed

    load_i + probe_i + PROBES_PER_CONFIRMATION * probe_i              if i becomes the incumbent
    load_i + probe_i + MOST_PROBES_PER_CONFIRMATION * probe_b + load_b     if b remains it

load_i is 0 where the load is ready, load_b where both have the same load; b costs nothing if it is
confirmed, or the baseline. A gain in hand is worth more care than a hope: b's confirmation gets the
most that one takes, by the seconds that b's own probe took. Without an incumbent, a probe alone may
give an answer.

Example: 150 s are left, the baseline was measured. Candidate i needs a load of 60 s and a probe of
20 s: 60 + 20 + 2 * 20 = 120, it is measured.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autotune.core.answer import Trial
from autotune.search.acquisition import expected_seconds
from autotune.search.confirmation import MOST_PROBES_PER_CONFIRMATION, PROBES_PER_CONFIRMATION
from autotune.search.surrogate.candidate_table import FloatArray, IndexArray
from autotune.search.trial_view import TrialView


def affordable(
    pool: IndexArray,
    view: TrialView,
    seconds: float,
    live: Collection[str],
) -> IndexArray:
    """Return the affordable members of the pool. `live`: keys of the loads that are ready; if
    empty, the load of the last probe. Before the first measurement no cost is known.
    """
    if not view.completed:
        return pool
    probe, load = expected_seconds(view)
    last_load = view.completed[-1].candidate.load_key
    is_ready = view.table.is_loaded(live or [last_load])
    needed = np.where(is_ready, 0.0, load) + probe
    incumbent = view.best()
    if incumbent is not None:
        confirmation = PROBES_PER_CONFIRMATION * probe
        of_incumbent = _seconds_of_incumbent(incumbent, view, load)
        needed += np.maximum(confirmation, of_incumbent)
    return pool[needed[pool] < seconds]


def _seconds_of_incumbent(incumbent: Trial, view: TrialView, load: FloatArray) -> FloatArray:
    """Return the seconds of the incumbent's own confirmation after a probe of each candidate."""
    candidate = incumbent.candidate
    if candidate == view.baseline or view.is_confirmed(candidate):
        return np.zeros(len(view.table))
    cost = incumbent.measurement.cost
    probe_seconds = cost.total_seconds - cost.load_seconds
    row = view.table.row_by_id[candidate.id]
    load_seconds = max(load[row], cost.load_seconds)
    same_load = view.table.is_loaded([candidate.load_key])
    load_again = np.where(same_load, 0.0, load_seconds)
    return np.asarray(MOST_PROBES_PER_CONFIRMATION * probe_seconds + load_again)
