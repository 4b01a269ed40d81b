"""Search: candidates are measured in an Optuna study until no better one is possible. The only
package that imports optuna.

pipeline.py         request -> answer: stored answer, search, wider search, soak
loop.py             keeps every executor slot busy: ask, measure, tell
study.py            ask and tell on Optuna's storage
    storage.py, trial_storage.py, claims.py    below it
agenda.py           next measurement or end, a pure function of the trials
    trial_view.py   what it decides by
    sampler.py      candidate of the agenda's pool
surrogate/          estimates of memory and speed: Gaussian processes over the candidate table
conclusion.py       trials -> Recommendation
record.py           the user's earlier measurements and answers
forecast_search.py, advice.py    the answer and the ways to fit by prediction alone
dashboard_server.py, dashboard_storage.py    optuna-dashboard over a study
"""
