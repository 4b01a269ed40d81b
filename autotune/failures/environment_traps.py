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

    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Requirements that each of these packages declares."""

    variables: Mapping[str, str] = field(default_factory=dict)
    shm_bytes: int | None = None  # size of /dev/shm, None where it does not exist or can't be read


@dataclass(frozen=True, kw_only=True)
class ActiveTrap:
    """Trap that applies to an environment."""

    name: str
    says: str
    helps: str
    sources: tuple[str, ...]


INSPECTION_SECONDS = 60

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
            [str(python), "-c", _ASK],
            capture_output=True,
            timeout=INSPECTION_SECONDS,
            check=True,
        ).stdout
        lines = reported.strip().splitlines()
        facts = msgspec.json.decode(lines[-1], type=EnvironmentFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter. Name the training environment's"
            " with --python."
        ) from error
    variables = dict(os.environ)
    return replace(facts, variables=variables)


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
    """Condition of a trap: all of its parts must hold."""

    packages: dict[str, str] = {}
    """Installed packages, each with a range of versions; an empty range is any version."""

    variables: dict[str, str] = {}
    """Variables that are set, each with a regular expression for its value."""

    unset: tuple[str, ...] = ()  # variables that are not set
    goes_with: _GoesWith | None = None  # holds where two packages do not belong together
    one_is_cpu_build: tuple[str, str] | None = None
    outside_extra: _Extra | None = None

    broken_requirement_of: tuple[str, ...] = ()
    """Holds where a requirement of one of these packages is not met."""

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

    folder = resources.files(__package__)
    text = folder.joinpath("traps.yaml").read_bytes()
    table = msgspec.yaml.decode(text, type=_TrapsFile)
    return table.traps


Insertions = dict[str, str]
"""Values to insert in a trap's message, by name."""

HOLDS: Insertions = {}  # a part of a condition holds, and inserts nothing


def active_traps(facts: EnvironmentFacts) -> tuple[ActiveTrap, ...]:
    """Return the traps of which every part of the condition holds, with the values in their
    messages.
    """
    versions = {}
    for name, version in facts.packages.items():
        versions[name.replace("-", "_")] = version
    active = []
    for trap in traps():
        insertions = _insertions(trap.when, facts)
        if insertions is not None:
            says = trap.says.format_map(versions | insertions)
            active.append(
                ActiveTrap(
                    name=trap.name,
                    says=says,
                    helps=trap.helps,
                    sources=trap.sources,
                )
            )
    return tuple(active)


def _insertions(when: _When, facts: EnvironmentFacts) -> Insertions | None:
    """Return the insertions of all parts, None where one does not hold."""
    insertions: Insertions = {}
    for part in _parts(when, facts):
        if part is None:
            return None
        insertions |= part
    return insertions


def _parts(when: _When, facts: EnvironmentFacts) -> Iterator[Insertions | None]:
    """Yield for each part of the condition the values to insert, or None where it does not hold."""
    for name, versions in when.packages.items():
        installed = _version(facts, name)
        yield _if(_is_within(installed, versions))
    for name, pattern in when.variables.items():
        value = facts.variables.get(name)
        yield _if(value is not None and bool(re.search(pattern, value)))
    for name in when.unset:
        yield _if(name not in facts.variables)
    if when.goes_with is not None:
        yield _mismatch(when.goes_with, facts)
    if when.one_is_cpu_build is not None:
        first = _version(facts, when.one_is_cpu_build[0])
        second = _version(facts, when.one_is_cpu_build[1])
        yield _if(_one_is_cpu_build(first, second))
    if when.outside_extra is not None:
        yield _outside(when.outside_extra, facts)
    if when.broken_requirement_of:
        yield _broken_requirements(when.broken_requirement_of, facts)
    if when.shm_below_bytes is not None:
        yield _small_shm(facts.shm_bytes, when.shm_below_bytes)


def _if(holds: bool) -> Insertions | None:
    return HOLDS if holds else None


def _is_within(version: Version | None, versions: str) -> bool:
    if version is None:
        return False
    public = _public(version)
    return SpecifierSet(versions).contains(public, prereleases=True)


def _one_is_cpu_build(first: Version | None, second: Version | None) -> bool:
    if first is None or second is None:
        return False
    is_first = first.local == "cpu"
    is_second = second.local == "cpu"
    return is_first != is_second


def _broken_requirements(names: tuple[str, ...], facts: EnvironmentFacts) -> Insertions | None:
    messages: list[str] = []
    for name in names:
        messages += _broken(name, facts)
    if not messages:
        return None
    return {"broken": "; ".join(messages)}


def _small_shm(shm_bytes: int | None, least_bytes: int) -> Insertions | None:
    if shm_bytes is None or shm_bytes >= least_bytes:
        return None
    return {"shm": format_bytes(shm_bytes)}


def _version(facts: EnvironmentFacts, name: str) -> Version | None:
    try:
        text = facts.packages[canonicalize_name(name)]
        return Version(text)
    except (KeyError, InvalidVersion):
        return None


def _public(version: Version) -> Version:
    """Return the version without its local part: 2.9.1+cu128 is 2.9.1."""
    return Version(version.public)


def _mismatch(rule: _GoesWith, facts: EnvironmentFacts) -> Insertions | None:
    package = _version(facts, rule.package)
    partner = _version(facts, rule.of)
    if package is None or partner is None:
        return None
    is_same_major = package.major == rule.major and partner.major == rule.of_major
    if not is_same_major:
        return None
    fitting_minor = package.minor - rule.minor_offset
    if partner.minor == fitting_minor:
        return None
    return {"wanted": str(fitting_minor)}


def _outside(rule: _Extra, facts: EnvironmentFacts) -> Insertions | None:
    installed = _version(facts, rule.package)
    if installed is None:
        return None
    requirements = _requirements(rule.of, facts, extra=rule.extra)
    for requirement in requirements:
        if requirement.name != rule.package:
            continue
        public = _public(installed)
        if not requirement.specifier.contains(public, prereleases=True):
            return {"wanted": f"{requirement.name} {requirement.specifier}"}
    return None


def _broken(name: str, facts: EnvironmentFacts) -> Iterator[str]:
    for requirement in _requirements(name, facts):
        required = _version(facts, requirement.name)
        if required is None or _is_met(requirement, required):
            continue
        installed = facts.packages[canonicalize_name(name)]
        requires = f"{requirement.name}{requirement.specifier}"
        yield f"{name} {installed} requires {requires}, and {required} is installed"


def _is_met(requirement: Requirement, version: Version) -> bool:
    """Return True if the version or its public part is allowed."""
    allowed = requirement.specifier
    if allowed.contains(version, prereleases=True):
        return True
    return allowed.contains(_public(version), prereleases=True)


def _requirements(
    name: str,
    facts: EnvironmentFacts,
    extra: str = "",
) -> Iterator[Requirement]:
    package = canonicalize_name(name)
    for text in facts.requires.get(package, ()):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        applies = marker is None or marker.evaluate({"extra": extra})
        if applies and (not extra or marker is not None):
            yield requirement
