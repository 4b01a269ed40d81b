"""Whole logs around a failure, as launchers, ranks, progress bars and wrappers make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SAMPLES = Path(__file__).resolve().parents[1] / "failures" / "samples"
NAMES = sorted(file.stem for file in SAMPLES.iterdir())

START = """\
W1120 18:13:52.101000 23290 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process to be 1
The attention mask and the pad token id were not set. As a consequence, you may observe unexpected behavior.
/usr/lib/python3.11/site-packages/torch/nn/utils/clip_grad.py: clip_grad_norm_(max_norm=1.0, error_if_nonfinite=False)
INFO 11-20 18:13:58 [core.py:58] Initializing a V1 LLM engine with config: an OOM-safe mode, gpu_memory_utilization=0.3
WARNING 11-20 18:13:59 [arg_utils.py:1] heads must be divisible by 8 for the fast kernel; falling back
Loading checkpoint shards:   0%|          | 0/2 [00:00<?, ?it/s]\rLoading checkpoint shards: 100%|##########| 2/2 [00:01<00:00]
[rank0]:[W1120 18:14:00.000000001 ProcessGroupNCCL.cpp:5023] Warning: a connection reset by peer is retried (NCCL error)
\x1b[32m{'loss': 0.0123, 'grad_norm': 0.5, 'reward': 0.25, 'step_time': 1.5}\x1b[0m
  1%|          | 1/500 [00:02<16:38,  2.00s/it]\r  1%|1         | 2/500 [00:04<16:36,  2.00s/it]
"""

FRAMES = """\
Traceback (most recent call last):
  File "/job/train.py", line 41, in <module>
    trainer.train()
  File "/venv/lib/python3.11/site-packages/transformers/trainer.py", line 2325, in train
    return inner_training_loop(
           ^^^^^^^^^^^^^^^^^^^^
"""

FORWARD = """\
  File "/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 2400, in compute_loss
    return self._compute_loss(model, inputs)
  File "/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 1440, in _get_per_token_logps_and_entropies
    logits = model(**model_inputs).logits
"""

LATER = """\
[rank{other}]: Traceback (most recent call last):
[rank{other}]:   File "/job/train.py", line 41, in <module>
[rank{other}]:     trainer.train()
[rank{other}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18330.
[rank{other}]:[E1120 18:24:01.2 ProcessGroupNCCL.cpp:754] [Rank {other}] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=305, OpType=ALLREDUCE) ran for 600381 milliseconds before timing out.
W1120 18:24:02.000000 23290 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 23302 closing signal SIGTERM
E1120 18:24:03.000000 23290 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: {rank} \
(pid: 23301) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_18:24:00
  host      : localhost
  rank      : {other} (local_rank: {other})
  exitcode  : -9 (pid: 23302)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 23302
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_18:14:00
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 23301)
  error_file: <N/A>
============================================================
"""


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


def alone(text: str) -> str:
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
    return alone(text).replace("\n", "\r\n")


def in_containers(text: str) -> str:
    return prefixed("trainer-1  | ", raised(text)) + "trainer-1 exited with code 1\n"


SHAPES: dict[str, Callable[[str], str]] = {
    "alone": alone,
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
