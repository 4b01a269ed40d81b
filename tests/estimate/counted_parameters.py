"""Parameters of the models that transformers builds, counted once and kept beside the tests.

    python -m tests.estimate.counted_parameters     count them again with the installed transformers

A fast test compares the shapes with these counts; slow ones build the models again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from autotune import catalog
from tests.estimate.test_model_shape import ODD, built, odd_config

TABLE = Path(__file__).with_name("counted_parameters.yaml")
HEAD = """\
# Parameters that the models of transformers {version} have, built on torch's meta device:
# `python -m tests.estimate.counted_parameters`
"""


def configs() -> dict[str, Mapping[str, object]]:
    """Return the configurations to count, by name: small unusual ones, and the catalogue's."""
    by_name: dict[str, Mapping[str, object]] = {}
    for kind in sorted(ODD):
        by_name[f"{kind} with a head"] = odd_config(kind, tied=False)
        by_name[f"{kind} with a tied head"] = odd_config(kind, tied=True)
    for model in catalog.models():
        by_name[model.ids[0]] = model.config
    return by_name


def counts() -> dict[str, int]:
    loaded: dict[str, int] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return loaded


def main() -> None:
    import transformers

    counted = {name: built(config) for name, config in configs().items()}
    text = yaml.safe_dump(counted, sort_keys=False)
    TABLE.write_text(HEAD.format(version=transformers.__version__) + text, encoding="utf-8")
    print(f"{len(counted)} models counted: {TABLE}")


if __name__ == "__main__":
    main()
