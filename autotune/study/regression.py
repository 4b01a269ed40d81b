"""A Gaussian process over a fixed table of candidates: what is believed of all of them, given what was measured of some.

What is regressed is how far a measurement lies from its prior (a prediction, or nothing but a guess), in logarithms.
Several structures (one bias for all, each knob's own share, how knobs act together), scales and noises are
held at once, each weighted by how well it explains what was measured: with ten measurements, choosing one of
them would be choosing too early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.study.table import Numbers, Places, Table

STRUCTURES = ((0.5, 0.35, 0.1, 0.05), (0.2, 0.55, 0.15, 0.1), (0.15, 0.3, 0.4, 0.15))
"""Shares of the prior variance: a bias of all candidates, single knobs (and loads), knobs together, and each candidate's own."""

SCALES = (0.6, 1.0, 1.8)
"""The prior's own spread may be too wide or too narrow."""

REACH = 0.6
"""How far a numeric knob's value tells of others, where its whole range is 1."""

NEGLIGIBLE = 0.02
"""Structures that explain the measurements this much worse than the best are not looked at."""


@dataclass(frozen=True)
class Observed:
    """What was measured, as distance from the prior."""

    places: Places
    distance: Numbers
    variance: Numbers
    """Of each, beside the common noise: 0 for a plain measurement."""


@dataclass(frozen=True)
class Posterior:
    """Of every candidate of the table."""

    mean: Numbers
    deviation: Numbers
    """Of the candidate's own value, the noise of a measurement not included."""

    noise: float
    """Of one measurement."""


class Kernels:
    """How alike candidates are, in four ways."""

    def __init__(self, table: Table) -> None:
        self._numbers, self._categories = table.features
        self._loads = table.loads
        self.size = len(table)

    def between(self, rows: Places) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of these rows with all candidates: bias, single knobs, knobs together, the very same."""
        together, single, parts = np.ones((len(rows), self.size)), np.zeros((len(rows), self.size)), 1
        single += self._loads[rows][:, None] == self._loads[None, :]
        for column in self._numbers.T:
            apart = column[rows][:, None] - column[None, :]
            near = np.exp(-0.5 * (apart / REACH) ** 2)
            line = 3.0 * (column[rows][:, None] - 0.5) * (column[None, :] - 0.5)
            single += 0.5 * near + 0.5 * line
            together *= near
            parts += 1
        for codes in self._categories.T:
            same = codes[rows][:, None] == codes[None, :]
            single += same
            together *= np.where(same, 1.0, 0.4)
            parts += 1
        return np.ones_like(single), single / parts, together, (rows[:, None] == np.arange(self.size)[None, :]).astype(float)

    def own(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of each candidate with itself."""
        parts = 1 + self._numbers.shape[1] + self._categories.shape[1]
        lines = (0.5 + 1.5 * (self._numbers - 0.5) ** 2).sum(axis=1)
        single = (1 + lines + self._categories.shape[1]) / parts
        ones = np.ones(self.size)
        return ones, single, ones, ones


def posterior(kernels: Kernels, amplitude: Numbers, observed: Observed, noises: tuple[float, ...]) -> Posterior:
    """What the measurements leave of the prior, whose standard deviation is `amplitude` for each candidate."""
    own = kernels.own()
    if not len(observed.places):
        return Posterior(np.zeros(kernels.size), amplitude.copy(), noises[0])
    between = kernels.between(observed.places)
    among = tuple(part[:, observed.places] for part in between)
    models = [(shares, scale, noise) for shares in STRUCTURES for scale in SCALES for noise in noises]
    fits = [_fit(among, amplitude[observed.places], observed, *model) for model in models]
    weights = np.exp(np.array([fit.evidence for fit in fits]) - max(fit.evidence for fit in fits))
    weights[weights < NEGLIGIBLE] = 0.0
    weights /= weights.sum()
    mean, square, spread = np.zeros(kernels.size), np.zeros(kernels.size), np.zeros(kernels.size)
    scaled = {}
    for (shares, scale, _), fit, weight in zip(models, fits, weights, strict=True):
        if weight == 0.0:
            continue
        if shares not in scaled:
            mixed = sum(share * part for share, part in zip(shares, between, strict=True))
            scaled[shares] = mixed * amplitude[observed.places][:, None] * amplitude[None, :]
        cross = scaled[shares] * scale**2
        centre = fit.pull @ cross
        reached = fit.inverse_root @ cross
        prior = sum(share * part for share, part in zip(shares, own, strict=True)) * (amplitude * scale) ** 2
        mean += weight * centre
        square += weight * centre**2
        spread += weight * np.maximum(prior - (reached**2).sum(axis=0), 0.0)
    noise = float(weights @ np.array([noise for _, _, noise in models]))
    return Posterior(mean, np.sqrt(np.maximum(spread + square - mean**2, 0.0)), noise)


@dataclass(frozen=True)
class _Fit:
    evidence: float
    pull: Numbers
    inverse_root: Numbers


def _fit(
    among: tuple[Numbers, ...], amplitude: Numbers, observed: Observed, shares: tuple[float, ...], scale: float, noise: float
) -> _Fit:
    """One structure, conditioned on the measurements."""
    mixed = sum((share * part for share, part in zip(shares, among, strict=True)), start=np.zeros_like(among[0]))
    covariance = mixed * np.outer(amplitude, amplitude) * scale**2 + np.diag(observed.variance + noise**2)
    root = np.linalg.cholesky(covariance)
    inverse_root = np.linalg.inv(root)
    white = inverse_root @ observed.distance
    evidence = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
    return _Fit(evidence, inverse_root.T @ white, inverse_root)
