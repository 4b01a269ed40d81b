"""Known conflicts in an environment, read from traps.yaml and compared with an interpreter.

Versions, requirements, variables and the size of /dev/shm are compared. The interpreter is run to
list them; no package is imported, so that a broken one can be listed too.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from autotune.core.errors import TrainingEnvironmentError
from autotune.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Facts about an interpreter's environment."""

    packages: Mapping[str, str]  # version by canonical package name
    requires: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # that each of these packages declares
    variables: Mapping[str, str] = field(default_factory=dict)
    shm_bytes: int | None = None  # size of /dev/shm, None where it does not exist or can't be read


@dataclass(frozen=True, kw_only=True)
class ActiveTrap:
    """Trap that applies to an environment."""

    name: str
    says: str
    helps: str
    sources: tuple[str, ...]


SECONDS = 60

_ASK = """
import importlib.metadata, json, os, re, sys
packages, requires = {}, {}
for found in importlib.metadata.distributions():
    try:
        name, version = found.metadata["Name"], found.version
    except Exception:
        continue
    if name and version:
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name not in packages:
            packages[name], requires[name] = version, found.requires or []
try:
    shm = os.statvfs("/dev/shm")
    shm_bytes = shm.f_frsize * shm.f_blocks
except OSError:
    shm_bytes = None
print(json.dumps({"packages": packages, "requires": requires, "shm_bytes": shm_bytes}))
"""


def environment_facts(python: Path) -> EnvironmentFacts:
    """Return the facts about an interpreter, with the variables of this process, which a
    training started here would inherit.
    """
    try:
        reported = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, timeout=SECONDS, check=True
        ).stdout
        facts = msgspec.json.decode(reported.strip().splitlines()[-1], type=EnvironmentFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter. Name the training environment's"
            " with --python."
        ) from error
    return replace(facts, variables=dict(os.environ))


class _Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class _GoesWith(_Strict, frozen=True):
    """Rule: `package` MAJOR.N belongs to `of` OF_MAJOR.(N - minor_offset)."""

    package: str
    major: int
    of: str
    of_major: int
    minor_offset: int


class _Extra(_Strict, frozen=True):
    """Requirement that an extra of one package declares for another."""

    of: str
    extra: str
    package: str


class _When(_Strict, frozen=True):
    packages: dict[
        str, str
    ] = {}  # installed ones, each with a range of versions; an empty range is any version
    variables: dict[str, str] = {}  # that are set, each with a regular expression for its value
    unset: tuple[str, ...] = ()
    goes_with: _GoesWith | None = None  # holds where two packages do not belong together
    one_is_cpu_build: tuple[str, str] | None = None
    outside_extra: _Extra | None = None
    broken_requirement_of: tuple[
        str, ...
    ] = ()  # holds where a requirement of one of these packages is not met
    shm_below_bytes: int | None = None


class _Trap(_Strict, frozen=True):
    name: str
    says: str
    helps: str
    sources: tuple[str, ...]
    when: _When


class _TrapsFile(_Strict, frozen=True):
    schema: Literal[1]
    traps: tuple[_Trap, ...]


@functools.cache
def traps() -> tuple[_Trap, ...]:
    import msgspec.yaml

    text = resources.files(__package__).joinpath("traps.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_TrapsFile).traps


def active_traps(around: EnvironmentFacts) -> tuple[ActiveTrap, ...]:
    """Return the traps of which every part of the condition holds, with the values in their
    messages.
    """
    found = []
    for trap in traps():
        words = {name.replace("-", "_"): version for name, version in around.packages.items()}
        for part in _parts(trap.when, around):
            if part is None:
                break
            words |= part
        else:
            says = trap.says.format_map(words)
            found.append(
                ActiveTrap(name=trap.name, says=says, helps=trap.helps, sources=trap.sources)
            )
    return tuple(found)


def _parts(when: _When, around: EnvironmentFacts) -> Iterator[dict[str, str] | None]:
    """Yield for each part of the condition the values to insert, or None where it does not hold."""
    for name, versions in when.packages.items():
        there = _version(around, name)
        yield _if(
            there is not None and SpecifierSet(versions).contains(_public(there), prereleases=True)
        )
    for name, pattern in when.variables.items():
        yield _if(
            name in around.variables and re.search(pattern, around.variables[name]) is not None
        )
    yield from (_if(name not in around.variables) for name in when.unset)
    if when.goes_with is not None:
        yield _mismatch(when.goes_with, around)
    if when.one_is_cpu_build is not None:
        known = [
            version
            for name in when.one_is_cpu_build
            if (version := _version(around, name)) is not None
        ]
        yield _if(len(known) == 2 and (known[0].local == "cpu") != (known[1].local == "cpu"))
    if when.outside_extra is not None:
        yield _outside(when.outside_extra, around)
    if when.broken_requirement_of:
        broken = [
            message for name in when.broken_requirement_of for message in _broken(name, around)
        ]
        yield {"broken": "; ".join(broken)} if broken else None
    if when.shm_below_bytes is not None:
        small = around.shm_bytes is not None and around.shm_bytes < when.shm_below_bytes
        yield (
            {"shm": format_bytes(around.shm_bytes)}
            if small and around.shm_bytes is not None
            else None
        )


def _if(holds: bool) -> dict[str, str] | None:
    return {} if holds else None


def _version(around: EnvironmentFacts, name: str) -> Version | None:
    try:
        return Version(around.packages[canonicalize_name(name)])
    except (KeyError, InvalidVersion):
        return None


def _public(version: Version) -> Version:
    """Return the version without its local part: 2.9.1+cu128 is 2.9.1."""
    return Version(version.public)


def _mismatch(rule: _GoesWith, around: EnvironmentFacts) -> dict[str, str] | None:
    package, of = _version(around, rule.package), _version(around, rule.of)
    if package is None or of is None or (package.major, of.major) != (rule.major, rule.of_major):
        return None
    wanted = package.minor - rule.minor_offset
    return None if wanted == of.minor else {"wanted": str(wanted)}


def _outside(rule: _Extra, around: EnvironmentFacts) -> dict[str, str] | None:
    installed = _version(around, rule.package)
    if installed is None:
        return None
    for requirement in _requirements(rule.of, around, extra=rule.extra):
        if requirement.name == rule.package and not requirement.specifier.contains(
            _public(installed), prereleases=True
        ):
            return {"wanted": f"{requirement.name} {requirement.specifier}"}
    return None


def _broken(name: str, around: EnvironmentFacts) -> Iterator[str]:
    for requirement in _requirements(name, around):
        there, allowed = _version(around, requirement.name), requirement.specifier
        if there is not None and not any(
            allowed.contains(version, prereleases=True) for version in (there, _public(there))
        ):
            installed = around.packages[canonicalize_name(name)]
            yield (
                f"{name} {installed} requires {requirement.name}{allowed}, and {there} is installed"
            )


def _requirements(name: str, around: EnvironmentFacts, extra: str = "") -> Iterator[Requirement]:
    for text in around.requires.get(canonicalize_name(name), ()):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and (not extra or requirement.marker is not None):
            yield requirement
