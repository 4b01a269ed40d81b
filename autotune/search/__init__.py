"""Search: candidates are measured in an Optuna study until no better one is possible. The only
package that imports optuna.

pipeline.py         request -> answer: stored answer, search, wider search, soak
loop.py             keeps every executor slot busy: ask, measure, tell
study.py            ask and tell on Optuna's storage
    storage.py, atomic_storage.py, claims.py, database_retry.py    below it
agenda.py           next measurement or end, a pure function of the trials
    trial_view.py, tiers.py, finalists.py, implications.py          what it decides by
surrogate/          estimates of memory and speed: Gaussian processes over the candidate table
conclusion.py       trials -> Recommendation; choice.py, the recommended one among those that fit
relaxation.py, soak.py    may replace the recommendation
record.py           the user's earlier measurements and answers
forecast_search.py, advice.py    the answer and the ways to fit by prediction alone
dashboard/          optuna-dashboard over a study
"""
