"""First screen of the page: verdict, speed against memory, settings to copy, changes; evidence
follows, folded, and nothing empty is shown.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from autotune.report.document_types import read_answer
from autotune.report.html.charts import labelled, told_apart
from autotune.report.html.render import render, settings_yaml
from tests.browser import needs_browser, tab
from tests.report.html.documents import of_a_real_run, of_a_search, with_predictions


def ids(page: str) -> list[str]:
    return re.findall(r'<(?:section|details)[^>]* id="([\w-]+)"', page)


def test_the_answer_precedes_its_evidence() -> None:
    page = render(of_a_real_run())
    order = [name for name in ids(page) if name != "file"]
    assert order[:3] == ["speed-against-memory-section", "settings", "recommendation"]
    assert order[-2:] == ["certificate", "conditions"]
    folded = re.findall(r'<details class="folded" id="(\w+)">', page)
    assert folded == ["certificate", "conditions"]


def test_where_nothing_fits_the_nearest_miss_is_first() -> None:
    page = render(of_a_search(limit_mib=100))
    assert ids(page)[0] == "recommendation" and "Closest to fitting" in page
    assert "settings" not in ids(page) and "certificate" not in ids(page)


@pytest.mark.parametrize("limit_mib", [None, 900, 100])
def test_no_section_is_without_content(limit_mib: int | None) -> None:
    page = render(of_a_search(limit_mib) if limit_mib else of_a_real_run())
    for section in re.findall(r"<section id=.*?</section>", page, re.DOTALL):
        assert re.search(r"<table|<pre|class=\"figure\"|<ul|<p", section), section
    assert "No measured candidate was predicted" not in page


def test_the_settings_are_yaml_of_what_is_recommended() -> None:
    document = of_a_real_run()
    knobs = document["recommendation"]["knobs"]
    expected = {name: value for name, value in knobs.items() if value is not None}
    assert yaml.safe_load(settings_yaml(read_answer(document))) == expected
    assert settings_yaml(read_answer(of_a_search(limit_mib=100))) == ""


def test_runner_ups_are_named_by_their_settings() -> None:
    answer = read_answer(with_predictions())
    assert answer.recommendation is not None
    best = answer.recommendation.knobs
    labels = {label: told_apart(label, row, answer) for label, row in labelled(answer)}
    assert labels["recommended"] == "recommended"
    for number, row in enumerate(answer.runner_ups, start=1):
        settings = labels[f"runner-up {number}"].removeprefix(f"runner-up {number}: ")
        for setting in settings.split(", "):
            name, _, _ = setting.partition("=")
            assert row.knobs[name] != best.get(name)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1100])
def test_the_settings_are_copied_by_a_button(
    tmp_path: Path,
    width: int,
    dark: bool,
) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(of_a_real_run()))
    with tab(file.as_uri(), width=width, dark=dark) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button = opened.page.locator("#settings button")
        button.click()
        opened.page.wait_for_function(
            "document.querySelector('#settings button').textContent !== 'Copy'"
        )
        copied = opened.page.evaluate("navigator.clipboard.readText()")
        assert copied.strip() == settings_yaml(read_answer(of_a_real_run())).strip()
        assert opened.complaints == []
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
