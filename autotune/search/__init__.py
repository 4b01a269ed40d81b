"""Search: candidates are measured in an Optuna study until no better one is possible. The only
package that imports optuna.

pipeline.py         request -> answer: stored answer, search, wider search, soak
    relaxation.py, soak.py, probe_cost.py      its steps
loop.py             keeps every executor slot busy: ask, measure, tell
study.py            Optuna's ask and tell for it
sampler.py          optuna.samplers.BaseSampler; pruning.py: BasePruner; objective.py: probes
    problem.py, parameters.py       the candidates, and as parameters of Optuna
    trial_storage.py, measured_trial.py    trials as Optuna's records
storage.py, database_retry.py, claims.py   what Optuna's storages lack: see there
record.py           the user's earlier measurements and answers

Pure functions of the trials, without storage and loop:

agenda.py           next measurement or end
    confirmation.py     which finalist to confirm next
    first_probe.py      baseline, or another where the budget pays for one of the two
    affordable.py       candidates that the remaining budget pays for
    acquisition.py      candidate of the agenda's pool
    trial_view.py       what they decide by; pooling.py, speed_comparison.py
surrogate/          estimates of memory and speed: Gaussian processes over the candidate table
conclusion.py       trials -> Recommendation

forecast_search.py, advice.py    the answer and the ways to fit by prediction alone
dashboard_server.py, dashboard_storage.py, dashboard_content.py    optuna-dashboard over a study
"""
