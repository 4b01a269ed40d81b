"""Whole logs around a failure, as launchers, ranks, progress bars and wrappers make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SAMPLES = Path(__file__).resolve().parents[1] / "failures" / "samples"
NAMES = sorted(file.stem for file in SAMPLES.iterdir())

START = (Path(__file__).parent / "around/start.log").read_text()

FRAMES = """\
Traceback (most recent call last):
  File "/job/train.py", line 41, in <module>
    trainer.train()
  File "/venv/lib/python3.11/site-packages/transformers/trainer.py", line 2325, in train
    return inner_training_loop(
           ^^^^^^^^^^^^^^^^^^^^
"""

FORWARD = (Path(__file__).parent / "around/forward.log").read_text()

LATER = (Path(__file__).parent / "around/later.log").read_text()


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text().partition("\n")[2].strip("\n")


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def raised(text: str, frames: str = FRAMES) -> str:
    """The text below a traceback, unless it brings its own frames or is no exception at all."""
    if text.lstrip().startswith('File "'):
        return f"{frames}  {text}\n"
    is_exception = text.split(":")[0].endswith(
        ("Error", "Exception", "LimitForeseen", "OutOfResources")
    )
    if text.startswith("    prompts = "):
        return (
            f'{frames}  File "/venv/lib/trl/trainer/grpo_trainer.py", line 1, in'
            f" _generate_and_score_completions\n{text}\n"
        )
    return f"{frames}{text}\n" if is_exception else f"{text}\n"


def on_one_process(text: str) -> str:
    return START + raised(text)


def on_rank_1(text: str) -> str:
    body = raised(text) if not text.startswith("[rank") else text
    return (
        START
        + (prefixed("[rank1]: ", body) if not text.startswith("[rank") else f"{body}\n")
        + LATER.format(other=0, rank=1)
    )


def by_default_prefix(text: str) -> str:
    return prefixed("[default0]:", START) + prefixed("[default3]:", raised(text))


def in_ray(text: str) -> str:
    wrapper = (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    )
    return (
        prefixed("(main_task pid=77) ", START)
        + prefixed("(WorkerDict pid=4711, ip=10.0.0.2) ", raised(text))
        + FRAMES
        + wrapper
    )


def in_engine(text: str) -> str:
    engine = prefixed("(EngineCore_DP0 pid=812) ERROR 11-20 18:14:10 [core.py:700] ", raised(text))
    return START + engine + FRAMES + sample("engine_wrapper") + "\n"


def under_srun(text: str) -> str:
    return (
        prefixed("0: ", START)
        + prefixed("2: ", raised(text))
        + "srun: error: node7: task 2: Exited with exit code 1\n"
    )


def on_windows(text: str) -> str:
    return on_one_process(text).replace("\n", "\r\n")


def in_containers(text: str) -> str:
    return prefixed("trainer-1  | ", raised(text)) + "trainer-1 exited with code 1\n"


SHAPES: dict[str, Callable[[str], str]] = {
    "alone": on_one_process,
    "on_rank_1": on_rank_1,
    "by_default_prefix": by_default_prefix,
    "in_ray": in_ray,
    "in_engine": in_engine,
    "under_srun": under_srun,
    "on_windows": on_windows,
}
RANKS = {
    "alone": None,
    "on_rank_1": 1,
    "by_default_prefix": 3,
    "in_ray": None,
    "in_engine": None,
    "under_srun": 2,
    "on_windows": None,
}
