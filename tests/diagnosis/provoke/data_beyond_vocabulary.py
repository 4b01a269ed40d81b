"""Token ids that the model has no row for."""

from __future__ import annotations

from parts import plain_trainer, rows

ids = list(range(4990, 5006))
plain_trainer(data=rows(input_ids=ids, labels=ids))
