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

NEGLIGIBLE = 0.02
"""Structures that explain the measurements this much worse than the best are not looked at."""

NO_DOUBT = 1e-9
"""A variance below this has nothing left to take away."""


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
) -> Posterior:
    """What the measurements leave of the prior, whose standard deviation is `amplitude` for each candidate."""
    return _explained(kernels, amplitude, observed, noises, structures).found


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """One way to see the measurements."""

    shares: Shares
    scale: float
    noise: float
    weight: float


class _Seen:
    """Measurements, and how alike theirs are to all others."""

    def __init__(self, kernels: Kernels, amplitude: Numbers, observed: Observed) -> None:
        self.kernels, self.amplitude, self.observed = kernels, amplitude, observed
        self._between: Parts = kernels.between(observed.places)
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


@dataclass(frozen=True)
class _Explained:
    """What was measured, the models that explain it, and what they leave of the prior."""

    seen: _Seen
    models: list[_Weighed]
    found: Posterior


def _explained(
    kernels: Kernels, amplitude: Numbers, observed: Observed, noises: tuple[float, ...], structures: tuple[Shares, ...]
) -> _Explained:
    seen = _Seen(kernels, amplitude, observed)
    models = _weighed(seen, noises, structures)
    return _Explained(seen, models, _mixed(seen, models, noises[0]))


class Regression:
    """One figure of every candidate, asked again and again while measurements are under way.

    What those will tell is known before they end: not the values, but how much doubt they leave of the others, so that the
    next candidate is not just more of the same. All is thought over anew only when something new was measured; each further
    measurement that begins takes away its share of the doubt, and nothing else is reckoned.
    """

    def __init__(
        self, kernels: Kernels, amplitude: Numbers, noises: tuple[float, ...], structures: tuple[Shares, ...] = STRUCTURES
    ) -> None:
        self._kernels, self._amplitude, self._noises, self._structures = kernels, amplitude, noises, structures
        self._known: _Explained | None = None
        self._doubt: _Doubt | None = None

    def after(self, observed: Observed, pending: Places) -> Posterior:
        """What these measurements leave of the prior: the means are theirs alone; those that are pending lessen the doubt."""
        if self._known is None or not _same(self._known.seen.observed, observed):
            self._known = _explained(self._kernels, self._amplitude, observed, self._noises, self._structures)
            self._doubt = None
        if not len(pending):
            return self._known.found
        if self._doubt is None or not self._doubt.expected <= set(pending.tolist()):
            plainest = _Weighed(shares=self._structures[0], scale=1.0, noise=self._noises[0], weight=1.0)
            self._doubt = _Doubt(self._known, plainest)
        return replace(self._known.found, deviation=self._known.found.deviation * self._doubt.left_by(pending))


class _Doubt:
    """How much of it is left, by candidate, under the model that explains the measurements best: those that are pending do not
    say which of the models is right, and to follow all of them would take many times as long."""

    def __init__(self, known: _Explained, plainest: _Weighed) -> None:
        """`plainest` is the model to go by before anything was measured."""
        self._seen, self._model = known.seen, max(known.models, key=lambda one: one.weight, default=plainest)
        shares, scale, seen = self._model.shares, self._model.scale, known.seen
        root = np.linalg.cholesky(seen.covariance(shares, scale, self._model.noise))
        self._reached = np.linalg.inv(root) @ seen.cross(shares) * scale**2
        own = _together(shares, seen.kernels.own()) * (seen.amplitude * scale) ** 2
        self._before = np.maximum(own - (self._reached**2).sum(axis=0), NO_DOUBT)
        self._left = self._before.copy()
        self.expected: set[int] = set()
        """Places of those that were pending by now."""

    def left_by(self, pending: Places) -> Numbers:
        """The share of each deviation that these leave, among them all that were expected before."""
        new = np.array([place for place in pending.tolist() if place not in self.expected], dtype=np.int64)
        if len(new):
            self._expect(new)
        return np.asarray(np.sqrt(self._left / self._before))

    def _expect(self, new: Places) -> None:
        """Further rows of the factor, below those of everything that was known before."""
        model, amplitude = self._model, self._seen.amplitude
        alike = _together(model.shares, self._seen.kernels.between(new)) * model.scale**2
        beyond = alike * amplitude[new][:, None] * amplitude[None, :] - self._reached[:, new].T @ self._reached
        root = np.linalg.cholesky(beyond[:, new] + model.noise**2 * np.eye(len(new)))
        rows = np.linalg.inv(root) @ beyond
        self._reached = np.concatenate([self._reached, rows])
        self._left = np.maximum(self._left - (rows**2).sum(axis=0), NO_DOUBT)
        self.expected.update(new.tolist())


def _same(one: Observed, other: Observed) -> bool:
    pairs = ((one.places, other.places), (one.distance, other.distance), (one.variance, other.variance))
    return all(np.array_equal(left, right) for left, right in pairs)
