"""Texts that pictures show, of a search on a simulated machine: terminal and page."""

from __future__ import annotations

import html.parser
import io
import re

from rich.console import Console

from autotune.report.html.render import render
from autotune.report.job_text import Progress, show_job
from autotune.report.terminal import show_answer
from autotune.search.loop import legal_candidates
from tests.report.answers import answered
from tests.report.html.documents import of_a_search
from tests.simulated import ToyTrainer

LIMIT_MIB = 450
COLUMNS = 116


def terminal_text() -> str:
    """Return the job, the progress and the answer as the terminal shows them."""
    case = answered(LIMIT_MIB)
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=COLUMNS,
        highlight=False,
        markup=False,
    )
    candidates = legal_candidates(case.job, ToyTrainer())
    show_job(console, case.job, candidates, assumed=("random weights",))
    with Progress(case.job.space, stream=stream) as progress:
        for event in case.events:
            progress(event)
    show_answer(console, case.job, case.answer, ["recommended.yaml"])
    return _without_places(stream.getvalue())


def page_text() -> str:
    """Return the visible text of the page."""
    parser = _VisibleText()
    parser.feed(render(of_a_search(LIMIT_MIB)))
    return _without_places(" ".join(parser.texts))


class _VisibleText(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._is_hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_hidden = False

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._is_hidden:
            self.texts.append(data.strip())


def _without_places(text: str) -> str:
    return re.sub(r"(sqlite:)?/+\S+/\S+", "", text)
