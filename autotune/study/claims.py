"""Who measures what: claims of the drivers that work on one study, so that no candidate is measured by two of them.

A claim is a row whose key the database keeps unique, so of two drivers that want a candidate at the same moment one
gets it. A driver that ended without a word loses its claims: on the same machine that is seen at once, by the process; elsewhere
when it has not been heard of for a while, by our own clock that only runs forward. No two machines' clocks are compared.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

Found = TypeVar("Found")

SILENT_SECONDS = 60.0
"""A driver of another machine that was not heard of for so long is gone."""

BEAT_SECONDS = 5.0
"""How often a driver says that it is there."""

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


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Another one, as its row says."""

    name: str
    place: str
    process: str
    words: str
    beats: int


class Claims(Protocol):
    """One driver's, on one study."""

    driver: str
    """By what name others know this one; empty where nobody could."""

    def take(self, what: str) -> bool:
        """False where another driver has it."""
        ...

    def give_back(self, what: str) -> None: ...

    def bury(self) -> bool:
        """Free what drivers had claimed that are gone; whether there was any."""
        ...

    def others(self) -> frozenset[str]:
        """What others have claimed."""
        ...

    @property
    def shared(self) -> bool:
        """Whether anybody else ever worked on the study, so that it may hold more than this driver knows."""
        ...

    @property
    def living(self) -> Sequence[Driver]:
        """Other drivers that are at work on the study."""
        ...

    def beat(self) -> None:
        """Say that this driver is there; may be called as often as one likes."""
        ...

    def leave(self) -> None:
        """Give everything back. May be called twice."""
        ...


class NoOthers:
    """Where nobody else can come: a study in this process's own memory."""

    driver = ""
    shared = False
    living: Sequence[Driver] = ()

    def take(self, what: str) -> bool:
        return True

    def give_back(self, what: str) -> None: ...

    def bury(self) -> bool:
        return False

    def others(self) -> frozenset[str]:
        return frozenset()

    def beat(self) -> None: ...

    def leave(self) -> None: ...


class SharedClaims:
    """Rows beside Optuna's own, in the same database."""

    def __init__(
        self,
        engine: Engine,
        study: str,
        *,
        now: Callable[[], float] = time.monotonic,
        patiently: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> None:
        """Joins: from here on others see this driver. `patiently` calls again what a lost database interrupted."""
        self._engine, self._study, self._now, self._patiently = engine, study, now, patiently
        self.driver = uuid.uuid4().hex
        self._heard: dict[str, tuple[int, float]] = {}
        self._said = now()
        self._do(lambda: _make_tables(engine))
        self._do(self._join)

    def take(self, what: str) -> bool:
        return self._do(lambda: self._take(what))

    def give_back(self, what: str) -> None:
        mine = (_CLAIMS.c.study == self._study) & (_CLAIMS.c.what == what) & (_CLAIMS.c.driver == self.driver)
        self._do(lambda: self._write(delete(_CLAIMS).where(mine)))

    def bury(self) -> bool:
        gone = [driver for driver in self._drivers() if self._is_gone(driver)]
        for driver in gone:
            self._do(partial(self._forget, driver.name))
        return bool(gone)

    def others(self) -> frozenset[str]:
        claimed = select(_CLAIMS.c.what).where((_CLAIMS.c.study == self._study) & (_CLAIMS.c.driver != self.driver))
        return frozenset(what for (what,) in self._read(claimed))

    @property
    def shared(self) -> bool:
        others = select(_DRIVERS.c.driver).where((_DRIVERS.c.study == self._study) & (_DRIVERS.c.driver != self.driver))
        return bool(self._read(others.limit(1)))

    @property
    def living(self) -> tuple[Driver, ...]:
        """Other drivers that are at work on the study."""
        self.bury()
        return tuple(self._drivers())

    def beat(self) -> None:
        if self._now() - self._said >= BEAT_SECONDS:
            self._said = self._now()
            mine = _DRIVERS.c.driver == self.driver
            self._do(lambda: self._write(update(_DRIVERS).where(mine).values(beats=_DRIVERS.c.beats + 1, left=0)))

    def leave(self) -> None:
        self._do(lambda: self._forget(self.driver))

    def _join(self) -> None:
        row = {
            "driver": self.driver, "study": self._study, "place": _place(), "process": _process(os.getpid()),
            "words": f"process {os.getpid()} on {platform.node()}", "beats": 0, "left": 0,
        }  # fmt: skip
        here = select(_DRIVERS.c.driver).where(_DRIVERS.c.driver == self.driver)
        with self._engine.begin() as connection:
            if connection.execute(here).first() is None:  # it is there where only the answer was lost
                connection.execute(insert(_DRIVERS).values(**row))

    def _take(self, what: str) -> bool:
        row = {"study": self._study, "what": what, "driver": self.driver}
        try:
            self._write(insert(_CLAIMS).values(**row))
        except IntegrityError:
            owner = select(_CLAIMS.c.driver).where((_CLAIMS.c.study == self._study) & (_CLAIMS.c.what == what))
            return any(driver == self.driver for (driver,) in self._read(owner))
        return True

    def _drivers(self) -> list[Driver]:
        columns = (_DRIVERS.c.driver, _DRIVERS.c.place, _DRIVERS.c.process, _DRIVERS.c.words, _DRIVERS.c.beats)
        there = (_DRIVERS.c.study == self._study) & (_DRIVERS.c.left == 0) & (_DRIVERS.c.driver != self.driver)
        rows = self._read(select(*columns).where(there))
        return [Driver(name=row[0], place=row[1], process=row[2], words=row[3], beats=row[4]) for row in rows]

    def _is_gone(self, driver: Driver) -> bool:
        if driver.place == _place():
            return _process(int(driver.process.split(":")[0])) != driver.process
        beats, since = self._heard.get(driver.name, (None, 0.0))
        if beats != driver.beats:
            self._heard[driver.name] = (driver.beats, self._now())
            return False
        return self._now() - since > SILENT_SECONDS

    def _forget(self, driver: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(_CLAIMS).where((_CLAIMS.c.study == self._study) & (_CLAIMS.c.driver == driver)))
            connection.execute(update(_DRIVERS).where(_DRIVERS.c.driver == driver).values(left=1))

    def _write(self, statement: object) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)  # type: ignore[call-overload]

    def _read(self, statement: object) -> list[tuple[Any, ...]]:
        def read() -> list[tuple[Any, ...]]:
            with self._engine.connect() as connection:
                return [tuple(row) for row in connection.execute(statement)]  # type: ignore[call-overload]

        return self._do(read)

    def _do(self, call: Callable[[], Found]) -> Found:
        return self._patiently(call)  # type: ignore[return-value]


def forget_claims(engine: Engine, study: str) -> None:
    """The study is thrown away, and with it who worked on it."""
    _make_tables(engine)
    with engine.begin() as connection:
        connection.execute(delete(_CLAIMS).where(_CLAIMS.c.study == study))
        connection.execute(delete(_DRIVERS).where(_DRIVERS.c.study == study))


def _make_tables(engine: Engine) -> None:
    try:
        _META.create_all(engine)
    except (IntegrityError, OperationalError, ProgrammingError):  # two drivers made them at the same moment
        _META.create_all(engine)


@cache
def _place() -> str:
    """Where process numbers mean the same, and are ours to see: this boot of this machine, in this container, as this user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return f"{platform.node()} {uuid.uuid4()}"  # equal to no other: heard of, or gone


def _process(pid: int) -> str:
    """The number and when it began, in the kernel's own ticks: numbers are used again. Of one that is gone, the number alone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{pid}:"
    return f"{pid}:" if fields[0] in ("Z", "X") else f"{pid}:{fields[19]}"
