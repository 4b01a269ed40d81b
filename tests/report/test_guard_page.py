"""The page of a guarded run: its marks are where the figures say."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from autotune.core.units import GIB
from autotune.report.html.guard_page import (
    GUARD_CHART_HEIGHT,
    GUARD_CHART_WIDTH,
    memory_chart,
    render_guard,
)


def _attempt(number: int, **values: Any) -> dict[str, Any]:
    return {
        "number": number,
        "began": 1000.0,
        "seconds": 50.0,
        "from_step": None,
        "last_step": 10,
        "limit_bytes": 10 * GIB,
        "peak_bytes": 5 * GIB,
        "place": "GPU 0",
        "memory": [{"seconds": 0.0, "bytes": 0}, {"seconds": 50.0, "bytes": 11 * GIB}],
        "checkpoints": [{"step": 8, "seconds": 25.0}],
        "change": {"per_device_train_batch_size": 4},
        "end": {"reason": "memory", "cause": "<script>"},
        **values,
    }


DOCUMENT = {
    "status": "finished",
    "steps": 20,
    "restarts": 1,
    "lost_seconds": 12.0,
    "notes": [],
    "attempts": [_attempt(1), _attempt(2, began=1050.0, change=None)],
}


def test_marks_lie_where_the_figures_say() -> None:
    # 100 s are as wide as the chart, 11 GiB (1.1 times the limit) as high.
    chart = memory_chart(DOCUMENT)
    assert chart is not None
    first, second = chart.lines
    assert first.points == f"0.0,{GUARD_CHART_HEIGHT}.0 {GUARD_CHART_WIDTH / 2},0.0"
    assert first.checkpoints[0].x == GUARD_CHART_WIDTH / 4
    assert first.end == GUARD_CHART_WIDTH / 2 and second.end == GUARD_CHART_WIDTH
    assert chart.limit_y == round(GUARD_CHART_HEIGHT / 11, 1)


def test_a_run_that_was_never_seen_has_no_chart() -> None:
    assert memory_chart({**DOCUMENT, "attempts": [_attempt(1, memory=[])]}) is None


def test_the_page_escapes_what_it_shows() -> None:
    page = render_guard(DOCUMENT)
    HTMLParser().feed(page)
    assert "Guarded run: finished, 20 steps, 1 restart, 12 s lost" in page
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert page.count('class="checkpoint"') == 2 and page.count('class="restart"') == 2
