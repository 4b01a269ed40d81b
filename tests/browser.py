"""Headless browser for tests of pages. Where none is installed, these tests are skipped with the
reason."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


@dataclass
class Opened:
    """A tab, and everything that went wrong in it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)
    """Addresses beyond the page itself."""


@contextlib.contextmanager
def tab(
    url: str,
    *,
    width: int = 1100,
    dark: bool = False,
) -> Iterator[Opened]:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        opened = Opened(page=page)
        page.on(
            "console",
            lambda message: (
                opened.complaints.append(message.text) if message.type == "error" else None
            ),
        )
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("request", lambda request: opened.asked_for.append(request.url))
        page.goto(url)
        yield opened
        browser.close()
