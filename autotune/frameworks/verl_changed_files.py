"""Files of a copy of verl that decide memory here and are no release's.

What such a file does otherwise is not counted: settings are read from the copy's configuration,
and the step is that of the newest release, with the ways of `verl_copies.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autotune.core.user_script import LaunchScript
from autotune.frameworks.fingerprints.nearest_release import compared_copy

ENGINE_SETTING = "actor_rollout_ref.rollout.name"
FILE_OF_EVERY_COPY = "utils/fsdp_utils.py"
"""A package without it has files over an installed verl, and is no copy."""

FOLDER_OF_CONFIGURATION = "trainer/config/"  # read as it stands
OF_ENGINES = {"sglang": "sglang", "vllm": "vllm", "hf_rollout": "hf"}
"""Word of a file's name -> the engine that alone uses it."""

MOST_LISTED_FILES = 6


def about_changed_files(launch: LaunchScript, package: Path) -> Iterator[str]:
    """Yield the sentence about the files that no release of verl has, and no commit between."""
    if not (package / FILE_OF_EVERY_COPY).is_file():
        return
    copy = compared_copy(launch.framework, package)
    if copy is None:
        return
    compared = [file for file in copy.compared if _is_used(file, launch)]
    changed = [file for file in copy.changed if _is_used(file, launch)]
    if not changed:
        return
    nearest = f" {copy.nearest}" if copy.nearest else ""
    yield (
        f"this copy of verl differs from verl{nearest} in {len(changed)} of {len(compared)} files"
        f" that decide memory ({_listed(changed)}): what they change is not counted"
    )


def _is_used(file: str, launch: LaunchScript) -> bool:
    """Return True for code that this launch runs."""
    if file.startswith(FOLDER_OF_CONFIGURATION):
        return False
    if "critic" in file and launch.method != "ppo":
        return False
    stated = launch.stated.get(ENGINE_SETTING)
    engine = (stated.text if stated is not None else None) or "vllm"
    for word, its_engine in OF_ENGINES.items():
        if word in file and its_engine != engine:
            return False
    return True


def _listed(files: list[str]) -> str:
    listed = ", ".join(files[:MOST_LISTED_FILES])
    unlisted = len(files) - MOST_LISTED_FILES
    if unlisted <= 0:
        return listed
    return f"{listed} and {unlisted} more"
