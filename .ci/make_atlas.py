"""Write docs/what-fits-where.md, and a map page for each of the popular pairs: `make atlas`.

The table holds the default GRPO configuration of each model on each hardware, under LoRA, QLoRA
and full tuning: its predicted peak if it surely fits, else the cheapest neutral change that makes
it fit. Everything is predicted from step models, nothing is measured. A cell without one is empty.
Maps take half a minute each, and are written to docs/atlas/, which git ignores.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path

from autotune.api.answers import PredictAnswer
from autotune.api.predictions import predict_flags
from autotune.core.errors import AutotuneError
from autotune.core.space import as_flags
from autotune.core.units import format_bytes
from autotune.report.html.map_page import render_map
from autotune.request.flags import flags_of
from autotune.search.predicted_space import predict_space

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE = DOCS / "what-fits-where.md"
MAPS = DOCS / "atlas"

MODELS = (
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen2.5-7B",
    "Qwen3-0.6B",
    "Qwen3-8B",
    "Llama-3.2-1B",
    "Llama-3.1-8B",
)
HARDWARE = ("RTX4090", "A100-40G", "A100-80G", "H100", "2xA100-80G", "4xH100")
TUNINGS: Mapping[str, Mapping[str, object]] = {
    "LoRA": {"tuning": "lora"},
    "QLoRA": {"tuning": "lora", "set": ("load_in_4bit=true",)},
    "full": {"tuning": "full"},
}
PAIRS = (
    ("Qwen2.5-0.5B", "RTX4090"),
    ("Qwen2.5-1.5B", "RTX4090"),
    ("Qwen2.5-1.5B", "A100-40G"),
    ("Qwen2.5-3B", "A100-40G"),
    ("Qwen2.5-7B", "A100-80G"),
    ("Qwen2.5-7B", "2xA100-40G"),
    ("Qwen2.5-7B", "H100"),
    ("Qwen3-0.6B", "RTX4090"),
    ("Qwen3-8B", "H100"),
    ("Llama-3.2-1B", "RTX4090"),
    ("Llama-3.1-8B", "A100-80G"),
    ("Llama-3.1-8B", "2xH100"),
)


def cell(model: str, gpus: str, tuning: str) -> str:
    """Return the text of one cell of the table."""
    options: dict[str, object] = {"model": model, "gpus": gpus, **TUNINGS[tuning]}
    try:
        answer = predict_flags(flags_of(options))
    except AutotuneError:
        return ""
    return verdict(answer)


def verdict(answer: PredictAnswer) -> str:
    if answer.prediction.fits:
        return format_bytes(answer.prediction.peak_memory_bytes.value)
    for way in answer.ways:
        if not way.learning:
            return f"with `{as_flags(way.change).replace('--set ', '')}`"
    return "not found"


def write_table() -> None:
    lines = [
        "# What fits where",
        "",
        "Predicted, nothing was measured: GRPO with TRL's newest supported release, 16 completions",
        "a prompt, 512 tokens of prompt and 1,024 of completion, global batch 64, LoRA of rank 16.",
        "A cell has the peak per GPU if the default configuration surely fits, else the cheapest",
        "change that makes it fit without an effect on what is learned. `not found`: no such",
        "change that a shipped step model covers. Empty: no step model is shipped. `make atlas`",
        "writes this page, and maps of twelve pairs.",
    ]
    for tuning in TUNINGS:
        lines += ["", f"## {tuning}", ""]
        lines.append(f"| model | {' | '.join(HARDWARE)} |")
        lines.append("|---" * (len(HARDWARE) + 1) + "|")
        for model in MODELS:
            cells = [cell(model, gpus, tuning) for gpus in HARDWARE]
            if any(cells):
                lines.append(f"| {model} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    today = datetime.date.today().isoformat()
    lines += ["", f"Written on {today}."]
    TABLE.write_text("\n".join(lines) + "\n")


def write_maps() -> None:
    MAPS.mkdir(exist_ok=True)
    for model, gpus in PAIRS:
        flags = flags_of({"model": model, "gpus": gpus})
        page = MAPS / f"{model}-{gpus}.html"
        page.write_text(render_map(predict_space(flags), flags))
        print(page, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-maps", action="store_true", help="the table alone")
    options = parser.parse_args()
    write_table()
    if not options.no_maps:
        write_maps()


if __name__ == "__main__":
    main()
