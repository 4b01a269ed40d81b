"""Public recipes from end to end: `python benchmarks/recipes.py [NAME ...]`.

Every recipe is predicted as it is, on GPUs that it was written for. TRL's are then really run with
a tiny model and short rows on this machine's CPU, the others on emulated cards, as one probe: their
own settings, no model or data of the hub. Results are in benchmarks/results/recipes.json; `--table`
prints them as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # recipes and tiny models of the tests

import emulated_recipes  # noqa: E402
import machine  # noqa: E402

from autotune.core.units import format_bytes  # noqa: E402
from autotune.worker.synthetic import tiny_config, write_model_folder  # noqa: E402
from tests.counted_memory.image_cases import MODELS  # noqa: E402
from tests.frameworks.test_launch_scripts import script_of  # noqa: E402

RECIPES = ROOT / "tests" / "frameworks" / "recipes"
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
WITH_LIGER = ROOT / ".venvs" / "foresight-liger"
"""Folder with Liger's kernels, which two recipes turn on."""

GPUS_OF = {"run_qwen2_5-3b_gsm8k_grpo_lora.sh": "2xH100"}
"""Launches for another number of GPUs than 8."""

MORE = {"swift grpo_7b.sh": ("--hold", "server_gpus=2")}
"""What a script has outside its training command: six of eight GPUs train, by NPROC_PER_NODE."""

SECONDS = 2700

VISION = dict(MODELS["qwen2.5-vl"])

QUICKSTART = (Path(__file__).parent / "texts/quickstart.txt").read_text()
"""TRL's quickstart, with rows of its own in place of a data set of the hub, and a reward without
another package.
"""

TINY = [
    "--gpus",
    "cpu",
    "--memory-limit",
    "4G",
    "--max-probes",
    "1",
    "--budget",
    "5m",
    "--fresh",
    "--hold",
    "use_cpu=true",
    "--hold",
    "bf16=false",
    "--hold",
    "dtype=float32",
    "--hold",
    "attn_implementation=eager",
]
SHORT = {
    "grpo": [
        "--max-prompt-length",
        "32",
        "--max-completion-length",
        "32",
        "--hold",
        "use_vllm=false",
    ],
    "sft": ["--hold", "max_length=64"],
    "dpo": ["--hold", "max_length=64"],
}
NOT_ON_A_CPU = (
    "dataset",
    "use_liger_kernel",
    "vllm_",
    "model_revision",
    "benchmarks",
    "callbacks",
    "packing",
    "padding_free",
)
"""Prefixes of settings left out of a probe: data of the hub, and what needs a GPU."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe and the GPUs on which it is predicted."""

    name: str
    source: str
    framework: str
    method: str
    gpus: str
    settings: dict[str, Any]
    kind: str  # config, command or script


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of the table in docs/frameworks.md."""
    open_r1 = _read("open_r1.yaml")
    for name, part, gpus in (
        ("open-r1 config_demo", "DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml", "8xH100"),
        ("open-r1 codeforces", "grpo/config_codeforces.yaml", "8xH100"),
    ):
        row = next(recipe_row for recipe_row in open_r1 if part in recipe_row["source"])
        yield Recipe(
            name=name,
            source=row["source"],
            framework="trl",
            method="grpo",
            gpus=gpus,
            settings=row["given"],
            kind="config",
        )
    for name, row in zip(
        ("TRL sft", "TRL dpo", "TRL grpo", "TRL grpo_vlm"), _read("trl_scripts.yaml"), strict=True
    ):
        yield Recipe(
            name=name,
            source=row["source"],
            framework="trl",
            method=row["method"],
            gpus="A100-80G",
            settings=row["settings"],
            kind="config",
        )
    yield Recipe(
        name="TRL quickstart",
        source="huggingface/trl: docs/source/quickstart.md",
        framework="trl",
        method="grpo",
        gpus="A100-80G",
        settings={"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"},
        kind="script",
    )
    launches = _read("launch_scripts.yaml")
    chosen = (
        "run_qwen2-7b.sh",
        "run_qwen2_5-3b_gsm8k_grpo_lora.sh",
        "run_qwen2-7b_seq_balance.sh",
        "full/train.sh",
        "external/grpo_7b.sh",
        "internal/gspo.sh",
    )
    for part in chosen:
        row = next(launch for launch in launches if launch["source"].endswith(part))
        yield Recipe(
            name=f"{row['framework']} {part.rpartition('/')[2]}",
            source=row["source"],
            framework=row["framework"],
            method=row["method"],
            gpus=GPUS_OF.get(part, "8xH100"),
            settings=row["settings"],
            kind="command",
        )


def _read(name: str) -> Any:
    return yaml.safe_load((RECIPES / name).read_text())


def predicted(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Predict the recipe as it is."""
    arguments = [
        "predict",
        "--gpus",
        recipe.gpus,
        "--json",
        *_given(recipe, folder, recipe.settings),
    ]
    return _answered(arguments, folder, ("fits", "peak_memory_bytes", "limit_bytes", "basis"))


def emulated(
    recipe: Recipe,
    folder: Path,
    environments: Path,
) -> dict[str, Any]:
    """Run the script's settings once with tiny shapes, by its own framework on emulated cards."""
    settings = emulated_recipes.shrunk(recipe.framework, recipe.method, recipe.settings)
    script = folder / "tiny.sh"
    script.write_text(
        script_of({"framework": recipe.framework, "method": recipe.method, "settings": settings})
    )
    changed = sorted(name for name, value in settings.items() if recipe.settings.get(name) != value)
    cards = emulated_recipes.gpus(settings)
    if emulated_recipes.is_rehearsed(recipe.framework, settings):
        outcome = emulated_recipes.rehearsed(recipe.framework, script, folder, environments, cards)
    else:
        outcome = _first_probe(
            emulated_recipes.run_arguments(recipe.framework, script, folder, environments), folder
        )
    versions = emulated_recipes.versions(recipe.framework, environments)
    return {**outcome, "basis": "emulated", "gpus": cards, "versions": versions, "changed": changed}


def probed(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Run the recipe's settings once with a tiny model on a CPU."""
    settings = {}
    for name, value in recipe.settings.items():
        if not name.startswith((*NOT_ON_A_CPU, "model_name", "use_vllm")):
            settings[name] = value
    settings |= {"gradient_accumulation_steps": 1, "reward_funcs": None, "reward_weights": None}
    settings |= (
        {"per_device_train_batch_size": 4, "num_generations": 4} if recipe.method == "grpo" else {}
    )
    settings = {name: value for name, value in settings.items() if value is not None}
    images = (
        ["--image-size", "140x84", "--max-prompt-length", "64"]
        if "VL" in str(recipe.settings.get("model_name_or_path"))
        else []
    )
    model = tiny_model(folder, VISION if images else None)
    if recipe.kind == "script":
        file = folder / "train.py"
        file.write_text(QUICKSTART.replace("MODEL", str(model)))
        arguments = [
            "--script",
            str(file),
            "--gpus",
            "cpu",
            "--memory-limit",
            "4G",
            "--max-probes",
            "1",
            "--budget",
            "5m",
        ]
    else:
        arguments = [
            *_given(recipe, folder, settings),
            "--model",
            str(model),
            *TINY,
            *SHORT[recipe.method],
            *images,
        ]
    return _first_probe(["run", "--out", str(folder / "out"), "--json", *arguments], folder)


def _first_probe(arguments: list[str], folder: Path) -> dict[str, Any]:
    answer = _answered(arguments, folder, ("status", "trials"))
    trials = answer.pop("trials", None) or []
    first = trials[0] if trials else {}
    return {
        **answer,
        **{name: first.get(name) for name in ("outcome", "peak_memory_bytes", "evidence")},
    }


def _given(
    recipe: Recipe,
    folder: Path,
    settings: dict[str, Any],
) -> list[str]:
    """Return the flags with which a user would hand the recipe over."""
    if recipe.kind == "script":
        file = folder / "quickstart.py"
        file.write_text(QUICKSTART.replace("MODEL", str(settings["model_name_or_path"])))
        return ["--script", str(file)]
    if recipe.kind == "config":
        file = folder / "train.yaml"
        file.write_text(yaml.safe_dump(settings))
        return ["--config", str(file), "--method", recipe.method]
    file = folder / "run.sh"
    file.write_text(
        script_of({"framework": recipe.framework, "method": recipe.method, "settings": settings})
    )
    return ["--from-command", str(file), *MORE.get(recipe.name, ())]


def tiny_model(folder: Path, config: Mapping[str, Any] | None) -> Path:
    """Return a tiny model with its tokenizer."""
    return write_model_folder(folder / "model", config or tiny_config(), weights=config is None)


def _environment() -> dict[str, str]:
    """Return this environment with Liger's kernels beside it, where they are installed."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *([str(WITH_LIGER)] if WITH_LIGER.exists() else [])]
        ),
    }


def _answered(
    arguments: list[str],
    folder: Path,
    names: tuple[str, ...],
) -> dict[str, Any]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=SECONDS,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "error": f"not ended after {SECONDS} s"}
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {}
    error = (document.get("error") or {}).get("what") or (
        None if document else done.stderr.strip()[-300:]
    )
    answer = {name: document.get(name) for name in names if name in document}
    return {
        "exit_code": done.returncode,
        "error": error,
        "seconds": round(time.monotonic() - began),
        **answer,
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["| recipe | GPUs | predicted | really run, with tiny shapes |", "|---|---|---|---|"]
    for row in results["rows"]:
        prediction = row["predicted"]
        if prediction.get("peak_memory_bytes"):
            peak = prediction["peak_memory_bytes"]
            verdict = {True: "fits", False: "does not fit", None: "undecided"}[prediction["fits"]]
            verdict_text = (
                f"{verdict}, {format_bytes(peak['value'])} ({format_bytes(peak['low'])} to"
                f" {format_bytes(peak['high'])})"
            )
            verdict_text += " (generic step)" if prediction["basis"] == "generic" else ""
        else:
            verdict_text = str(prediction["error"])
        lines.append(
            f"| {row['name']} | {row['gpus']} | {verdict_text} | {_probe_text(row['probed'])} |"
        )
    return "\n".join(lines)


def _probe_text(probe: dict[str, Any]) -> str:
    if probe.get("outcome") == "ok":
        hardware = (
            f"emulated on {probe['gpus']}"
            if probe.get("basis") == "emulated"
            else "measured on a CPU"
        )
        return f"ran, {format_bytes(probe['peak_memory_bytes'])} {hardware}"
    return str(probe.get("evidence") or probe.get("error") or probe.get("outcome"))[:160]


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("trl", "transformers", "torch", "peft")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="recipes to run; default: all")
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".venvs",
        help="folder with cuda-verl and cuda-swift",
    )
    parser.add_argument("--probe-only", action="store_true", help="keep the stored predictions")
    parser.add_argument("--table", action="store_true", help="print the stored results")
    arguments = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if arguments.table:
        print(table(stored))
        return
    rows = {row["name"]: row for row in stored["rows"]}
    everyone = list(recipes())
    for recipe in everyone:
        if arguments.names and recipe.name not in arguments.names:
            continue
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            row: dict[str, Any] = {
                "name": recipe.name,
                "source": recipe.source,
                "gpus": recipe.gpus,
            }
            earlier = (
                rows[recipe.name]["predicted"]
                if arguments.probe_only and recipe.name in rows
                else None
            )
            row["predicted"] = earlier or predicted(recipe, Path(folder))
            launched = recipe.framework in emulated_recipes.FRAMEWORKS
            place = Path(folder)
            row["probed"] = (
                emulated(recipe, place, arguments.environments)
                if launched
                else probed(recipe, place)
            )
        rows[recipe.name] = row
        print(json.dumps(row), flush=True)
        finished = [rows[recipe.name] for recipe in everyone if recipe.name in rows]
        results = {"machine": machine.facts(_versions()), "rows": finished}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
