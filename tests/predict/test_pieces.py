"""Pieces of made-up traces: a step whose peak changes its place, in models of other lengths."""

from __future__ import annotations

import importlib

import pytest

from autotune.predict.pieces import Learnt, phase_peaks
from autotune.predict.pieces.blocks import NotUniform, Stretch
from autotune.predict.pieces.points import Point, Sample
from autotune.predict.pieces.stretching import stretched
from autotune.predict.pieces.survey import corner, picked, stretch_of, survey
from autotune.predict.replay import Track, replay
from autotune.trace import Inventory, Mark, Part, Trace

NAMES: tuple[Part, ...] = ("weights", "activations", "logits", "optimizer")
SPACE = [
    Point(micro_batch=batch, prompt=prompt, completion=completion, micro_steps=4)
    for batch in (1, 2, 8) for prompt in (64, 256) for completion in (64, 512)
]  # fmt: skip


class Book:
    """Writes a trace."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.events: list[int] = []
        self.marks: list[Mark] = []

    def enter(self, phase: str, step: int, layer: int | None = None) -> None:
        self.marks.append(Mark(event=len(self.events), phase=phase, step=step, layer=layer))  # type: ignore[arg-type]

    def make(self, size: int, part: Part) -> int:
        self.sizes.append(size)
        self.parts.append(NAMES.index(part))
        self.events.append(len(self.sizes))
        return len(self.sizes)

    def drop(self, *numbers: int) -> None:
        self.events += [-number for number in numbers]

    def trace(self, layers: int) -> Trace:
        inventory = Inventory(
            parameters=layers, trainable_parameters=layers, weight_bytes=100 * layers, trainable_bytes=100 * layers,
            layer_bytes=(100,) * layers, layer_trainable=(1,) * layers, largest_parameter=1,
        )  # fmt: skip
        return Trace(
            basis="traced", versions={}, device="cpu", layers=layers, sizes=tuple(self.sizes), parts=tuple(self.parts),
            part_names=NAMES, events=tuple(self.events), marks=tuple(self.marks), work=(), inventory=inventory,
        )  # fmt: skip


def step(point: Point, layers: int, odd_layer: int | None = None) -> Trace:
    """Weights; two steps that keep something per layer, make logits in tiles and go back; a clipping and an optimizer that grow
    with layers: small things that look alike, and one that is put together from them."""
    book, length = Book(), point.prompt + point.completion
    book.enter("load", 0)
    for _ in range(layers):
        book.make(100_000, "weights")
    for number in (0, 1):
        kept = []
        for layer in range(layers):
            book.enter("forward", number, layer)
            inner = book.make(50 * point.micro_batch * length * (300 if layer == odd_layer else 1), "activations")
            kept.append(book.make(7 * point.micro_batch * length, "activations"))
            book.drop(inner)
        book.enter("forward", number)
        book.drop(book.make(1000 * min(1024, point.micro_batch * point.completion), "logits"))
        for layer in reversed(range(layers)):
            book.enter("backward", number, layer)
            book.drop(book.make(3 * point.micro_batch * length**2 // 8, "activations"), kept[layer])
        book.enter("optimizer", number)
        norms = [book.make(2, "optimizer") for _ in range(3 * layers + 2)]
        book.drop(book.make(400 * layers + 100, "optimizer"), book.make(4 * layers, "optimizer"), *norms)
        book.drop(*[book.make(2, "optimizer") for _ in range(5)])
        states = [book.make(60_000, "optimizer") for _ in range(layers)]
        if number:
            book.drop(*states)
    return book.trace(layers)


@pytest.mark.parametrize("layers", [8, 40])
def test_every_point_of_a_long_model_follows_from_a_short_one(layers: int) -> None:
    config = {"num_hidden_layers": layers, "model_type": "made_up"}
    pieces = survey(lambda point, short: step(point, short or layers), SPACE, stretch_of(config))
    assert pieces.exact and pieces.residual == 0.0
    track = Track(pieces.trace)
    for point, sizes in zip(SPACE, pieces.at(SPACE), strict=True):
        whole = step(point, layers)
        assert track.replay(sizes) == replay(whole)
        assert phase_peaks(pieces.trace, sizes) == phase_peaks(whole)
    assert len({max(peaks, key=lambda phase: peaks[phase]) for peaks in map(phase_peaks, (step(p, layers) for p in SPACE))}) > 1
    assert pieces.trace.layers == layers and len(pieces.trace.inventory.layer_bytes) == layers


def test_a_model_whose_layers_differ_is_noticed() -> None:
    stretch = Stretch(layers=3, first=1, period=1, copies=1)
    with pytest.raises(NotUniform, match="layer"):
        stretched(step(SPACE[0], 3), step(SPACE[0], 4, odd_layer=2), stretch)


def test_an_error_is_seen_at_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the last length that was looked at, the made-up framework takes another kernel: told, and too much of it refused."""

    def follow(point: Point, layers: int | None) -> Trace:
        far = point == corner(SPACE)
        return step(point, layers or 8, odd_layer=0 if far else None)

    assert survey(follow, SPACE, stretch_of({"num_hidden_layers": 8})).residual > 0.01
    monkeypatch.setattr(importlib.import_module("autotune.predict.pieces.survey"), "LARGEST_ERROR", 0.01)
    with pytest.raises(NotUniform, match="off"):
        survey(follow, SPACE, stretch_of({"num_hidden_layers": 8}))


def test_other_courses_do_not_mix() -> None:
    first, second = picked(SPACE)[:2]
    whole = step(second, 3)
    cut = Trace(**{**{name: getattr(whole, name) for name in whole.__dataclass_fields__}, "marks": whole.marks[:-1]})
    with pytest.raises(NotUniform):
        Learnt([Sample(point=first, trace=step(first, 3)), Sample(point=second, trace=cut)], None)


def test_a_sample_is_met_exactly() -> None:
    samples = [Sample(point=point, trace=step(point, 5)) for point in picked(SPACE)]
    plan = Stretch(layers=5, first=1, period=1, copies=0)
    assert [Learnt(samples, None).error_at(plan, sample) for sample in samples] == [0.0] * len(samples)


def test_a_stretch_of_other_events_elsewhere_grows_as_a_whole() -> None:
    """A loop over rows keeps something of each and makes something for a moment."""

    def looped(point: Point) -> Trace:
        book = Book()
        book.enter("load", 0)
        book.make(100_000, "weights")
        for number in (0, 1):
            book.enter("score", number)
            kept = []
            for _ in range(point.micro_batch):
                inner = book.make(64 * point.completion, "logits")
                kept.append(book.make(8 * point.completion, "activations"))
                book.drop(inner)
            book.enter("forward", number)
            book.drop(book.make(4 * point.completion, "activations"), *kept)
        return book.trace(1)

    pieces = survey(lambda point, _: looped(point), SPACE, None)
    for point, sizes in zip(SPACE, pieces.at(SPACE), strict=True):
        assert phase_peaks(pieces.trace, sizes) == phase_peaks(looped(point))


@pytest.mark.parametrize(
    ("config", "layers", "period"),
    [
        ({"num_hidden_layers": 28}, 3, 1),
        ({"num_hidden_layers": 3}, None, None),
        ({"num_hidden_layers": 12, "layer_types": ["sliding", "full"] * 6}, 4, 2),
        ({"num_hidden_layers": 26, "layer_types": [*["sliding"] * 5, "full"] * 4 + ["sliding"] * 2}, 8, 6),
        ({"num_hidden_layers": 5, "layer_types": ["a", "b", "b", "a", "c"]}, None, None),
    ],
)
def test_the_shortest_model_with_all_kinds_of_layers(config: dict[str, object], layers: int | None, period: int | None) -> None:
    stretch = stretch_of({"model_type": "made_up", **config})
    assert (stretch.layers, stretch.period) == (layers, period) if stretch else layers is None
    if stretch:
        assert stretch.layers + stretch.copies * stretch.period == config["num_hidden_layers"]
