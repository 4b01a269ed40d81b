"""Lookup of `--model`: a local folder, a hub id or a short name.

The config.json of a hub id is fetched if nothing here has it, unless the network is absent or
--offline was given. Then the nearest known shape is assumed by the name, and the answer reports it.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import tempfile
import urllib.parse
from dataclasses import replace
from pathlib import Path

from autotune import catalog
from autotune.catalog.assumed_shapes import assumed_model
from autotune.catalog.config_checks import check_sizes
from autotune.core.errors import BadInput, UnknownName, suggestion
from autotune.core.files import read_loose_json, read_text, refuse_special_files
from autotune.core.job import Model
from autotune.core.units import MIB

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
MAX_CONFIG_BYTES = 16 * MIB

# Address of a model's page, or of a file of its main revision.
HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:/(?:(?:tree|blob|resolve|raw)/main(?:/.*)?)?)?(?:[?#].*)?"
)


def find_model(text: str, *, is_of_script: bool = False) -> Model:
    """Find a model: local folder, hub cache (original config), catalogue, then the hub's
    config.json.

    `is_of_script`: a name without a slash may be a folder of the script's author.
    """
    page = HUB_PAGE.fullmatch(text)
    if page is not None:
        text = page["id"]

    # 1. A path.
    folder = Path(text).expanduser()
    if folder.name == "config.json" and folder.is_file():
        folder = folder.parent
        text = str(folder)
    if folder.is_dir():
        return _local_model(text, folder)
    if text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        assumed = assumed_model(text, folder.parts)
        if assumed is None or "://" in text:
            raise _no_folder(text, folder)
        return assumed

    # 2. A name.
    if is_of_script and "/" not in text and text.lower() not in short_names():
        assumed = assumed_model(text, [text])
        if assumed is not None:
            return assumed
    hub_id = _hub_id(text)
    model = (
        _cached_model(hub_id)
        or _catalogued_model(hub_id)
        or _fetched_model(hub_id)
        or assumed_model(hub_id, [_short(hub_id)])
    )
    if model is not None:
        return model
    raise BadInput(
        f"Model {hub_id!r} is neither in the catalogue nor in this machine's hub cache.",
        way_out=(
            f"{suggestion(hub_id, _catalogued_ids())} Fetch its shape with"
            f" `hf download {hub_id} config.json`, give a local folder, or name with --model the"
            " model that it was made from (`autotune show models`)."
        ).lstrip(),
    )


def _local_model(text: str, folder: Path) -> Model:
    refuse_special_files(folder, way_out="Save or download the model again.")
    if not (folder / "config.json").is_file():
        base = _base_of_adapter(folder)
        if base is not None:
            model = find_model(base)
            return replace(model, origin=f"{model.origin}, base of the adapter in {text}")
        raise BadInput(
            f"The folder {text!r} holds no config.json.",
            way_out="Give the folder that `save_pretrained` wrote.",
        )
    return Model(
        name=text,
        config=_config(folder),
        folder=folder.resolve(),
        origin="local folder",
    )


def _no_folder(text: str, folder: Path) -> BadInput:
    return BadInput(
        f"There is no folder {text!r}.",
        way_out=(
            "Name with --model a folder with config.json, a hub id or a name of `autotune show"
            " models`."
        ),
    )


def _cached_model(hub_id: str) -> Model | None:
    folder = _cached_folder(hub_id)
    if folder is None:
        return None
    return Model(
        name=hub_id,
        config=_config(folder),
        folder=folder,
        origin="hub cache",
    )


def _catalogued_model(hub_id: str) -> Model | None:
    model = catalog.model_of_id(hub_id)
    if model is None:
        return None
    return Model(
        name=hub_id,
        config=model.config,
        folder=None,
        origin="catalogue",
    )


def _fetched_model(hub_id: str) -> Model | None:
    content = fetched_config(hub_id)
    if content is None:
        return _base_of_fetched_adapter(hub_id)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_bytes(content)
        config = _config(Path(scratch))
    return Model(
        name=hub_id,
        config=config,
        folder=None,
        origin="config.json fetched from the hub",
    )


def _base_of_fetched_adapter(hub_id: str) -> Model | None:
    """Return the base model of a repository that has an adapter and no config.json."""
    content = fetched_config(hub_id, "adapter_config.json")
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "adapter_config.json").write_bytes(content)
        base = _base_of_adapter(Path(scratch))
    if base is None or base == hub_id:
        return None
    model = find_model(base)
    return replace(
        model,
        name=hub_id,
        origin=f"{model.origin}, base {base} of the adapter",
    )


def _base_of_adapter(folder: Path) -> str | None:
    """Return the base model that the folder's adapter_config.json names."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return None
    adapter = read_loose_json(
        path,
        largest_bytes=MAX_CONFIG_BYTES,
        way_out="Save the adapter again.",
    )
    if not isinstance(adapter, dict):
        return None
    base = adapter.get("base_model_name_or_path")
    if not isinstance(base, str):
        return None
    return base or None


def has_weights(folder: Path | None) -> bool:
    """Return True if the folder contains weights."""
    return folder is not None and any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def short_names() -> dict[str, list[str]]:
    """Return lower-case short name -> hub ids."""
    names: dict[str, list[str]] = {}
    for model in catalog.models():
        for hub_id in model.ids:
            names.setdefault(_short(hub_id), []).append(hub_id)
    return names


def _catalogued_ids() -> list[str]:
    return list(itertools.chain.from_iterable(short_names().values()))


def _hub_id(text: str) -> str:
    """Return the hub id in its own spelling, or the single id of a short name."""
    ids = _catalogued_ids()
    lowered = text.lower()
    if "/" in text:
        for hub_id in ids:
            if hub_id.lower() == lowered:
                return hub_id
        return text
    namesakes = short_names().get(lowered, [])
    if len(namesakes) == 1:
        return namesakes[0]

    # A name of several models, or the beginning of names.
    begins = re.compile(rf"{re.escape(lowered)}(?![a-z0-9])")
    names = []
    similar_names = []
    for hub_id in ids:
        name = hub_id.split("/")[1]
        names.append(name)
        if hub_id in namesakes or (not namesakes and begins.match(_short(hub_id))):
            similar_names.append(name)
    if similar_names:
        raise _ambiguous(text, sorted(similar_names))
    raise UnknownName("model", text, names, listing="autotune show models")


def _ambiguous(text: str, names: list[str]) -> BadInput:
    nearest = names
    if len(names) > 4:
        nearest = difflib.get_close_matches(text, names, n=4, cutoff=0.0)
    choices = " or ".join(nearest)
    return BadInput(f"{text!r} could be several models.", way_out=f"Name one: {choices}.")


def _short(hub_id: str) -> str:
    return hub_id.split("/", 1)[1].lower()


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    config = read_loose_json(
        path, largest_bytes=MAX_CONFIG_BYTES, way_out="Save or download the model again."
    )
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput(f"{path} names no model_type.", way_out="Give a transformers model folder.")
    check_sizes(config, path)
    return config


def _cached_folder(hub_id: str) -> Path | None:
    """Return the newest snapshot with a config in the hub cache, read without the hub library."""
    repo = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    snapshots = repo / "snapshots"
    names = []
    main = repo / "refs" / "main"
    if main.is_file():
        revision = read_text(main, largest_bytes=1024, way_out="Download the model again.")
        names.append(revision.strip())
    if snapshots.is_dir():
        newest_first = sorted(
            snapshots.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True
        )
        names += [entry.name for entry in newest_first]
    for name in names:
        if (snapshots / name / "config.json").is_file():
            return snapshots / name
    return None


def hub_cache() -> Path:
    """Return the cache folder of huggingface_hub."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return caches.expanduser() / "huggingface" / "hub"


ENDPOINT = "https://huggingface.co"
FETCH_TIMEOUT_S = 5.0
MAX_FETCHED_BYTES = 1 << 20  # a config has a few kB
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def stay_offline() -> None:
    """Fetch nothing from now on, in this process and in those that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def fetched_config(hub_id: str, file: str = "config.json") -> bytes | None:
    """Return the text of the model's config.json, or of another file; None offline, without an
    answer, or if it is too large.
    """
    endpoint = hub_endpoint()
    if is_offline() or not endpoint.startswith(("http://", "https://")):
        return None
    from urllib.request import Request, urlopen  # with ssl, longer to load than many answers take

    url = f"{endpoint}/{urllib.parse.quote(hub_id)}/resolve/main/{file}"
    try:
        with urlopen(Request(url), timeout=FETCH_TIMEOUT_S) as answer:
            text: bytes = answer.read(MAX_FETCHED_BYTES + 1)
    except (OSError, ValueError):  # no network, no such model, a gated one
        return None
    if len(text) > MAX_FETCHED_BYTES:
        return None
    return text


def is_offline() -> bool:
    """Return True if a variable says that nothing is fetched."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "on", "yes", "true"):
            return True
    return False
