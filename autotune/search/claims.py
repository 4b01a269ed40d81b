"""Claims of the drivers that share a study, so that no candidate is measured twice.

A claim is a row with a unique key: of two drivers that insert the same candidate, one succeeds. A
terminated driver loses its claims: on the same machine at once, by its process; elsewhere when its
heartbeat counter stays unchanged for a while on this driver's monotonic clock. Clocks of two
machines are never compared.

Optuna's own heartbeat cannot replace this: it writes wall-clock times of each trial, has no claim
before a trial exists, and detects a killed process on the same machine only after its grace period.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autotune.search.database_retry import RetryPolicy, with_shared_tables

MAX_SILENCE_SECONDS = 60.0  # Silence after which a driver of another machine counts as terminated
HEARTBEAT_SECONDS = 5.0
ENDED_STATES = ("Z", "X")  # States in /proc/PID/stat of a process that has ended
START_FIELD = 19  # The process's start in ticks, among the fields of that file after its name
_META = MetaData()
_DRIVERS = Table(
    "autotune_drivers",
    _META,
    Column("driver", String(64), primary_key=True),
    Column("study", String(512), nullable=False, index=True),
    Column("place", String(256), nullable=False),
    Column("process", String(64), nullable=False),
    Column("words", String(256), nullable=False),
    Column("beats", Integer, nullable=False),
    Column("left", Integer, nullable=False),
)
_CLAIMS = Table(
    "autotune_claims",
    _META,
    Column("study", String(512), primary_key=True),
    Column("what", String(128), primary_key=True),
    Column("driver", String(64), nullable=False),
)


class Claims:
    """Claims of one driver on one study, as rows in the database of Optuna's own."""

    def __init__(
        self,
        engine: Engine,
        study: str,
        *,
        now: Callable[[], float] = time.monotonic,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Register this driver. `retry` repeats calls while the database is locked or away."""
        self._engine = engine
        self._study = study
        self._now = now
        self._do = retry or _patience_with(engine)
        self.driver = uuid.uuid4().hex
        self._last_beats: dict[str, tuple[int, float]] = {}
        """Heartbeat counter of each other driver, and when it was first seen."""
        self._beat_at = now()
        # Conditions of this driver's queries
        of_driver = _DRIVERS.c.driver
        self._my_row = of_driver == self.driver
        of_study = _DRIVERS.c.study == study
        self._other_drivers = of_study & ~self._my_row
        self._of_study = _CLAIMS.c.study == study
        self._mine = _CLAIMS.c.driver == self.driver
        self._do(lambda: _make_tables(engine))
        self._do(self._join)

    # 1. Claims.

    def take(self, claim: str) -> bool:
        """Return False if another driver has it."""
        return self._do(lambda: self._take(claim))

    def _take(self, claim: str) -> bool:
        row = {"study": self._study, "what": claim, "driver": self.driver}
        try:
            statement = insert(_CLAIMS).values(**row)
            self._write(statement)
        except IntegrityError:
            is_claim = self._is_claim(claim)
            own_claim = select(_CLAIMS).where(is_claim, self._mine)
            return bool(self._read(own_claim))
        return True

    def release(self, claim: str) -> None:
        is_claim = self._is_claim(claim)
        own_claim = delete(_CLAIMS).where(is_claim, self._mine)
        self._do(lambda: self._write(own_claim))

    def _is_claim(self, claim: str) -> Any:
        return self._of_study & (_CLAIMS.c.what == claim)

    def candidates_of_others(self) -> frozenset[str]:
        """Return the ids of the candidates that other drivers claim."""
        return frozenset(claim.split()[0] for claim in self.others())

    def others(self) -> frozenset[str]:
        """Return the claims of other drivers."""
        of_others = select(_CLAIMS.c.what).where(self._of_study, ~self._mine)
        claims = self._read(of_others)
        return frozenset(claim.what for claim in claims)

    # 2. Drivers.

    @property
    def shared(self) -> bool:
        """True if another driver ever worked on the study."""
        other_driver = select(_DRIVERS).where(self._other_drivers).limit(1)
        return bool(self._read(other_driver))

    @property
    def active_drivers(self) -> Sequence[Row[Any]]:
        """Rows of the other drivers at work on the study."""
        self.release_stale()
        return self._drivers()

    def release_stale(self) -> bool:
        """Release the claims of terminated drivers; return True if there were any."""
        terminated = [driver for driver in self._drivers() if self._is_terminated(driver)]
        for driver in terminated:
            self._do(partial(self._remove, driver.driver))
        return bool(terminated)

    def beat(self) -> None:
        """Update the heartbeat, if it is due."""
        silence = self._now() - self._beat_at
        if silence < HEARTBEAT_SECONDS:
            return
        self._beat_at = self._now()
        own_row = update(_DRIVERS).where(self._my_row)
        next_beat = _DRIVERS.c.beats + 1
        beat = own_row.values(beats=next_beat, left=0)
        self._do(lambda: self._write(beat))

    def leave(self) -> None:
        """Release everything; repeated calls are allowed."""
        self._do(lambda: self._remove(self.driver))

    def _join(self) -> None:
        row = {
            "driver": self.driver,
            "study": self._study,
            "place": _host_identity(),
            "process": _process_identity(os.getpid()),
            "words": f"process {os.getpid()} on {platform.node()}",
            "beats": 0,
            "left": 0,
        }
        with self._engine.begin() as connection:
            # It is present if only the reply to an earlier try was lost.
            own_row = select(_DRIVERS).where(self._my_row)
            is_recorded = connection.execute(own_row).first() is not None
            if not is_recorded:
                statement = insert(_DRIVERS).values(**row)
                connection.execute(statement)

    def _drivers(self) -> Sequence[Row[Any]]:
        at_work = _DRIVERS.c.left == 0
        statement = select(_DRIVERS).where(self._other_drivers, at_work)
        return self._read(statement)

    def _is_terminated(self, driver: Row[Any]) -> bool:
        if driver.place == _host_identity():
            pid = driver.process.split(":")[0]
            return bool(_process_identity(int(pid)) != driver.process)
        beats, since = self._last_beats.get(driver.driver, (None, 0.0))
        if beats != driver.beats:
            self._last_beats[driver.driver] = (driver.beats, self._now())
            return False
        return self._now() - since > MAX_SILENCE_SECONDS

    def _remove(self, driver: str) -> None:
        is_drivers = _CLAIMS.c.driver == driver
        claims_of_driver = delete(_CLAIMS).where(self._of_study, is_drivers)
        is_driver = _DRIVERS.c.driver == driver
        row_of_driver = update(_DRIVERS).where(is_driver)
        with self._engine.begin() as connection:
            connection.execute(claims_of_driver)
            connection.execute(row_of_driver.values(left=1))

    # 3. Database.

    def _write(self, statement: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)

    def _read(self, statement: Any) -> Sequence[Row[Any]]:
        def read() -> Sequence[Row[Any]]:
            with self._engine.connect() as connection:
                return connection.execute(statement).all()

        return self._do(read)


def delete_claims(engine: Engine, study: str) -> None:
    def delete_both() -> None:
        _make_tables(engine)
        with engine.begin() as connection:
            claims = delete(_CLAIMS).where(_CLAIMS.c.study == study)
            drivers = delete(_DRIVERS).where(_DRIVERS.c.study == study)
            connection.execute(claims)
            connection.execute(drivers)

    _patience_with(engine)(delete_both)


def _patience_with(engine: Engine) -> RetryPolicy:
    return RetryPolicy(url=engine.url.render_as_string(hide_password=False))


def _make_tables(engine: Engine) -> None:
    with_shared_tables(lambda: _META.create_all(engine))


def process_name() -> str:
    """Return a name of this process by which others of the same machine see whether it lives."""
    return f"{_host_identity()} {_process_identity(os.getpid())}"


def has_ended(name: str | None) -> bool:
    """Return True if the process of that name was one of this machine and has ended."""
    host, _, process = (name or "").rpartition(" ")
    if host != _host_identity():
        return False
    pid = process.partition(":")[0]
    return _process_identity(int(pid)) != process


@cache
def _host_identity() -> str:
    """Return the scope of visible process numbers: this boot of this machine, this container,
    this user.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        boot = boot_id.strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return f"{platform.node()} {uuid.uuid4()}"  # equal to no other: judged by heartbeat
    return f"{boot} {namespace} {os.getuid()}"


def _process_identity(pid: int) -> str:
    """Return the process number and its start in kernel ticks, since numbers are reused; of a
    terminated one the number alone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"{pid}:"
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ENDED_STATES:
        return f"{pid}:"
    return f"{pid}:{fields[START_FIELD]}"
