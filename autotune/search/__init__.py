"""Search: candidates are measured in an Optuna study until no better one is possible. The only
package that imports optuna.

pipeline      request -> answer: stored answer, search, wider search, soak loop          keeps every
executor slot busy: ask, measure, tell study         ask and tell on Optuna's storage; storage,
atomic_storage, claims, database_retry below it agenda        next measurement or end, a pure
function of the trials; trial_view, finalists, implications surrogate/    estimates of memory and
speed: Gaussian processes over the candidate table, acquisition conclusion    trials ->
Recommendation; relaxation and soak may replace it forecast_search, advice   the answer and the ways
to fit by prediction alone
"""
