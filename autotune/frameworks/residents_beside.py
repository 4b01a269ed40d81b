"""Models that a training script keeps on its GPU, as residents of the training."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.composition import Composition, Resident
from autotune.core.job import Workload


def with_models_beside(composition: Composition, workload: Workload) -> Composition:
    """Return the composition with them on each rank, since each runs the script."""
    residents = list(composition.residents)
    for model in workload.models_beside:
        resident = Resident(
            role="beside",
            model=model.name,
            ranks=composition["policy"].ranks,
            dtype=composition["policy"].dtype,
            trains=False,
            weight_bytes=model.weight_bytes,
        )
        residents.append(resident)
    return replace(composition, residents=tuple(residents))
