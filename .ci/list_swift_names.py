"""Lists the names of ms-swift's settings as JSON on stdout.

    python .ci/list_swift_names.py SOURCE VERSION > autotune/frameworks/swift_names.json

SOURCE is ms-swift's own source, which is read as text: fields of its classes of arguments. Those of
transformers and TRL come from the packages of this interpreter. A name outside of this list is said
in an answer to be unknown.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig

FILES = (
    "swift/arguments/*.py",
    "swift/arguments/base_args/*.py",
    "swift/ray_utils/arguments.py",
    "swift/rlhf_trainers/args_mixin.py",
    "swift/rlhf_trainers/arguments.py",
    "swift/trainers/arguments.py",
)


def fields_of(source: Path) -> Iterator[str]:
    """Yield the annotated fields of all classes."""
    for pattern in FILES:
        for file in sorted(source.glob(pattern)):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield from _fields_in(node)


def _fields_in(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def main() -> None:
    source, version = sys.argv[1:]
    names = set(fields_of(Path(source)))
    for owner in (TrainingArguments, GRPOConfig):
        names.update(field.name for field in dataclasses.fields(owner))
    public = sorted(name for name in names if not name.startswith("_"))
    print(json.dumps({"version": version, "names": public}, indent=1))


if __name__ == "__main__":
    main()
