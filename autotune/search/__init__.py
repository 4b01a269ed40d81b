"""Search: candidates are measured in an Optuna study until no better one is possible. The only
package that imports optuna.

pipeline.py         request -> answer: stored answer, search, wider search, soak
    relaxation.py, soak.py, probe_cost.py      its steps
loop.py             keeps every executor slot busy: ask, measure, tell
study.py            ask and tell on Optuna's storage
    storage.py, trial_storage.py, database_retry.py, claims.py    below it
record.py           the user's earlier measurements and answers

Pure functions of the trials, without storage and loop:

agenda.py           next measurement or end
    confirmation.py     which finalist to confirm next
    affordable.py       candidates that the remaining budget pays for
    acquisition.py      candidate of the agenda's pool; sampler.py: by Optuna's own samplers
    pruning.py          when a probe is stopped early
    trial_view.py       what they decide by; pooling.py, speed_comparison.py
surrogate/          estimates of memory and speed: Gaussian processes over the candidate table
conclusion.py       trials -> Recommendation

forecast_search.py, advice.py    the answer and the ways to fit by prediction alone
dashboard_server.py, dashboard_storage.py, dashboard_content.py    optuna-dashboard over a study
"""
