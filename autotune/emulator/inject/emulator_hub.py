"""No uploads to the Hugging Face hub from a process on emulated cards.

Each upload is replaced by a line on stderr: `--push_to_hub` on the user's own command line can't be
overridden by an environment variable.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from types import ModuleType
from typing import Any

UPLOADS = (
    "create_repo",
    "create_branch",
    "create_tag",
    "create_commit",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
    "preupload_lfs_files",
    "delete_repo",
    "update_repo_settings",
    "add_collection_item",
    "create_collection",
)
"""Methods of `HfApi` that change something on the hub."""


def without_uploads(module: ModuleType) -> None:
    """Replace the methods in `huggingface_hub.hf_api`, and the functions that are bound to them."""
    for name in UPLOADS:
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, _stub(module, name))
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))


def _stub(module: ModuleType, name: str) -> Any:
    """Return a method that writes a line on stderr, and returns what the real one would."""

    def stub(api: Any, *args: Any, **kwargs: Any) -> Any:
        sys.stderr.write(f"autotune: {name} to the hub is off in a rehearsal\n")
        result = _upload_result(module, name, _repository(args, kwargs))
        if not kwargs.get("run_as_future"):
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    return stub


def _repository(args: Any, kwargs: Any) -> Any:
    if kwargs.get("repo_id"):
        return kwargs["repo_id"]
    if args and isinstance(args[0], str):
        return args[0]
    return "rehearsal/model"


def _upload_result(
    module: ModuleType,
    name: str,
    repository: Any,
) -> Any:
    address = f"https://huggingface.co/{repository}"
    if name == "create_repo":
        return module.RepoUrl(address)
    if name in ("create_commit", "upload_file", "upload_folder"):
        return module.CommitInfo(
            commit_url=f"{address}/commit/{'0' * 40}",
            commit_message="rehearsal",
            commit_description="",
            oid="0" * 40,
        )
    return None


HUB = {"huggingface_hub.hf_api": without_uploads}
"""Hooks by module, run after its import."""
