"""A study of Optuna with autotune's sampler, pruner and probes.

python examples/optuna_study.py --model ./model --gpus cpu --memory-limit 1G

Started again, it continues. Several processes may run it at once on the same storage.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import optuna

import autotune
from autotune.search.objective import Probe
from autotune.search.pruning import SlowProbePruner
from autotune.search.sampler import PredictedSampler, StopAtEnd

METRIC = "tokens per second"


def optimize(
    sampler: PredictedSampler,
    probe: Probe,
    storage: str,
    timeout: float | None = None,
) -> optuna.Study:
    """Measure until no better configuration is likely, and return the study."""
    study = optuna.create_study(
        study_name="grpo",
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=sampler,
        pruner=SlowProbePruner(sampler),
    )
    study.set_metric_names([METRIC])
    study.optimize(probe, timeout=timeout, n_jobs=probe.slots, callbacks=[StopAtEnd(sampler)])
    return study


def write_figures(study: optuna.Study, folder: Path) -> None:
    """Write Optuna's own figures of the study."""
    folder.mkdir(parents=True, exist_ok=True)
    varied = varied_parameters(study)
    visualization = optuna.visualization
    figures = {
        "history": visualization.plot_optimization_history(study, target_name=METRIC),
        "cycles": visualization.plot_intermediate_values(study),
        "parameters": visualization.plot_parallel_coordinate(
            study, params=varied, target_name=METRIC
        ),
        "importances": visualization.plot_param_importances(study, params=varied),
    }
    for name, figure in figures.items():
        figure.write_html(folder / f"{name}.html", include_plotlyjs="directory")


def varied_parameters(study: optuna.Study) -> list[str]:
    """Return the parameters with more than one measured value: Optuna rates the others as well."""
    values: dict[str, set[object]] = {}
    for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
    return [name for name, measured in values.items() if len(measured) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--gpus", default="local")
    parser.add_argument("--memory-limit")
    parser.add_argument("--space")
    parser.add_argument("--storage", default="sqlite:///study.db")
    parser.add_argument("--timeout", type=float, help="seconds")
    parser.add_argument("--figures", type=Path, default=Path("figures"))
    arguments = parser.parse_args()

    job = autotune.job(
        model=arguments.model,
        gpus=arguments.gpus,
        memory_limit=arguments.memory_limit,
        space=arguments.space,
    )
    sampler = PredictedSampler(job)
    with contextlib.closing(Probe(job, sampler)) as probe:
        study = optimize(sampler, probe, arguments.storage, arguments.timeout)
    print(f"{study.best_value:.0f} tokens/s with {study.best_params}")
    write_figures(study, arguments.figures)


if __name__ == "__main__":
    main()
