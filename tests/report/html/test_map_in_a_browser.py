"""Map in a real browser: figures are those of `predict`, it works with the keyboard alone, on a
phone and in the dark.
"""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page

from autotune.cli.predict import command
from autotune.core.units import format_bytes
from autotune.prediction.service import open_prediction_service
from autotune.report.verdict_text import verdict_text
from autotune.request.flags import DEFAULTS, Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources
from tests.browser import needs_browser, tab
from tests.report.html.maps import small_space, write_page

pytestmark = [pytest.mark.slow, needs_browser]

POINTS = 20


def _shown(page: Page) -> dict[str, Any]:
    """Return what the page shows of its candidate."""
    settings: dict[str, Any] = yaml.safe_load(page.inner_text("#yaml"))
    return settings


def _knob(page: Page, name: str) -> Any:
    return page.get_by_label(name, exact=True)


def _flags_of_command(line: str) -> Flags:
    """Return the flags of a copied command, as the program parses them."""
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("autotune", "predict")
    context = command.make_context("predict", arguments)
    flags = {key: value for key, value in context.params.items() if key in DEFAULTS}
    return Flags(**flags)


def test_the_copied_command_predicts_the_figures_of_the_page(tmp_path: Path) -> None:
    rows = random.Random(5).sample(range(len(small_space().candidates)), POINTS)
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        for row in rows:
            page.evaluate(f"show({row}, [])")
            verdict, line = page.inner_text("#verdict"), page.inner_text("#command")
            peaks = page.locator("#phases tr td:last-child").all_inner_texts()

            request = read_sources(_flags_of_command(line), mode="predict").parse()
            candidate = candidate_of_job(request)
            service = open_prediction_service(request.job, request.trainer)
            prediction = service.predict(candidate)
            service.close()
            assert verdict == verdict_text(prediction)
            expected = [format_bytes(phase.peak_bytes.value) for phase in prediction.phases]
            assert peaks == expected
            knobs = {name: value for name, value in candidate.knobs.items() if value is not None}
            assert _shown(page) == knobs


def test_a_slider_moves_by_arrow_keys_and_dependent_settings_follow(tmp_path: Path) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        assert _shown(page)["per_device_train_batch_size"] == 8
        slider = _knob(page, "per_device_train_batch_size")
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert slider.get_attribute("aria-valuetext") == "4"
        settings = _shown(page)
        assert settings["per_device_train_batch_size"] == 4
        # The global batch of 64 is kept on one GPU.
        assert settings["gradient_accumulation_steps"] == 16
        followed = "Changed with it: gradient_accumulation_steps 8 → 16"
        assert page.inner_text("#followed") == followed
        page.get_by_role("button", name="As in the command").focus()
        page.keyboard.press("Enter")
        assert _shown(page)["per_device_train_batch_size"] == 8
        assert opened.complaints == []


def test_a_list_chooses_a_setting_of_words(tmp_path: Path) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        before = page.inner_text("#verdict")
        _knob(page, "gradient_checkpointing").select_option("false")
        assert _shown(page)["gradient_checkpointing"] is False
        assert page.inner_text("#verdict") != before
        assert page.inner_text("#verdict").startswith("does not fit")
        assert "no" in (page.get_attribute("#verdict", "class") or "").split()


def test_arrow_keys_walk_through_the_heat_map_and_enter_chooses(tmp_path: Path) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        page.get_by_label("across").select_option("per_device_train_batch_size")
        page.get_by_label("down").select_option("max_completion_length")
        assert page.locator("#heat button").count() == 3 * 2
        assert page.locator("#heat [tabindex='0']").count() == 1
        page.locator("#heat [tabindex='0']").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")  # at the edge, which it does not leave
        page.keyboard.press("Enter")
        settings = _shown(page)
        chosen = settings["per_device_train_batch_size"], settings["max_completion_length"]
        assert chosen == (2, 512)
        focused = page.evaluate("document.activeElement.getAttribute('aria-pressed')")
        assert focused == "true"


def test_each_cell_says_its_verdict_and_differs_without_colour(tmp_path: Path) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        page.get_by_label("across").select_option("per_device_train_batch_size")
        page.get_by_label("down").select_option("gradient_checkpointing")
        space = small_space()
        buttons = page.locator("#heat button").all()
        assert len(buttons) == 3 * 2
        verdicts = set()
        for button in buttons:
            row = int(button.get_attribute("data-row") or "")
            prediction = space.predictions[space.candidates[row].id]
            verdicts.add(prediction.fits)
            says = {True: ": fits, ", False: ": does not fit, peak", None: ": can't be decided, "}
            assert says[prediction.fits] in (button.get_attribute("aria-label") or "")
            assert button.inner_text().startswith("✕") == (prediction.fits is False)
        assert {True, False} <= verdicts


def test_one_setting_against_itself_is_replaced(tmp_path: Path) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        page.get_by_label("down").select_option(page.get_by_label("across").input_value())
        assert page.get_by_label("down").input_value() != page.get_by_label("across").input_value()
        assert opened.complaints == []


@pytest.mark.parametrize("text", ["yaml", "command"])
def test_a_button_copies(tmp_path: Path, text: str) -> None:
    with tab(write_page(tmp_path)) as opened:
        page = opened.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button = page.locator(f"[data-copies={text}]")
        button.click()
        page.wait_for_function(
            f"document.querySelector('[data-copies={text}]').textContent !== 'Copy'"
        )
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.strip() == page.inner_text(f"#{text}").strip() != ""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_fits_its_screen_and_asks_for_nothing(
    tmp_path: Path,
    width: int,
    dark: bool,
) -> None:
    with tab(write_page(tmp_path), width=width, dark=dark) as opened:
        page = opened.page
        page.wait_for_selector("body[data-row]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        assert opened.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in opened.asked_for)
