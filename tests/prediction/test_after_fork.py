"""A prediction in a forked process: threads of the parent do not exist there."""

from __future__ import annotations

import subprocess
import sys

SECONDS = 120  # much longer than two predictions take

PROGRAM = f"""
import os, signal, sys
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources

def predict(gpus):
    flags = flags_of({{"model": "Qwen2.5-0.5B", "gpus": gpus}})
    request = read_sources(flags, mode="predict").parse(limit_prompts=True)
    service = open_prediction_service(request.job, request.trainer, traces=False)
    assert service.predict(candidate_of_job(request)).fits

predict("A100-40G")
child = os.fork()
if child == 0:
    signal.alarm({SECONDS})  # ends a child that waits for ever
    predict("H100")
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_predicts_after_its_parent_did() -> None:
    """A thread pool of a module would take the child's work, and its thread is the parent's."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=2 * SECONDS, check=False)
    assert done.returncode == 0
