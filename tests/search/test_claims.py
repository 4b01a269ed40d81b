"""Claims in a database, file systems on which there can't be one, and a database that waits."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import Engine, update

from autotune.core.errors import BadInput, StorageLost
from autotune.core.secrets import without_password
from autotune.machine.local_files import file_system_of, is_network, refuse_network_storage
from autotune.search import claims as claiming
from autotune.search.claims import MAX_SILENCE_SECONDS, Claims
from autotune.search.database_retry import RetryPolicy
from autotune.search.storage import open_storage


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}")
    return storage.engine  # type: ignore[attr-defined,no-any-return]


def test_one_of_two_gets_it_until_it_is_given_back(engine: Engine) -> None:
    claims = Claims(engine, "s")
    other_claims = Claims(engine, "s")
    assert claims.take("candidate")
    assert not other_claims.take("candidate")
    assert claims.take("candidate"), "asked again after a lost answer, it is still its own"
    assert other_claims.others() == {"candidate"}
    assert claims.others() == frozenset()
    claims.release("candidate")
    assert other_claims.take("candidate")


def test_studies_of_one_database_are_apart(engine: Engine) -> None:
    claims = Claims(engine, "s")
    other_claims = Claims(engine, "t")
    assert claims.take("candidate")
    assert other_claims.take("candidate")
    assert not other_claims.active_drivers
    assert not claims.shared


def test_a_leaving_driver_releases_its_claims_and_stays_on_record(engine: Engine) -> None:
    claims = Claims(engine, "s")
    claims.take("candidate")
    claims.leave()
    claims.leave()
    other_claims = Claims(engine, "s")
    assert other_claims.take("candidate")
    assert other_claims.shared and not other_claims.active_drivers, (
        "it may have told something that is not known here"
    )


def _elsewhere(engine: Engine, driver: Claims, **values: object) -> None:
    with engine.begin() as connection:
        is_driver = claiming._DRIVERS.c.driver == driver.driver
        connection.execute(update(claiming._DRIVERS).where(is_driver).values(**values))


def test_a_terminated_process_of_this_machine_loses_its_claims_at_once(engine: Engine) -> None:
    claims = Claims(engine, "s")
    other_claims = Claims(engine, "s")
    claims.take("candidate")
    assert not other_claims.release_stale()
    _elsewhere(
        engine, claims, process=f"{os.getpid()}:1"
    )  # the number was used again by another process
    assert other_claims.release_stale()
    assert other_claims.take("candidate")


def test_a_silent_driver_of_another_machine_loses_its_claims_by_the_local_clock(
    engine: Engine,
) -> None:
    now = [0.0]
    claims = Claims(engine, "s")
    other_claims = Claims(engine, "s", now=lambda: now[0])
    claims.take("candidate")
    _elsewhere(engine, claims, place="another machine")
    for _ in range(5):  # as long as it beats, it lives
        now[0] += MAX_SILENCE_SECONDS - 1
        assert not other_claims.release_stale()
        claims._beat_at -= 10.0
        claims.beat()
    now[0] += MAX_SILENCE_SECONDS - 1
    assert not other_claims.release_stale()
    now[0] += MAX_SILENCE_SECONDS + 1
    assert other_claims.release_stale()
    assert other_claims.take("candidate")


def test_threads_that_want_the_same_never_both_get_it(engine: Engine) -> None:
    drivers = [Claims(engine, "s", retry=RetryPolicy(url="sqlite://")) for _ in range(4)]
    got: list[str] = []
    threads = [
        threading.Thread(
            target=lambda claims=claims: got.extend(
                name for name in map(str, range(50)) if claims.take(name)
            )
        )
        for claims in drivers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got, key=int) == list(map(str, range(50)))


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/me/disk xfs rw 0 0
mds@tcp:/scratch /scratch lustre rw 0 0
me@host: /mnt/my\\040files fuse.sshfs rw 0 0
overlay /var/lib fuse.fuse-overlayfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/tmp/study.db", "ext4", False),
        ("/home/me/study.db", "nfs4", True),
        ("/home/me/disk/study.db", "xfs", False),
        ("/scratch/x/study.db", "lustre", True),
        ("/mnt/my files/study.db", "fuse.sshfs", True),
        ("/var/lib/study.db", "fuse.fuse-overlayfs", False),
    ],
)
def test_sqlite_on_a_network_file_system_is_refused_with_what_to_use(
    tmp_path: Path,
    path: str,
    kind: str,
    network: bool,
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert file_system_of(Path(path), mounts) == kind
    assert is_network(kind) == network
    if network:
        with pytest.raises(
            BadInput, match=rf"network file system \({kind}\).*sqlite:////tmp.*postgresql"
        ):
            refuse_network_storage(f"sqlite:///{path}", mounts)
    else:
        refuse_network_storage(f"sqlite:///{path}", mounts)
    refuse_network_storage("postgresql://me:secret@host/db", mounts)
    refuse_network_storage("sqlite://", mounts)


def test_this_machine_tells_its_own_file_systems(tmp_path: Path) -> None:
    assert file_system_of(tmp_path) is not None


def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    file, notices = tmp_path / "study.db", list[str]()
    retry = RetryPolicy(
        url=f"sqlite:///{file}",
        seconds=30,
        notify=notices.append,
    )
    study = optuna.create_study(study_name="s", storage=open_storage(f"sqlite:///{file}", retry))
    holder = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    threading.Timer(1.0, lambda: holder.execute("COMMIT")).start()
    began = time.monotonic()
    study.set_user_attr("name", 1)
    assert time.monotonic() - began >= 0.9
    assert study.user_attrs["name"] == 1


def test_a_read_only_database_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    storage = open_storage(f"sqlite:///{file}", RetryPolicy(url=f"sqlite:///{file}", seconds=30))
    study = optuna.create_study(study_name="s", storage=storage)
    from sqlalchemy import event

    event.listen(
        storage.engine,
        "connect",
        lambda connection, record: connection.execute("PRAGMA query_only=ON"),
    )  # type: ignore[attr-defined]
    storage.engine.dispose()  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(StorageLost, match=r"readonly database.*--resume"):
        study.set_user_attr("name", 1)
    assert time.monotonic() - began < 5


def test_a_full_disk_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    storage = open_storage(f"sqlite:///{file}", RetryPolicy(url=f"sqlite:///{file}", seconds=3600))
    study = optuna.create_study(study_name="s", storage=storage)
    fill(storage)
    with pytest.raises(StorageLost, match=r"disk is full.*--resume, after freeing some space"):
        study.set_user_attr("name", "x" * 1_000_000)


def test_a_deleted_database_is_said_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.database_retry.MAX_MISSING_SECONDS", 0.2)
    file = tmp_path / "study.db"
    storage = open_storage(f"sqlite:///{file}", RetryPolicy(url=f"sqlite:///{file}", seconds=3600))
    study = optuna.create_study(study_name="s", storage=storage)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(StorageLost, match=r"was deleted.*record of this user's measurements"):
        study.set_user_attr("name", 1)


def fill(storage: Any) -> None:
    """Make SQLite report a full disk: a bound on the number of pages gives the same error."""
    from sqlalchemy import event

    event.listen(
        storage.engine,
        "connect",
        lambda connection, record: connection.execute("PRAGMA max_page_count=1"),
    )
    storage.engine.dispose()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        (
            "postgresql+psycopg://me:se/c@re:t@host:5432/db",
            "postgresql+psycopg://me:***@host:5432/db",
        ),
        (
            "postgresql://host/db?user=me&password=secret&x=1",
            "postgresql://host/db?user=me&password=***&x=1",
        ),
        ("sqlite:////tmp/study.db", "sqlite:////tmp/study.db"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
