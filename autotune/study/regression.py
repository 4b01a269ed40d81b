"""A Gaussian process over a fixed table of candidates: what is believed of all of them, given what was measured of some.

What is regressed is how far a measurement lies from its prior (a prediction, or nothing but a guess), in logarithms.
Several structures (one bias for all, each knob's own share, how knobs act together), scales and noises are
held at once, each weighted by how well it explains what was measured: with ten measurements, choosing one of
them would be choosing too early.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.study.table import Numbers, Places, Table

Shares = tuple[float, float, float, float]
"""Of the prior variance: a bias of all candidates, single knobs (and loads), knobs together, and each candidate's own."""

Parts = tuple[Numbers, ...]
"""How alike candidates are, in each of these ways."""

STRUCTURES: tuple[Shares, ...] = ((0.5, 0.35, 0.1, 0.05), (0.2, 0.55, 0.15, 0.1), (0.15, 0.3, 0.4, 0.15))

SCALES = (0.6, 1.0, 1.8)
"""The prior's own spread may be too wide or too narrow."""

REACH = 0.6
"""How far a numeric knob's value tells of others, where its whole range is 1."""

BY_SOURCE = 0.7
"""How much of what is common to all candidates goes by what their predictions are made of."""

NOBODY: Places = np.zeros(0, dtype=np.int64)
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

    def __init__(self, table: Table, sources: Numbers | None = None) -> None:
        """`sources`: what each candidate's prediction is made of, as shares; what is made of the same is off by the same.
        Where that is not said, all are made of the same."""
        self._numbers, self._categories = table.features
        self._loads = table.loads
        self.size = len(table)
        made_of = np.ones((len(table), 1)) if sources is None else sources
        self._sources = made_of / np.linalg.norm(made_of, axis=1, keepdims=True)

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
        bias = 1 - BY_SOURCE + BY_SOURCE * self._sources[rows] @ self._sources.T
        return bias, single / parts, together, (rows[:, None] == np.arange(self.size)[None, :]).astype(float)

    def own(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of each candidate with itself."""
        parts = 1 + self._numbers.shape[1] + self._categories.shape[1]
        lines = (0.5 + 1.5 * (self._numbers - 0.5) ** 2).sum(axis=1)
        single = (1 + lines + self._categories.shape[1]) / parts
        ones = np.ones(self.size)
        return ones, single, ones, ones


def posterior(
    kernels: Kernels,
    amplitude: Numbers,
    observed: Observed,
    noises: tuple[float, ...],
    structures: tuple[Shares, ...] = STRUCTURES,
    pending: Places = NOBODY,
) -> Posterior:
    """What the measurements leave of the prior, whose standard deviation is `amplitude` for each candidate.

    Those that are `pending` are taken to turn out as the others let expect: the means stay, and what they will tell is known.
    """
    seen = _Seen(kernels, amplitude, observed)
    weighed = _weighed(seen, noises, structures)
    found = _mixed(seen, weighed, noises[0])
    if not len(pending):
        return found
    expected = Observed(
        np.concatenate([observed.places, pending]),
        np.concatenate([observed.distance, found.mean[pending]]),
        np.concatenate([observed.variance, np.zeros(len(pending))]),
    )
    then = _Seen(kernels, amplitude, expected, seen)
    # What is only expected says nothing about which model explains the measurements.
    return replace(found, deviation=_mixed(then, weighed or _weighed(then, noises, structures), noises[0]).deviation)


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """One way to see the measurements."""

    shares: Shares
    scale: float
    noise: float
    weight: float


class _Seen:
    """Measurements, and how alike theirs are to all others."""

    def __init__(self, kernels: Kernels, amplitude: Numbers, observed: Observed, before: _Seen | None = None) -> None:
        """`before` holds the first of them, whose likenesses need not be reckoned again."""
        self.kernels, self.amplitude, self.observed = kernels, amplitude, observed
        known: Parts = () if before is None else before._between
        new = kernels.between(observed.places[len(known[0]) if known else 0 :])
        self._between: Parts = tuple(np.concatenate(parts) for parts in zip(known, new, strict=True)) if known else new
        self._among = tuple(part[:, observed.places] for part in self._between)
        self._cross: dict[Shares, Numbers] = {}
        self._covariance: dict[Shares, Numbers] = {}

    def cross(self, shares: Shares) -> Numbers:
        """Covariance of the measured ones with all, at scale 1."""
        if shares not in self._cross:
            self._cross[shares] = self._scaled(_together(shares, self._between), self.amplitude)
        return self._cross[shares]

    def covariance(self, shares: Shares, scale: float, noise: float) -> Numbers:
        """Of what was measured: asked for by more models than that with all others, which is a hundred times wider."""
        if shares not in self._covariance:
            self._covariance[shares] = self._scaled(_together(shares, self._among), self.amplitude[self.observed.places])
        return np.asarray(self._covariance[shares] * scale**2 + np.diag(self.observed.variance + noise**2))

    def _scaled(self, mixed: Numbers, amplitude: Numbers) -> Numbers:
        return np.asarray(mixed * self.amplitude[self.observed.places][:, None] * amplitude[None, :])


def _together(shares: Shares, parts: Parts) -> Numbers:
    return np.asarray(sum(share * part for share, part in zip(shares, parts, strict=True)))


def _weighed(seen: _Seen, noises: tuple[float, ...], structures: tuple[Shares, ...]) -> list[_Weighed]:
    """Those that explain the measurements, each with its share."""
    if not len(seen.observed.places):
        return []
    models = [(shares, scale, noise) for shares in structures for scale in SCALES for noise in noises]
    evidence = np.array([_evidence(seen.covariance(*model), seen.observed.distance, model[2]) for model in models])
    weights = np.exp(evidence - evidence.max())
    weights[weights < NEGLIGIBLE] = 0.0
    weights /= weights.sum()
    return [
        _Weighed(shares=shares, scale=scale, noise=noise, weight=float(weight))
        for (shares, scale, noise), weight in zip(models, weights, strict=True)
        if weight
    ]


def _evidence(covariance: Numbers, distance: Numbers, noise: float) -> float:
    """How well a model explains the distances. The last row of a factor with the distances as a further row is what solving
    with the factor would give; nothing need be inverted for that."""
    highest = float(distance @ distance) / noise**2 + 1.0  # at least what keeps the whole positive
    root = np.linalg.cholesky(np.block([[covariance, distance[:, None]], [distance[None, :], np.array([[highest]])]]))
    white = root[-1, :-1]
    return -0.5 * float(white @ white) - float(np.log(np.diag(root)[:-1]).sum())


def _mixed(seen: _Seen, models: list[_Weighed], least_noise: float) -> Posterior:
    """What all of them together leave of the prior; the prior itself, where nothing was measured."""
    kernels, amplitude = seen.kernels, seen.amplitude
    if not models:
        return Posterior(np.zeros(kernels.size), amplitude.copy(), least_noise)
    own = kernels.own()
    mean, square, spread = np.zeros(kernels.size), np.zeros(kernels.size), np.zeros(kernels.size)
    for one in models:
        cross = seen.cross(one.shares) * one.scale**2
        inverse_root = np.linalg.inv(np.linalg.cholesky(seen.covariance(one.shares, one.scale, one.noise)))
        centre = (inverse_root.T @ (inverse_root @ seen.observed.distance)) @ cross
        reached = inverse_root @ cross
        prior = _together(one.shares, own) * (amplitude * one.scale) ** 2
        mean += one.weight * centre
        square += one.weight * centre**2
        spread += one.weight * np.maximum(prior - (reached**2).sum(axis=0), 0.0)
    noise = sum(one.weight * one.noise for one in models)
    return Posterior(mean, np.sqrt(np.maximum(spread + square - mean**2, 0.0)), noise)
