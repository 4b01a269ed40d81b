"""Uploads to the Hugging Face hub during a rehearsal: every one is replaced by a line on stderr.

`--push_to_hub` on the user's own command line can't be overridden by an environment variable.
"""

import sys
from concurrent.futures import Future
from types import ModuleType
from typing import Any

UPLOADS = (
    "create_repo", "create_branch", "create_tag", "create_commit", "upload_file", "upload_folder", "upload_large_folder",
    "preupload_lfs_files", "delete_repo", "update_repo_settings", "add_collection_item", "create_collection",
)  # fmt: skip
"""Methods of `HfApi` that change something on the hub."""


def without_uploads(module: ModuleType) -> None:
    """Replace the methods in `huggingface_hub.hf_api`, and the functions that are bound to them."""
    for name in UPLOADS:
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, _stub(module, name))
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))


def _stub(module: ModuleType, name: str) -> Any:
    def stub(api: Any, *words: Any, **named: Any) -> Any:
        repository = named.get("repo_id") or (words[0] if words and isinstance(words[0], str) else "rehearsal/model")
        sys.stderr.write(f"autotune: {name} to the hub is off in a rehearsal\n")
        address = f"https://huggingface.co/{repository}"
        result: Any = None
        if name == "create_repo":
            result = module.RepoUrl(address)
        elif name in ("create_commit", "upload_file", "upload_folder"):
            result = module.CommitInfo(
                commit_url=f"{address}/commit/{'0' * 40}", commit_message="rehearsal", commit_description="", oid="0" * 40
            )
        if not named.get("run_as_future"):
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    return stub


AFTER = {"huggingface_hub.hf_api": without_uploads}
