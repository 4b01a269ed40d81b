"""Write the SHA-256 of the pinned releases' files into constraints files.

`python .ci/constraints/hashes.py FILE...` asks the package index for the releases that the files
pin, and keeps comments and order. It accepts several hashes per pin: one per Python and platform.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path

INDEX = "https://pypi.org/simple/{name}/"
FORMAT = "application/vnd.pypi.simple.v1+json"
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>\S+)")

FOREIGN_SYSTEM = re.compile(
    r"-(?:win32|win_\w+|macosx_\w+|ios_\w+|android_\w+|\w*(?:i686|ppc64le|s390x|armv7l|riscv64|loongarch64))\.whl$"
)
FOREIGN_PYTHON = re.compile(
    r"-(?:cp(?:2\d|3\d|310)-(?!abi3)|cp31\dt?-cp31\dt-|pp\d+-|gp\d+-)|\.(?:exe|egg|msi)$"
)
"""Files that Linux with CPython 3.11 or newer never installs."""


def hashes(name: str, version: str) -> list[str]:
    """Return the digests of the release's files."""
    address = INDEX.format(name=re.sub(r"[-_.]+", "-", name).lower())
    with urllib.request.urlopen(
        urllib.request.Request(address, headers={"Accept": FORMAT}), timeout=60
    ) as answer:
        files = json.load(answer)["files"]
    wanted = [file for file in files if _version(file["filename"], name) == version]
    usable = [
        file
        for file in wanted
        if not FOREIGN_SYSTEM.search(file["filename"])
        and not FOREIGN_PYTHON.search(file["filename"])
    ]
    return sorted(file["hashes"]["sha256"] for file in usable)


def _version(filename: str, name: str) -> str:
    stem = re.sub(r"\.(?:tar\.gz|tar\.bz2|zip)$", "", filename)
    found = re.match(rf"{re.sub(r'[-_.]+', '[-_.]+', name)}-([^-]+)", stem, re.IGNORECASE)
    return found[1] if found else ""


def with_hashes(text: str) -> str:
    """Return the constraints file with the hashes of its pins."""
    lines = []
    for line in re.sub(r" \\\n    --hash=\S+", "", text).splitlines():
        pin = PIN.fullmatch(line)
        found = hashes(pin["name"], pin["version"]) if pin else []
        if pin and not found:
            raise SystemExit(f"{line}: the index has no such file.")
        lines.append(" \\\n    ".join([line, *(f"--hash=sha256:{digest}" for digest in found)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(with_hashes(file.read_text(encoding="utf-8")), encoding="utf-8")
