"""Parameters of every architecture and catalogued model, as transformers' own models have them."""

from __future__ import annotations

from autotune.estimate.model_shape import shape
from tests.estimate.counted_parameters import configs, counts
from tests.every import for_each

COUNTS = counts()


@for_each(configs().items())
def test_parameters_are_those_that_were_counted(entry: tuple[str, dict[str, object]]) -> None:
    name, config = entry
    assert shape(config).parameters == COUNTS[name], "see counted_parameters.py"


def test_nothing_else_is_counted() -> None:
    assert COUNTS.keys() == configs().keys()
