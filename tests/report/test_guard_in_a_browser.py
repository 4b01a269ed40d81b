"""Page of a guarded run in a real browser: light, dark and on a phone, without a script."""

from __future__ import annotations

import pathlib

import pytest

from autotune.report.html.guard_page import render_guard
from tests.browser import needs_browser, tab
from tests.report.test_guard_page import DOCUMENT

pytestmark = [pytest.mark.slow, needs_browser]

NOTES = ["the peak grows and reaches the limit of 10 GiB on GPU 0 after step 90 at the latest"]
LUMINANCE_SHARES = (0.2126, 0.7152, 0.0722)
# Contrast that WCAG 2 wants of parts of a graphic.
MIN_CONTRAST = 3.0


def _page(folder: pathlib.Path) -> str:
    page = folder / "report.html"
    page.write_text(render_guard({**DOCUMENT, "notes": NOTES}))
    return page.as_uri()


def _luminance(color: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    parts = color.removeprefix("rgb(").removesuffix(")").split(",")
    luminance = 0.0
    for share, part in zip(LUMINANCE_SHARES, parts, strict=True):
        value = int(part) / 255
        linear = value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        luminance += share * linear
    return luminance


def _contrast(first: str, second: str) -> float:
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390])
def test_the_chart_is_read_at_every_width(
    tmp_path: pathlib.Path,
    width: int,
    dark: bool,
) -> None:
    with tab(_page(tmp_path), width=width, dark=dark) as opened:
        page = opened.page
        assert opened.complaints == [] and len(opened.asked_for) == 1

        # 1. Nothing is wider than the screen, and the chart keeps its height.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        chart = page.locator("svg.memory").bounding_box()
        assert chart is not None
        assert chart["height"] == pytest.approx(240, abs=2) and chart["width"] > 0.85 * width

        # 2. Every line stands out from the paper.
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for mark in ("polyline", ".limit", ".restart", ".checkpoint"):
            line = page.locator(f"svg.memory {mark}").first
            color = line.evaluate("element => getComputedStyle(element).stroke")
            assert _contrast(color, paper) >= MIN_CONTRAST, mark
        for key in page.locator(".legend i").all():
            size = key.bounding_box()
            assert size is not None and size["width"] > 10 and size["height"] >= 1

        # 3. The first attempt ends in the middle: both took 50 s.
        end = page.locator("svg.memory .restart").first.bounding_box()
        assert end is not None
        middle = chart["x"] + chart["width"] / 2
        assert end["x"] + end["width"] / 2 == pytest.approx(middle, abs=2)


def test_a_phone_shows_each_attempt_as_a_block(tmp_path: pathlib.Path) -> None:
    with tab(_page(tmp_path), width=390) as opened:
        page = opened.page
        assert not page.locator("table.tall thead").is_visible()
        for name in ("to step", "peak", "changed afterwards"):
            assert page.locator(f'td[data-what="{name}"]').first.is_visible()
        change = page.inner_text('td[data-what="changed afterwards"]')
        assert change.strip() == "per_device_train_batch_size=4"
