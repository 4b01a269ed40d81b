"""Rows of a step, where they differ from the longest that its settings allow."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.estimate.screening import Point


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows that a run had. None: the longest, as many as the micro-batch has."""

    count: int | None = None  # in a forward pass
    tokens: int | None = None  # of a row, with padding
    completion: int | None = None  # tokens of its completion, with padding

    def at(self, point: Point) -> Point:
        """Return the point with these rows. Settings limit their number and the completions."""
        rows = min(self.count or point.micro_batch, point.micro_batch)
        prompt = point.prompt
        completion = point.completion
        if self.completion is not None:
            completion = min(self.completion, completion)
            if self.tokens is not None:
                prompt = self.tokens - self.completion
        elif self.tokens is not None:
            tokens = min(self.tokens, prompt + completion)
            completion = round(tokens * completion / (prompt + completion))
            prompt = tokens - completion
        return point._replace(micro_batch=rows, prompt=prompt, completion=completion)

    def of_one_length(self) -> StepRows:
        """Return rows of these lengths, as many as each micro-batch has."""
        return StepRows(tokens=self.tokens, completion=self.completion)
