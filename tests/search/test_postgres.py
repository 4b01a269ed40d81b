"""Study with several drivers on a real PostgreSQL server that stops and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from autotune.core.errors import BadInput, StorageLost
from autotune.request.resources import storage_url
from autotune.search.database_retry import RetryPolicy
from autotune.search.storage import open_storage
from autotune.search.study_export import packed, unpack
from tests.search.postgres import PASSWORD, Server, installed, server

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        installed("initdb") is None,
        reason="PostgreSQL's server is not installed: apt-get install postgresql",
    ),
]

ROOT = str(Path(__file__).parents[2])
DRIVER = Path(__file__).parent / "one_driver.py"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with server() as running:
        yield running


def driver(
    url: str,
    study: str,
    folder: Path,
    name: str,
    *,
    seconds: float = 0.15,
    resume: bool = True,
) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "XDG_DATA_HOME": str(folder / "data")}
    command = [
        sys.executable,
        str(DRIVER),
        url,
        study,
        str(folder / f"{name}.log"),
        str(seconds),
        "resume" if resume else "new",
    ]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> dict[str, object]:
    output, wrong = process.communicate(timeout=200)
    assert process.returncode == 0, wrong
    assert PASSWORD not in output + wrong
    return dict(json.loads(output.splitlines()[-1]))


def measured(folder: Path, *names: str) -> Counter[str]:
    """Candidates by how often their measuring was begun, over these drivers."""
    lines = []
    for name in names:
        lines.extend((folder / f"{name}.log").read_text().splitlines())
    return Counter(line.split()[1] for line in lines if line.startswith("short"))


def trials_of(url: str, study: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=study, storage=open_storage(url)).get_trials()


def wait_for_lines(file: Path, count: int) -> None:
    until = time.monotonic() + 60
    while not (file.exists() and len(file.read_text().splitlines()) >= count):
        assert time.monotonic() < until, f"{file.name} never had {count} lines"
        time.sleep(0.02)


def test_three_drivers_share_a_study_and_measure_nothing_twice(
    postgres: Server, tmp_path: Path
) -> None:
    names = ("one", "two", "three")
    running = [driver(postgres.url, "shared", tmp_path, name) for name in names]
    answers = [ended(process) for process in running]
    assert len({answer["winner"] for answer in answers}) == 1
    counts = measured(tmp_path, *names)
    assert counts
    assert max(counts.values()) == 1
    assert sum(bool(measured(tmp_path, name)) for name in names) >= 2, "all was done by one"
    long_probes = []
    for name in names:
        for line in (tmp_path / f"{name}.log").read_text().splitlines():
            if line.startswith("long"):
                long_probes.append(line)
    assert len(long_probes) == len({line.split(maxsplit=1)[1] for line in long_probes}), (
        "a turn of a finalist was measured twice"
    )
    for trial in trials_of(postgres.url, "shared"):
        assert trial.state.is_finished()


def test_a_killed_drivers_candidates_go_to_the_other_and_the_study_resumes(
    postgres: Server, tmp_path: Path
) -> None:
    # So slow that it still measures when the second has started, on a busy machine too.
    first = driver(postgres.url, "killed", tmp_path, "first", seconds=3.0)
    wait_for_lines(tmp_path / "first.log", 2)
    second = driver(postgres.url, "killed", tmp_path, "second", seconds=0.2)
    wait_for_lines(tmp_path / "second.log", 1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    answer = ended(second)
    assert answer["winner"] is not None
    counts = measured(tmp_path, "first", "second")
    assert sum(count > 1 for count in counts.values()) <= 1, (
        "only what was in the killed one's hands is measured again"
    )
    again = ended(driver(postgres.url, "killed", tmp_path, "third"))
    assert again["winner"] == answer["winner"]
    assert not measured(tmp_path, "third")
    for trial in trials_of(postgres.url, "killed"):
        assert trial.state.is_finished()


def test_a_server_that_is_away_for_a_while_is_waited_for(postgres: Server, tmp_path: Path) -> None:
    running = driver(postgres.url, "away", tmp_path, "only", seconds=0.3)
    wait_for_lines(tmp_path / "only.log", 3)
    postgres.stop(signal.SIGQUIT)
    time.sleep(5.0)
    postgres.start()
    answer = ended(running)
    assert answer["winner"] is not None
    assert max(measured(tmp_path, "only").values()) == 1
    assert any(
        "does not answer" in str(note) and "waiting" in str(note) for note in answer["notes"]
    )  # type: ignore[attr-defined]
    measured_trials = []
    for trial in trials_of(postgres.url, "away"):
        if "measurement" in trial.user_attrs:
            measured_trials.append(trial)
    assert len(measured_trials) == answer["trials"]


def test_a_server_that_does_not_come_back_is_reported_in_one_sentence() -> None:
    with server() as gone:
        storage = open_storage(gone.url, RetryPolicy(url=gone.url, seconds=1.0))
        study = optuna.create_study(study_name="gone", storage=storage)
        gone.stop()
        with pytest.raises(
            StorageLost, match=r"tuner:\*\*\*@.*can't be used any more .*--resume"
        ) as error:
            study.set_user_attr("name", 1)
        assert PASSWORD not in str(error.value)
        gone.start()
        study.set_user_attr("name", 2)


def test_thousands_of_writes_from_threads_that_all_share_the_database(postgres: Server) -> None:
    from autotune.search.claims import Claims

    engine = open_storage(postgres.url).engine  # type: ignore[attr-defined]
    drivers = [Claims(engine, "claims") for _ in range(4)]
    got: list[str] = []

    def take(claims: Claims) -> None:
        got.extend(name for name in map(str, range(200)) if claims.take(name))

    threads = [threading.Thread(target=take, args=(claims,)) for claims in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got, key=int) == [str(number) for number in range(200)]


def test_a_study_moves_from_sqlite_to_the_server(postgres: Server, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    answer = ended(driver(url, "moves", tmp_path, "here"))
    unpack(packed(url, "moves"), postgres.url, "moves")
    again = ended(driver(postgres.url, "moves", tmp_path, "there"))
    assert again["winner"] == answer["winner"]
    assert not measured(tmp_path, "there")


def test_a_wrong_password_is_not_printed(postgres: Server) -> None:
    with pytest.raises(BadInput) as error:
        open_storage(postgres.url.replace(PASSWORD, "battery/staple"))
    assert "battery" not in str(error.value)
    assert "staple" not in str(error.value)


@pytest.mark.parametrize("source", ["PGPASSFILE", "PGPASSWORD", "--storage-file"])
def test_a_password_comes_from_a_file_or_the_environment(
    postgres: Server,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = postgres.url.replace(f":{PASSWORD}@", "@")
    file = tmp_path / "secret"
    with pytest.raises(BadInput, match=r"no password supplied.*PGPASSFILE"):
        open_storage(url)
    if source == "PGPASSWORD":
        monkeypatch.setenv(source, PASSWORD)
    elif source == "PGPASSFILE":
        monkeypatch.setenv(source, str(file))
        file.write_text(f"127.0.0.1:{postgres.port}:*:tuner:{PASSWORD}\n")
        file.chmod(0o600)
    else:
        file.write_text(f"{postgres.url}\n")
        url = storage_url(None, str(file)) or ""
    assert open_storage(url).get_all_studies() is not None
