"""ms-swift with long rows on emulated cards, next to the generic step's prediction.

python benchmarks/emulated_lengths.py --environments .venvs [--predictions] [NAMES]

How far is torch's peak of a training process from the predicted one, where rows are 1,000 to 30,000
tokens long? Writes results/emulated_lengths.json. Its figures are emulated and predicted, not
measured.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from emulated_frameworks import ENVIRONMENT, Setup, predicted_anew, run

RESULT = Path(__file__).resolve().parent / "results" / "emulated_lengths.json"
GPUS = "2xA100-80G"
SWIFT_MODEL = ("model_type=qwen2", "template=qwen2_5")


def swift_sft(tokens: int, micro_batch: int, *, tuning: str, checkpointing: bool) -> Setup:
    recomputed = "recomputed" if checkpointing else "stored"
    return Setup(
        name=f"swift sft {tuning}, {micro_batch} x {tokens}, {recomputed}",
        framework="swift",
        method="sft",
        tuning=tuning,
        gpus=GPUS,
        global_batch=2 * micro_batch,
        prompt_tokens=None,
        completion_tokens=None,
        generations=None,
        holds=(
            *SWIFT_MODEL,
            f"max_length={tokens}",
            f"per_device_train_batch_size={micro_batch}",
            f"gradient_checkpointing={str(checkpointing).lower()}",
        ),
    )


SETUPS = (
    swift_sft(1_000, 8, tuning="full", checkpointing=True),
    swift_sft(4_000, 2, tuning="full", checkpointing=False),
    swift_sft(16_000, 1, tuning="full", checkpointing=True),
    swift_sft(30_000, 1, tuning="lora", checkpointing=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder with cuda-swift and the others"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument(
        "--predictions", action="store_true", help="predict anew, and keep what was emulated"
    )
    parser.add_argument("names", nargs="*", help="only setups whose names begin so")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows: dict[str, Any] = {}
    if options.out.is_file():
        rows = json.loads(options.out.read_text())["rows"]
    for setup in SETUPS:
        if options.names and not setup.name.startswith(tuple(options.names)):
            continue
        python = options.environments / f"cuda-{setup.framework}" / "bin" / "python"
        if options.predictions:
            rows[setup.name]["predicted"] = predicted_anew(setup, python)
        else:
            rows[setup.name] = run(setup, python)
        options.out.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
        print(setup.name, json.dumps(_summary(rows[setup.name])), flush=True)


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """Return the exit code, and torch's peaks in GiB: emulated by process, and predicted."""
    peaks = []
    for process in row["emulated"]["processes"]:
        if process["torch_allocated_bytes"] is not None:
            peaks.append(round(process["torch_allocated_bytes"] / 2**30, 2))
    predicted = row["predicted"]["torch_peak_allocated_bytes"]
    return {
        "exit_code": row["exit_code"],
        "error": row["error"],
        "seconds": row["seconds"],
        "emulated": peaks,
        "predicted": {name: round(size / 2**30, 2) for name, size in predicted.items()},
    }


if __name__ == "__main__":
    main()
