"""Estimates of public calculators for a row of foresight-rows.json, beside the prediction.

- accelerate: `accelerate estimate-memory`, its column "Training using Adam". It has the model's
  size
  and dtype, and no batch, adapter, quantisation or number of GPUs.
- closed formula: that of EleutherAI's calculator (github.com/EleutherAI/cookbook,
  calc/calc_transformer_mem.py, with checkpointing and ZeRO-3 on several GPUs):

      2·P + (4 + 12)·T, over the ranks, + 34·s·b·h·L + buffers of 1.5e9 elements on several GPUs

  P: parameters; T: trained ones; s: tokens; b: rows; h: width; L: layers. The calculator knows full
  tuning alone. Adapters (T) and weights in 4 bits (0.5 bytes) are added here, in its favour.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from foresight_express import ADAPTER, Case

ACTIVATION_BYTES, LOW, GRADIENT, STATE = 34, 2, 4, 12
BUFFER_ELEMENTS = 1_500_000_000
"""ZeRO-3: an all-gather bucket of 5e8 elements and 1e9 live parameters, the calculator's
defaults.
"""


def estimates(case: Case) -> dict[str, int]:
    """Return bytes per GPU by calculator."""
    return {"accelerate": _accelerate(case), "closed formula": _closed(case)}


def _accelerate(case: Case) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(_model(case.row["model"]))
    return int(max(estimate_training_usage(size, case.row["dtype"]).values()))


def _closed(case: Case) -> int:
    row, model = case.row, _model(case.row["model"])
    linear = []
    for name, module in model.named_modules():
        if "Linear" in type(module).__name__:
            linear.append((name, module))
    total = sum(parameter.numel() for parameter in model.parameters())
    trained, width = total, float(LOW)
    if row["tuning"] != "full":
        chosen = []
        for name, module in linear:
            if name.rpartition(".")[2] in row["target_modules"]:
                chosen.append(module)
        trained = sum(
            ADAPTER["r"] * (module.in_features + module.out_features) for module in chosen
        )
        width = LOW / 4 if row["tuning"].startswith("qlora") else LOW
    config = model.config
    activations = (
        ACTIVATION_BYTES
        * row["length"]
        * row["micro_batch"]
        * config.hidden_size
        * config.num_hidden_layers
    )
    buffers = BUFFER_ELEMENTS * LOW if row["gpus"] > 1 else 0
    return round(
        (width * total + (GRADIENT + STATE) * trained) / row["gpus"] + activations + buffers
    )


@functools.cache
def _model(name: str) -> Any:
    """Return the model without memory, in float32, as accelerate's command builds it."""
    from accelerate import init_empty_weights
    from foresight_express import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(MODELS[name])
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )


def with_estimates(case: Case, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the table with the calculators' estimates of torch's peak."""
    measured = case.row["measured"]["torch_max_allocated_bytes"]
    compared = {}
    for name, value in estimates(case).items():
        compared[name] = {"predicted": value, "error": round(value / measured - 1, 6)}
    return {**line, "calculators": compared}
