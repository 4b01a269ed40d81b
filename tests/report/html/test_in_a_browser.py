"""The page in a real browser: nothing complains, everything is drawn, and it can be read on a
phone and in the dark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.report.document_types import read_answer
from autotune.report.html.render import render
from tests.browser import needs_browser, tab
from tests.report.html.documents import of_a_real_run, of_a_search, with_predictions

pytestmark = [pytest.mark.slow, needs_browser]

DOCUMENTS = {
    "real": of_a_real_run,
    "predicted beside measured": with_predictions,
    "nothing fits": lambda: of_a_search(limit_mib=100),
}


def _page(folder: Path, document: dict[str, Any]) -> str:
    file = folder / "report.html"
    file.write_text(render(document))
    return file.as_uri()


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("width", [390, 1100])
def test_every_figure_is_drawn_and_nothing_complains(
    tmp_path: Path,
    name: str,
    width: int,
) -> None:
    url = _page(tmp_path, DOCUMENTS[name]())
    with tab(url, width=width) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        promised = opened.page.locator(".figure").count()
        assert opened.page.locator(".figure .figure-svg").count() >= promised > 0
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        cut = """() => [...document.querySelectorAll('.figure text, .legend li')].filter(node => {
            const box = node.getBoundingClientRect();
            const width = document.documentElement.clientWidth;
            return box.width && (box.left < -1 || box.right > width + 1);
        }).map(node => node.textContent)"""
        assert opened.page.evaluate(cut) == [], "labels and legends are whole"
        titles = [
            figure.locator("text.title").count() for figure in opened.page.locator(".figure").all()
        ]
        assert all(titles), "every figure names its axes"
        assert opened.complaints == []
        assert [
            address
            for address in opened.asked_for
            if not address.startswith(("file:", "data:", "blob:"))
        ] == []


def test_the_dark_page_has_light_figures(tmp_path: Path) -> None:
    url = _page(tmp_path, of_a_real_run())
    colours = []
    for dark in (False, True):
        with tab(url, dark=dark) as opened:
            opened.page.wait_for_selector("body[data-drawn]")
            colours.append(
                opened.page.locator(".figure .xtick").first.evaluate(
                    "node => getComputedStyle(node).fill"
                )
            )
    assert colours[0] != colours[1]


def test_a_measured_speed_has_a_bar_of_its_interval(tmp_path: Path) -> None:
    """A quarter up and down: the bar is half as high as the point is above zero."""
    document = of_a_search()
    document["recommendation"] = None
    for trial in document["trials"]:
        trial["spread"] = {"worst": 0.25, "typical": None}
    with tab(_page(tmp_path, document)) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        shares = opened.page.evaluate(
            """() => {
            const figure = document.getElementById('speed-against-memory');
            const labels = [...figure.querySelectorAll('text')];
            const zero = labels.find(node => node.textContent === '0');
            const {y, height} = zero.getBoundingClientRect(), ground = y + height / 2;
            return [...figure.querySelectorAll('path.spread')].map(bar => {
                const box = bar.getBoundingClientRect();
                return box.height / (ground - box.y - box.height / 2);
            });
        }"""
        )
    fitting = [candidate for candidate in read_answer(document).probes if candidate.fits]
    assert len(shares) == len(fitting) > 1
    assert shares == [pytest.approx(0.5, abs=0.03)] * len(shares)


def test_a_point_shows_its_candidate(tmp_path: Path) -> None:
    with tab(_page(tmp_path, of_a_real_run())) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        opened.page.locator("#speed-against-memory [data-tip]").first.hover()
        assert "tokens/s" in opened.page.locator(".tip").inner_text()


def test_the_table_behind_a_figure_opens(tmp_path: Path) -> None:
    with tab(_page(tmp_path, of_a_real_run())) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        behind = opened.page.locator("#speed-against-memory-section details")
        assert not behind.locator("table").is_visible()
        behind.locator("summary").click()
        probes = [row for row in of_a_real_run()["trials"] if row["purpose"] != "confirm"]
        assert behind.locator("tbody tr").count() == len(probes) > 1
        assert behind.locator("table").is_visible()
