"""Predicted peaks of torch on the runs that FakeGPU's page lists, beside its own and the measured
ones.

make bench-fakegpu

No GPU, no weights, no network. The runs are in fakegpu-rows.json, with their source. Each is one
optimizer step of a loop of that project, without a trainer; the generic step is traced with the
same model code, optimizer and adapters, and sharded and replayed as every other one. With
`--python`, an environment with a CUDA build of torch, runs on one GPU are run on an emulated card
too.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import foresight
import foresight_predict as predicted
import foresight_report as report
import machine
import msgspec
from foresight_express import Case

from autotune.catalog.model_lookup import find_model
from autotune.core.trace import Trace
from autotune.emulator.cards import emulated_machine
from autotune.emulator.launch import rehearse

HERE = Path(__file__).resolve().parent
ROWS = HERE / "fakegpu-rows.json"
RESULTS = HERE / "results"
GIB = 1 << 30
ENVIRONMENT = "tf-5.12"
"""Linear attention takes other steps in later releases of transformers: 0.1 GiB more or less for
64 tokens of the 0.8B.
"""

CARD = "RTX3090"
"""Any card with room: what torch allocates does not depend on it here."""

FSDP1 = {
    "fsdp_use_orig_params": False,
    "fsdp_sync_module_states": False,
    "fsdp_backward_prefetch": "NO_PREFETCH",
}


COLUMNS = (
    "model",
    "method",
    "GPUs",
    "recomputed",
    "accumulation",
    "tokens",
    "measured GiB",
    "predicted",
    "error",
    "emulated",
    "error",
    "FakeGPU",
    "FakeCUDA",
)

MACHINERY = ("environment", "gpu", "dtype", "micro_batch", "tuning")
"""Fields of a row that only its trace and prediction need."""


@dataclass(frozen=True, kw_only=True)
class Run(Case):
    """One row, with the sharding of its own wrapper."""

    @property
    def sharding(self) -> Mapping[str, Any] | None:
        kind = self.row["sharding"]
        return kind and {
            "kind": kind,
            "ranks": self.row["gpus"],
            "options": FSDP1 if kind == "fsdp1" else {},
        }


def main() -> int:
    options = _arguments()
    source = json.loads(ROWS.read_text())
    began = time.monotonic()
    runs = [expressed(number, row) for number, row in enumerate(source["rows"], 1)]
    traces = foresight.follow_all(runs, options.environments, options.keep)
    rows = [{**compared(run, traces[run.key]), **emulated(run, options)} for run in runs]
    facts = machine.facts(report.versions(traces.values()))
    document = {
        "schema": 1,
        "source": source["source"],
        "measured_with": source["measured_with"],
        "ran_on": facts | {"seconds": round(time.monotonic() - began)},
        "summary": summary(rows),
        "rows": rows,
    }
    print(readable(document))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fakegpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "fakegpu.md").write_text(readable(document))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, default=foresight.ENVIRONMENTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="folder of traces, as in foresight.py")
    parser.add_argument(
        "--python", type=Path, help="interpreter of an environment with a CUDA build of torch"
    )
    return parser.parse_args()


def expressed(number: int, row: Mapping[str, Any]) -> Run:
    """Return the trace that a row needs: one step from the first allocation on, as it was
    measured.
    """
    text = _text_config(row["model"])
    lora = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    patches = ["fakegpu_step:single_tensor_adamw", "fakegpu_step:outputs_kept"]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": row["accumulation"],
        "gradient_checkpointing": row["checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_grad_norm": 0,
        "optim": "adamw_torch",
        "use_cache": False,
        "patches": patches,
    }
    if row["method"] == "qlora":
        patches.append("fakegpu_step:packed_nf4")
        settings["nf4"] = {"rank": 8, "nested": row["nested"]}
    specification: dict[str, Any] = {
        "method": "generic",
        "model": {
            "name": row["model"],
            "folder": None,
            "config": text,
            "dtype": "bfloat16",
            "attn_implementation": "sdpa",
        },
        "adapter": lora if row["method"] == "lora" else None,
        "settings": settings,
        "device": "cuda",
        "capability": [8, 6],
        "lengths": {"prompt": 0, "completion": row["length"], "padded": False},
        "steps": 1,
    }
    if row["sharding"]:
        sharding_options = {
            "units": "layers",
            "reshard_root": True,
        }  # its worker calls `fully_shard` on each layer and on the model
        specification["sharding"] = {
            "kind": row["sharding"],
            "ranks": row["gpus"],
            "options": sharding_options,
        }
    run_facts = {
        "id": f"fakegpu-{number}",
        "environment": ENVIRONMENT,
        "gpu": CARD,
        "dtype": "bfloat16",
        "micro_batch": 1,
    }
    return Run(row={**row, **run_facts, "tuning": row["method"]}, specification=specification)


def _text_config(name: str) -> dict[str, Any]:
    """Return the config of the text model alone: vision tower and head for several tokens are
    not loaded.
    """
    text = find_model(name).config["text_config"]
    assert isinstance(text, Mapping)
    return {**text, "architectures": ["Qwen3_5ForCausalLM"], "use_cache": False}


def compared(run: Run, answer: Mapping[str, Any]) -> dict[str, Any]:
    line = {}
    for name, value in run.row.items():
        if name not in ("environment", "gpu", "dtype", "micro_batch", "tuning"):
            line[name] = value
    if "error" in answer:
        return {**line, "error": answer["error"]}
    try:
        prediction = predicted.prediction(
            run, msgspec.convert(answer["trace"], Trace, str_keys=True), 0
        )
    except ValueError as error:
        return {**line, "error": str(error)}
    # The load is not part of the published peak.
    return {**line, "predicted_gib": round(prediction.torch_peak_allocated_bytes.value / GIB, 4)}


def emulated(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Return torch's peak of the same step on an emulated card; nothing for several GPUs."""
    if options.python is None or run.row["gpus"] > 1:
        return {}
    settings = {}
    for name in ("method", "nested", "checkpointing", "accumulation", "length"):
        settings[name] = run.row[name]
    command = [
        str(options.python),
        str(HERE / "fakegpu_loop.py"),
        json.dumps({**settings, "config": _text_config(run.row["model"])}),
    ]
    paths = (options.environments / f"foresight-{ENVIRONMENT}", HERE.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path.resolve()) for path in paths)
    shown: list[str] = []
    rehearsal = rehearse(command, emulated_machine(CARD), options.python, shown.append)
    if rehearsal.code:
        return {"emulation_error": shown[-1].strip() if shown else f"exit code {rehearsal.code}"}
    return {"emulated_gib": json.loads(shown[-1])["peak_gib"]}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    comparable = [row for row in rows if "predicted_gib" in row]
    errors, fakegpu_errors = (
        [abs(_error(row)) for row in comparable],
        [row["static_error"] for row in comparable],
    )
    return {
        "rows": len(rows),
        "compared": len(comparable),
        "median": round(statistics.median(errors), 5) if errors else None,
        "worst": round(max(errors, default=0), 5),
        "fakegpu_median": round(statistics.median(fakegpu_errors), 5) if fakegpu_errors else None,
        "fakegpu_worst": max(fakegpu_errors, default=0),
        "nearer": sum(map(operator.lt, errors, fakegpu_errors)),
        "emulated": _emulated_summary(rows),
    }


def _emulated_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    run = [row for row in rows if "emulated_gib" in row]
    if not run:
        return None
    errors = [abs(_error(row, "emulated_gib")) for row in run]
    fakegpu_errors = [row["static_error"] for row in run]
    return {
        "rows": len(run),
        "median": round(statistics.median(errors), 5),
        "worst": round(max(errors), 5),
        "nearer": sum(map(operator.lt, errors, fakegpu_errors)),
    }


def _error(row: Mapping[str, Any], figure: str = "predicted_gib") -> float:
    return float(row[figure] / row["measured_gib"] - 1)


def readable(document: Mapping[str, Any]) -> str:
    ran, figures = document["ran_on"], document["summary"]
    lines = [
        "# Beside FakeGPU's own figures",
        "",
        (
            f"`make bench-fakegpu` on {ran['date']}, {ran['cores']} cores ({ran['cpu']}), no GPU;"
            f" commit {ran['commit']}."
        ),
        "Versions followed: " + machine.versions_text(ran["versions"], "; ") + ".",
        "",
        (
            "Measured peaks (`torch.cuda.max_memory_allocated`) and FakeGPU's errors: [its"
            f" page]({document['source']}),"
        ),
        (
            f"{document['measured_with']}. It states three decimals of a GiB, and errors without a"
            " sign."
        ),
        "",
        "| | rows | median error | worst | nearer to the measured peak |",
        "|---|---|---|---|---|",
        (
            f"| autotune, predicted | {figures['compared']} | {figures['median']:.3%} |"
            f" {figures['worst']:.3%} | {figures['nearer']} |"
        ),
        *_emulated_line(figures["emulated"]),
        (
            f"| FakeGPU, static | {figures['compared']} | {figures['fakegpu_median']:.3%} |"
            f" {figures['fakegpu_worst']:.3%} | |"
        ),
        "",
        _cells(COLUMNS),
        "|---" * len(COLUMNS) + "|",
    ]
    for row in document["rows"]:
        method = (
            row["method"]
            + (", nested scales" if row["nested"] else "")
            + (f", {row['sharding']}" if row["sharding"] else "")
        )
        prediction_cells = (
            [f"{row['predicted_gib']:.3f}", f"{_error(row):+.3%}"]
            if "predicted_gib" in row
            else ["", row["error"].replace("|", "/")[:120]]
        )
        executed = f"{row['executed_error']:.3%}" if row.get("executed_error") else ""
        cells = [
            row["model"].split("/")[-1],
            method,
            f"{row['gpus']} {row['card']}",
            "yes" if row["checkpointing"] else "no",
            row["accumulation"],
            row["length"],
            f"{row['measured_gib']:.3f}",
            *prediction_cells,
            *_emulated_cells(row),
            f"{row['static_error']:.3%}",
            executed,
        ]
        lines.append(_cells(cells))
    return "\n".join(lines) + "\n"


def _cells(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _emulated_line(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return []
    cells = [
        "autotune, emulated",
        str(figures["rows"]),
        f"{figures['median']:.3%}",
        f"{figures['worst']:.3%}",
        str(figures["nearer"]),
    ]
    return [f"| {' | '.join(cells)} |"]


def _emulated_cells(row: Mapping[str, Any]) -> list[str]:
    if "emulated_gib" not in row:
        return ["", str(row.get("emulation_error", "")).replace("|", "/")[:120]]
    return [f"{row['emulated_gib']:.3f}", f"{_error(row, 'emulated_gib'):+.3%}"]


if __name__ == "__main__":
    raise SystemExit(main())
