"""GPU benchmark: the claims about GPUs, measured on this machine's: peaks, speeds, real
out-of-memory errors.

Four parts, the most informative first, each within a time limit and in a file of its own under
benchmarks/results/<GPU name>/, with the configuration, versions, date, every measurement, and the
predicted figures next to them. A part that ended early continues when it is started again. Models
are synthetic, in the public shapes: no download.

python benchmarks/gpu.py                                  # all parts, 30 minutes each
    python benchmarks/gpu.py --parts transformers --minutes 25
    python benchmarks/gpu.py --device cpu --tiny --minutes 3
        the very same code, with a tiny model
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_points import POINT, Box, job_of, measure_setups, predict
from gpu_record import Record
from gpu_search import LENGTHS, QUESTION, run_search, tiny_job
from gpu_setups import SETUPS, tiny

ABOUT = {
    "transformers": (
        "peak memory and tokens/s over micro-batch, length and checkpointing; generation by"
        " transformers"
    ),
    "colocated": "the same with vLLM in the training process, its sleep mode on and off",
    "search": (
        "autotune run against the framework's defaults and against doubling the micro-batch by hand"
    ),
    "quantised": "bitsandbytes 4-bit with prompt and completion of 2,500 tokens",
}
MADE_UP = Path(__file__).resolve().parents[1] / "autotune" / "worker" / "synthetic.py"
SHAPE = ("--hidden", "128", "--intermediate", "768", "--layers", "2", "--vocab", "1024")


def main() -> None:
    arguments = _arguments()
    gpus = "cpu" if arguments.device == "cpu" else "local"
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        model = _made_up(Path(folder)) if arguments.tiny else None
        gpu = _gpu(gpus, model)
        out = arguments.out / str(gpu["name"])
        for part in arguments.parts:
            _part(part, gpus, model, gpu, out, arguments)
            print(json.dumps({"part": part, "written": str(out / f"{part}.json")}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(ABOUT),
        help=", ".join(ABOUT),
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="of each part",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a made-up model of under a million parameters"
    )
    parser.add_argument(
        "--only-predict",
        action="store_true",
        help="measure nothing: fill in the predicted figures that lack",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(ABOUT):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(ABOUT)}")
    if arguments.tiny != (arguments.device == "cpu"):
        parser.error(
            "--device cpu and --tiny go together: a real shape takes hours on a CPU, and a tiny one"
            " fills no GPU"
        )
    return arguments


def _part(
    part: str,
    gpus: str,
    model: str | None,
    gpu: dict[str, Any],
    out: Path,
    arguments: argparse.Namespace,
) -> None:
    setups = [] if part == "search" else list(tiny(SETUPS[part], model) if model else SETUPS[part])
    job = tiny_job(model) if model else QUESTION
    config = {
        "setups": [asdict(setup) for setup in setups or [job]],
        "plan": asdict(POINT),
        "minutes": arguments.minutes,
    }
    record, box = (
        Record(
            out / f"{part}.json",
            about=ABOUT[part],
            config=config,
            gpu=gpu,
        ),
        Box(arguments.minutes),
    )
    record.write()
    if arguments.only_predict:
        for setup in setups:
            predict(setup, job_of(setup, gpus), record)
    elif part == "search":
        run_search(job, gpus, record, box, space="demo" if model else None, lengths=_lengths(model))
    else:
        measure_setups(setups, gpus, record, box)
    record.write()


def _lengths(model: str | None) -> tuple[str, ...]:
    return ("max_prompt_length=64", "max_completion_length=128") if model else LENGTHS


def _gpu(gpus: str, model: str | None) -> dict[str, Any]:
    """Return the GPU's name, also as a folder name; on a CPU the folder is `cpu`."""
    if gpus == "cpu":
        return {"name": "cpu", "says": None}
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,compute_cap",
        "--format=csv,noheader",
    ]
    says = (
        subprocess.run(
            query,
            capture_output=True,
            text=True,
            check=True,
        )
        .stdout.strip()
        .splitlines()[0]
    )
    name = says.split(",")[0].removeprefix("NVIDIA ").strip().lower().replace(" ", "-")
    return {"name": name, "says": says}


def _made_up(folder: Path) -> str:
    subprocess.run(
        [sys.executable, MADE_UP, str(folder / "model"), *SHAPE],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return str(folder / "model")


if __name__ == "__main__":
    main()
