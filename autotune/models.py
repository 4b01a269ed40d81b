"""Model names: a local folder, a hub id, or a short name, without a network."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path

from autotune import catalogue
from autotune.errors import BadInput, UnknownName
from autotune.workload import Model

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def find_model(text: str) -> Model:
    """The model that `--model` names. Folders first, then the hub cache, which has the original, then the catalogue."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _local(text, folder)
    if text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        raise BadInput(
            f"There is no folder {text!r}.",
            way_out="Give a folder with config.json, a hub id or a name of `autotune show models`.",
        )
    hub_id = _hub_id(text)
    cached = _cached_folder(hub_id)
    if cached is not None:
        return Model(name=hub_id, config=_config(cached), folder=cached, origin="hub cache")
    for known in catalogue.models():
        if hub_id in known.ids:
            return Model(name=hub_id, config=known.config, folder=None, origin="catalogue")
    raise BadInput(
        f"Model {hub_id!r} is neither in the catalogue nor in this machine's hub cache.",
        way_out=f"Fetch its shape with `hf download {hub_id} config.json`, give a local folder, or see `autotune show models`.",
    )


def has_weights(folder: Path | None) -> bool:
    """Whether a folder holds weights, and not only a config."""
    return folder is not None and any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def short_names() -> dict[str, list[str]]:
    """Short name, lower case, to the hub ids it could mean."""
    names: dict[str, list[str]] = {}
    for hub_id in (hub_id for known in catalogue.models() for hub_id in known.ids):
        names.setdefault(_short(hub_id), []).append(hub_id)
    return names


def _hub_id(text: str) -> str:
    """Hub ids in their own spelling; a short name in the one id that it stands for."""
    ids = {hub_id.lower(): hub_id for known in catalogue.models() for hub_id in known.ids}
    if "/" in text:
        return ids.get(text.lower(), text)
    meant = short_names().get(text.lower(), [])
    if len(meant) == 1:
        return meant[0]
    begins = meant or [hub_id for hub_id in ids.values() if re.match(rf"{re.escape(text.lower())}(?![a-z0-9])", _short(hub_id))]
    if begins:
        raise BadInput(f"{text!r} could be several models.", way_out=f"Say which: {' or '.join(_nearest(text, begins))}.")
    raise UnknownName("model", text, [hub_id.split("/")[1] for hub_id in ids.values()], listing="autotune show models")


def _nearest(text: str, hub_ids: list[str]) -> list[str]:
    names = sorted(hub_id.split("/")[1] for hub_id in hub_ids)
    return difflib.get_close_matches(text, names, n=4, cutoff=0.0) if len(names) > 4 else names


def _short(hub_id: str) -> str:
    return hub_id.split("/", 1)[1].lower()


def _local(text: str, folder: Path) -> Model:
    if not (folder / "config.json").is_file():
        raise BadInput(f"The folder {text!r} holds no config.json.", way_out="Give the folder that `save_pretrained` wrote.")
    return Model(name=text, config=_config(folder), folder=folder.resolve(), origin="local folder")


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}.", way_out="Save or download the model again.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput(f"{path} names no model_type.", way_out="Give a transformers model folder.")
    return config


def _cached_folder(hub_id: str) -> Path | None:
    """The newest snapshot with a config in the hub's own cache layout; no hub library is needed to read it."""
    repo = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    ref = repo / "refs" / "main"
    names = [ref.read_text().strip()] if ref.is_file() else []
    if (repo / "snapshots").is_dir():
        names += [
            entry.name for entry in sorted((repo / "snapshots").iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
        ]
    return next((repo / "snapshots" / name for name in names if (repo / "snapshots" / name / "config.json").is_file()), None)


def hub_cache() -> Path:
    """Where the hub's own library keeps what it fetched."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"
