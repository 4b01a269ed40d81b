"""A Gaussian process over a fixed table of candidates: what is believed of all of them, given what was measured of some.

What is regressed is how far a measurement lies from its prior (a prediction, or nothing but a guess), in logarithms.
Several structures (one bias for all, each knob's own share, how knobs act together), scales and noises are
held at once, each weighted by how well it explains what was measured: with ten measurements, choosing one of
them would be choosing too early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.study.say import Say, says
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

KEPT = 64
"""So many rows of likenesses are kept: a search asks for those of what it measured again and again."""

LEAST_APART = 1e-3
"""No two candidates are believed to be nearer than this, whatever says so."""

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


def _nothing_shared(place: int) -> Numbers:
    return np.zeros(1)


@dataclass(frozen=True)
class Posterior:
    """Of every candidate of the table."""

    mean: Numbers
    deviation: Numbers
    """Of the candidate's own value, the noise of a measurement not included."""

    noise: float
    """Of one measurement."""

    shared: Callable[[int], Numbers] = _nothing_shared
    """How what is not known of every candidate goes together with what is not known of this one: their covariance."""

    def ahead_of(self, place: int) -> tuple[Numbers, Numbers]:
        """By how much each lies above this one, and the standard deviation of that. Of two that are alike in everything that
        matters little may be known, and yet that they differ by nothing."""
        variance = self.deviation**2 + self.deviation[place] ** 2 - 2 * self.shared(place)
        return self.mean - self.mean[place], np.sqrt(np.maximum(variance, LEAST_APART**2))


class Kernels:
    """How alike candidates are, in four ways."""

    def __init__(self, table: Table, sources: Numbers | None = None, figures: Numbers | None = None) -> None:
        """`sources`: what each candidate's prediction is made of, as shares; what is made of the same is off by the same.
        Where that is not said, all are made of the same. `figures`: the logarithms of the predictions, which show which knobs
        have a say; where there are none, all have."""
        self._numbers, self._categories = says(table, figures)
        self.size = len(table)
        made_of = np.ones((len(table), 1)) if sources is None else sources
        self._sources = made_of / np.linalg.norm(made_of, axis=1, keepdims=True)
        self._known: dict[int, tuple[Numbers, ...]] = {}
        self._parts = 1 + sum(one.whole for one in (*self._numbers, *self._categories))

    def between(self, rows: Places) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of these rows with all candidates: bias, single knobs (and loads), knobs together, the very same."""
        wanted = rows.tolist()
        new = [place for place in dict.fromkeys(wanted) if place not in self._known]
        if new:
            self._known.update(zip(new, zip(*self._reckoned(np.array(new)), strict=True), strict=True))
        parts = zip(*(self._known[place] for place in wanted), strict=True) if wanted else [()] * 4
        bias, single, together, very_same = (np.array(part).reshape(len(wanted), self.size) for part in parts)
        for place in list(self._known)[:-KEPT]:
            del self._known[place]
        return bias, single, together, very_same

    def _reckoned(self, rows: Places) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        together, single = np.ones((len(rows), self.size)), np.zeros((len(rows), self.size))
        very_same, load = np.ones((len(rows), self.size)), np.ones((len(rows), self.size))
        for one in self._numbers:
            near = _mixed_in(_near, one, rows)
            single += one.whole * 0.5 * (near + _mixed_in(_line, one, rows))
            together *= 1 - one.whole * (1 - near)
            differs = one.whole * (1 - _mixed_in(_same, one, rows))
            very_same *= 1 - differs
            load *= 1 - one.whole * (1 - near) if one.of_load else 1.0  # loads are as near as their numbers
        for one in self._categories:
            differs = one.whole * (1 - _mixed_in(_same, one, rows))
            single += one.whole - differs
            together *= 1 - 0.6 * differs
            very_same *= 1 - differs
            load *= 1 - differs if one.of_load else 1.0
        bias = 1 - BY_SOURCE + BY_SOURCE * self._sources[rows] @ self._sources.T
        return bias, (single + load) / self._parts, together, very_same

    def own(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of each candidate with itself."""
        single = np.ones(self.size) + sum(one.whole for one in self._categories)
        for one in self._numbers:
            lines = [3.0 * (column - 0.5) ** 2 for column in (one.true, one.told)]
            single += one.whole * 0.5 * (1 + (1 - one.trust) * lines[0] + one.trust * lines[1])
        ones = np.ones(self.size)
        return ones, single / self._parts, ones, ones


def _mixed_in(alike: Callable[[Numbers, Numbers], Numbers], one: Say, rows: Places) -> Numbers:
    """By the position as it is predicted to act, and a little by what it truly is."""
    told = alike(one.told[rows][:, None], one.told[None, :])
    if one.told is one.true:
        return told
    return one.trust * told + (1 - one.trust) * alike(one.true[rows][:, None], one.true[None, :])


def _near(left: Numbers, right: Numbers) -> Numbers:
    return np.asarray(np.exp(-0.5 * ((left - right) / REACH) ** 2))


def _line(left: Numbers, right: Numbers) -> Numbers:
    return 3.0 * (left - 0.5) * (right - 0.5)


def _same(left: Numbers, right: Numbers) -> Numbers:
    return np.asarray(left == right, dtype=float)


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


@dataclass(frozen=True)
class _Left:
    """What one model leaves of the prior."""

    model: _Weighed
    mean: Numbers
    reached: Numbers
    """Of each candidate, by independent parts: how much of its spread the measurements took."""


def _mixed(seen: _Seen, models: list[_Weighed], least_noise: float) -> Posterior:
    """What all of them together leave of the prior; the prior itself, where nothing was measured."""
    kernels, amplitude = seen.kernels, seen.amplitude
    if not models:
        return Posterior(np.zeros(kernels.size), amplitude.copy(), least_noise)
    own, left = kernels.own(), [_left(seen, one) for one in models]
    mean, square, spread = np.zeros(kernels.size), np.zeros(kernels.size), np.zeros(kernels.size)
    for one in left:
        prior = _together(one.model.shares, own) * (amplitude * one.model.scale) ** 2
        mean += one.model.weight * one.mean
        square += one.model.weight * one.mean**2
        spread += one.model.weight * np.maximum(prior - (one.reached**2).sum(axis=0), 0.0)
    noise = sum(one.weight * one.noise for one in models)
    deviation = np.sqrt(np.maximum(spread + square - mean**2, 0.0))
    return Posterior(mean, deviation, noise, lambda place: _shared(kernels, amplitude, left, place))


def _left(seen: _Seen, model: _Weighed) -> _Left:
    cross = seen.cross(model.shares) * model.scale**2
    inverse_root = np.linalg.inv(np.linalg.cholesky(seen.covariance(model.shares, model.scale, model.noise)))
    return _Left(model, (inverse_root.T @ (inverse_root @ seen.observed.distance)) @ cross, inverse_root @ cross)


def _shared(kernels: Kernels, amplitude: Numbers, left: list[_Left], place: int) -> Numbers:
    """Covariance of all with this one: under each model, and by the models not agreeing."""
    alike, mean, found = kernels.between(np.array([place])), np.zeros(kernels.size), np.zeros(kernels.size)
    for one in left:
        prior = _together(one.model.shares, alike)[0] * amplitude * amplitude[place] * one.model.scale**2
        mean += one.model.weight * one.mean
        found += one.model.weight * (prior - one.reached[:, place] @ one.reached + one.mean * one.mean[place])
    return np.asarray(found - mean * mean[place])


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
        self._known: tuple[tuple[float, ...], _Explained] | None = None
        self._doubt: _Doubt | None = None

    def after(self, observed: Observed, pending: Places, noises: tuple[float, ...] | None = None) -> Posterior:
        """What these measurements leave of the prior: the means are theirs alone; those that are pending lessen the doubt.
        `noises`: those that are possible by now, where not all of them are."""
        known = self._explained(observed, noises or self._noises)
        if not len(pending):
            return known.found
        if self._doubt is None or not self._doubt.expected <= set(pending.tolist()):
            plainest = _Weighed(shares=self._structures[0], scale=1.0, noise=self._noises[0], weight=1.0)
            self._doubt = _Doubt(known, plainest)
        found, left = known.found, self._doubt.left_by(pending)
        # What two have in common shrinks as the doubt of each does.
        return replace(found, deviation=found.deviation * left, shared=lambda place: found.shared(place) * left * left[place])

    def _explained(self, observed: Observed, noises: tuple[float, ...]) -> _Explained:
        """Thought over anew only where something was measured."""
        if self._known is None or self._known[0] != noises or not _unchanged(self._known[1].seen.observed, observed):
            self._known = noises, _explained(self._kernels, self._amplitude, observed, noises, self._structures)
            self._doubt = None
        return self._known[1]


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


def _unchanged(one: Observed, other: Observed) -> bool:
    pairs = ((one.places, other.places), (one.distance, other.distance), (one.variance, other.variance))
    return all(np.array_equal(left, right) for left, right in pairs)
