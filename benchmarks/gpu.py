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

from gpu_points import POINT, Box, built, measure_setups, predict
from gpu_record import Record
from gpu_search import LENGTHS, QUESTION, run_search, tiny_job
from gpu_setups import SETUPS, tiny

from autotune.core.units import MIB
from autotune.machine.hardware_detection import gpus_here

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
    gpus = _requested_gpus(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        model = _made_up(Path(folder)) if arguments.tiny else None
        gpu = _gpu(gpus, arguments.gpu)
        out = arguments.out / str(gpu["name"])
        for part in arguments.parts:
            if arguments.only_predict and not (out / f"{part}.json").exists():
                continue  # nothing was measured
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
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="with --only-predict: the card that was measured elsewhere, by its folder's name",
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
    if arguments.gpu is not None and not arguments.only_predict:
        parser.error("--gpu is for --only-predict: measured is the card of this machine")
    if arguments.device == "cuda" and arguments.gpu is None and not gpus_here():
        parser.error(
            "no NVIDIA GPU is visible on this machine; predictions for one that was measured"
            " elsewhere: --only-predict --gpu NAME, like --gpu h100-80gb-hbm3"
        )
    return arguments


def _requested_gpus(arguments: argparse.Namespace) -> str:
    if arguments.device == "cpu":
        return "cpu"
    if arguments.gpu is None:
        return "local"
    return "NVIDIA " + str(arguments.gpu).replace("-", " ")  # as its driver calls it


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
            measures=not arguments.only_predict,
        ),
        Box(arguments.minutes),
    )
    record.write()
    if arguments.only_predict:
        mode = "predict" if arguments.gpu else "probe"
        for setup in setups:
            understood = built(setup, gpus, record, mode=mode)
            if understood is not None:
                predict(setup, understood, record)
    elif part == "search":
        run_search(job, gpus, record, box, space="demo" if model else None, lengths=_lengths(model))
    else:
        measure_setups(setups, gpus, record, box)
    record.write()


def _lengths(model: str | None) -> tuple[str, ...]:
    return ("max_prompt_length=64", "max_completion_length=128") if model else LENGTHS


def _gpu(gpus: str, measured_elsewhere: str | None) -> dict[str, Any]:
    """Return the GPU's name, also as a folder name; on a CPU the folder is `cpu`."""
    if gpus == "cpu" or measured_elsewhere is not None:
        return {"name": measured_elsewhere or "cpu", "says": None}
    device = gpus_here()[0]
    name = device.name.removeprefix("NVIDIA ").strip().lower().replace(" ", "-")
    facts = (
        device.name,
        f"{device.memory_bytes // MIB} MiB",
        device.driver_version,
        device.compute_capability,
    )
    return {"name": name, "says": ", ".join(map(str, facts))}


def _made_up(folder: Path) -> str:
    subprocess.run(
        [sys.executable, MADE_UP, str(folder / "model"), *SHAPE],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return str(folder / "model")


if __name__ == "__main__":
    main()
