"""Listed defaults of former releases, against releases that are installed here, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.space import KnobValue
from autotune.frameworks.default_history import default_history
from autotune.frameworks.trl.field_list import fields

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
"""A folder with trl-<version>/ folders, as `make trl-overlays` makes it."""

SHOWN = """
import dataclasses, json, sys
import trl
names = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "reward": "Reward"}
shown = {}
for method, name in names.items():
    values = {}
    for owner in (trl.ModelConfig, getattr(trl, name + "Config")):
        for field in dataclasses.fields(owner):
            default = field.default
            values[field.name] = getattr(default, "value", default)
    shown[method] = {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str))}
print(json.dumps({"version": trl.__version__, "methods": shown}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("release", ["1.0.0", "1.8.0", "newest"])
def test_listed_defaults_are_those_of_the_imported_release(release: str) -> None:
    """The list is parsed from sources; here Python itself makes the fields."""
    environment = dict(os.environ)
    if release != "newest":
        folder = Path(OVERLAYS or "") / f"trl-{release}"
        if not OVERLAYS or not folder.is_dir():
            pytest.skip("needs `make trl-overlays`")
        environment["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=240,
    )
    shown = json.loads(done.stdout.splitlines()[-1])
    history = default_history("trl")
    assert history is not None
    for method, values in shown["methods"].items():
        listed = history.defaults(method, shown["version"])
        for name, value in listed.items():
            assert values.get(name) == value, (method, name)


@pytest.mark.parametrize(
    ("method", "name", "expected"),
    [
        # Read in the releases' own files by hand, at the tags of TRL's repository.
        ("grpo", "beta", {"0.14": 0.04, "0.18": 0.04, "0.19": 0.0, "1.16": 0.0}),
        ("grpo", "max_completion_length", {"0.15": 256, "1.9": 256, "1.10": 512}),
        ("grpo", "gradient_checkpointing", {"0.21": False, "0.22": True}),
        ("grpo", "bf16", {"0.18": False, "0.19": None}),
        ("grpo", "vllm_mode", {"0.17": "server", "0.29": "server", "1.0": "colocate"}),
        ("dpo", "max_length", {"0.12": 512, "0.14": 1024, "1.16": 1024}),
        ("sft", "optim", {"0.9": "adamw_torch", "1.0": "adamw_torch_fused"}),
    ],
)
def test_defaults_read_by_hand(
    method: str,
    name: str,
    expected: dict[str, KnobValue],
) -> None:
    history = default_history("trl")
    assert history is not None
    for release, value in expected.items():
        assert history.defaults(method, release)[name] == value, release


def test_the_newest_column_is_the_modelled_release() -> None:
    history = default_history("trl")
    assert history is not None
    for method in history.methods:
        modelled = fields(method)
        for name, value in history.defaults(method, history.newest).items():
            assert modelled[name].default == value, (method, name)


@pytest.mark.parametrize(
    ("names", "release"),
    [
        ({"beta", "num_generations"}, None),  # every release has them
        ({"max_prompt_length"}, "0.27"),
        ({"max_prompt_length", "vllm_device"}, "0.17"),
        ({"max_prompt_length", "vllm_mode"}, "0.27"),
        ({"vllm_device", "vllm_mode"}, None),  # no release has both
        ({"a_key_of_the_author"}, None),
    ],
)
def test_the_newest_release_with_all_names(names: set[str], release: str | None) -> None:
    history = default_history("trl")
    assert history is not None
    newest = history.newest_with("grpo", names, {})
    minor_release = None if newest is None else ".".join(newest[0].split(".")[:2])
    assert minor_release == release


def test_a_framework_installs_with_the_other_package() -> None:
    """TRL 0.18 asks for transformers 4.50 (its metadata)."""
    history = default_history("trl")
    assert history is not None
    newest = history.newest_with("sft", set(), {"transformers": "4.49.0"})
    assert newest is not None
    assert newest[0].startswith("0.17.")


def test_lists_are_small() -> None:
    for file in Path(sys.modules[default_history.__module__].__file__ or "").parent.glob(
        "default_histories/*.json"
    ):
        assert file.stat().st_size < 50_000, file.name
