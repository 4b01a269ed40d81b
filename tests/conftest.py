"""Settings of all tests."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from autotune.worker.abandoned_builds import release_abandoned_builds
from tests.light_environment import light_python_path

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(
    "any machine"
)  # how long it takes to think of an example says how busy the machine is

HERE = Path(__file__).parent
OF_RAY = (
    "test_clusters.py",
    "diagnosis/test_provoked.py",
    "cli/test_lost_head.py",
    "executors/test_ray.py",
    "executors/test_contract.py",
    "faults/test_faults.py",
)
"""They start clusters of Ray, and one of them ends every one that there is, as its program for
SLURM does.
"""
TOGETHER = "those of Ray"
LONGEST_FIRST = (
    "emulator/test_frameworks_on_cards.py",
    "e2e/test_demo.py",
    "e2e/test_own_script.py",
    "e2e/test_killed.py",
    "cli/test_predict.py",
    "cli/test_run.py",
    "test_documents_run.py",
    "guard/test_launchers.py",
    "guard/test_may_change.py",
    "counted_memory/test_counted.py",
    "worker/test_methods.py",
    "worker/test_grpo_probe.py",
    "worker/test_vllm_server.py",
    "frameworks/test_trl_files.py",
    "frameworks/test_seen_models.py",
    "neutrality/test_neutral_topology.py",
    "cli/test_solve.py",
    "guard/test_early.py",
    "guard/test_own_script.py",
    "guard/test_requeued.py",
    "guard/test_same_learning.py",
    "guard/test_hangs.py",
    "counted_memory/test_two_ranks.py",
    "e2e/test_soak.py",
    "test_pipelines.py",
)
"""Files of few tests that take a minute or more in CI, and would come last: at the end one process
had work, the other none.
"""
if missing := [file for file in (*OF_RAY, *LONGEST_FIRST) if not (HERE / file).is_file()]:
    raise FileNotFoundError(f"Files that don't exist: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without Python's garbage collector, and hide from it what was collected.

    These are two million objects that stay, and each full collection would visit them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report what is left at the end as leaks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of one file in one process, since they share fixtures, and all tests with Ray
    in one. Begin with what takes longest.

    The scheduler is implemented here because pytest 9 ignores the groups of xdist 3.8.
    """
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc, no-any-unimported]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return TOGETHER if file.removeprefix(f"{HERE.name}/") in OF_RAY else file

        def _assign_work_unit(self, node: Any) -> None:
            longest = [TOGETHER, *[f"{HERE.name}/{file}" for file in LONGEST_FIRST]]
            for scope in longest:
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return Together(config, log)


@pytest.fixture(scope="session")
def data_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield folders that do not exist yet.

    `mktemp` for each of thousands of tests would read thousands of names each time.
    """
    folder = tmp_path_factory.mktemp("data")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(scope="session", autouse=True)
def _no_build_waits_for_a_killed_one() -> None:
    """Some tests start DeepSpeed without a worker, which builds an extension."""
    release_abandoned_builds()


@pytest.fixture(autouse=True)
def _no_test_knows_the_users_store(
    data_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements are kept in the user's data folder; a test has one of its own, and starts
    knowing nothing.
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(next(data_folders)))
    monkeypatch.setenv(
        "HF_HUB_OFFLINE", "1"
    )  # no test asks the hub, but those that name a local one


@pytest.fixture(scope="module")
def light_environment() -> Iterator[None]:
    """Let processes of a file's tests start without vLLM, bitsandbytes and scipy, whose imports
    take seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", light_python_path())
        yield
