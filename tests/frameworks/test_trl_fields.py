"""The static list of TRL's keys against the TRL that is installed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks.trl.field_list import _field_list, accelerate_options, fields
from autotune.frameworks.trl.former_keys import former_keys
from autotune.frameworks.trl.grpo_config_rules import ENUMERATIONS
from autotune.frameworks.trl.legality import GRPO_LOSSES

SCRIPT = Path(__file__).parents[2] / ".ci" / "list_trl_fields.py"


def known_names(listing: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys that are read under another name: those of a transformers that is newer
    than the pinned one.
    """
    current = {
        name: facts
        for name, facts in listing["fields"].items()
        if name not in former_keys().renamed
    }
    return {**listing, "fields": current}


OTHER_METHODS = ("rloo", "sft", "dpo", "kto", "reward", "online-dpo", "async-grpo")


@pytest.fixture(scope="module")
def listings() -> dict[str, dict[str, Any]]:
    """Lists of all methods, from one interpreter: importing TRL is most of the time."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--methods", "grpo", *OTHER_METHODS],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    printed = json.loads(done.stdout.splitlines()[-1])
    return {method: known_names(listing) for method, listing in printed.items()}


@pytest.fixture(scope="module")
def installed(listings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return listings["grpo"]


@pytest.mark.slow
def test_every_key_of_the_installed_trl_is_listed(installed: dict[str, Any]) -> None:
    missing = set(installed["fields"]) - set(fields())
    assert not missing, f"run {SCRIPT.name} for TRL {installed['versions']} and merge it in"
    assert set(installed["accelerate"]) <= accelerate_options()


@pytest.mark.slow
def test_nothing_is_listed_that_the_installed_trl_lacks(installed: dict[str, Any]) -> None:
    if installed["versions"][0] not in _field_list("grpo").versions:
        pytest.skip(f"TRL {installed['versions'][0]} is between the listed versions")
    expected = {
        name
        for name, field in fields().items()
        if not field.versions or installed["versions"][0] in field.versions
    }
    assert expected == set(installed["fields"])


@pytest.mark.slow
def test_the_newest_versions_kinds_and_defaults_are_the_listed_ones(
    installed: dict[str, Any],
) -> None:
    if installed["versions"][0] != _field_list("grpo").versions[-1]:
        pytest.skip("the newest listed TRL is not the installed one")
    for name, facts in installed["fields"].items():
        listed = fields()[name]
        assert (listed.owner, list(listed.kinds), listed.default) == (
            facts["of"],
            facts["kinds"],
            facts["default"],
        ), name
        assert list(listed.choices) == facts.get("choices", []), name


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_the_other_methods_lists_are_the_installed_trls(
    method: str, listings: dict[str, dict[str, Any]]
) -> None:
    installed = listings[method]
    if installed["versions"][0] != _field_list("grpo").versions[-1]:
        pytest.skip("the newest listed TRL is not the installed one")
    listed = {
        name: field
        for name, field in fields(method).items()
        if not field.versions or installed["versions"][0] in field.versions
    }
    assert set(listed) == set(installed["fields"])
    for name, facts in installed["fields"].items():
        assert (listed[name].owner, list(listed[name].kinds), listed[name].default) == (
            facts["of"],
            facts["kinds"],
            facts["default"],
        )


def test_enumerations_have_their_choices() -> None:
    assert all(fields()[name].choices for name in ENUMERATIONS)


@pytest.mark.slow
def test_the_losses_are_those_that_trl_computes() -> None:
    """GRPOConfig takes any word for a loss; the trainer's code knows these."""
    import inspect
    import re

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    losses = set(re.findall(r"loss_type == \"(\w+)\"", source))
    for group in re.findall(r"loss_type in \[([^\]]*)\]", source):
        losses |= set(re.findall(r"\"(\w+)\"", group))
    assert losses == set(GRPO_LOSSES)
