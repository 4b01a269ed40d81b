"""The page, as text: complete, self-contained, and safe whatever is in the document."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.errors import BadInput
from autotune.core.run_statistics import Disturbance
from autotune.core.units import format_bytes
from autotune.report.answer_document import document
from autotune.report.candidate_types import CandidateRow
from autotune.report.document_types import read_answer
from autotune.report.html.render import figures_of, markdown, render
from autotune.report.html.speed_chart import frontier, speed_against_memory
from tests.report.answers import answered
from tests.report.html.documents import of_a_real_run, of_a_search, with_predictions


class _Text(html.parser.HTMLParser):
    """Visible text of a page, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.seen.append(data)


def _read(page: str) -> _Text:
    parser = _Text()
    parser.feed(page)
    return parser


def test_the_page_has_the_interference_of_concurrent_probes() -> None:
    case = answered(900)
    disturbance = Disturbance(
        candidate_id="c",
        beside=3,
        tokens_per_second_beside=90.0,
        tokens_per_second_alone=100.0,
        slower_share=0.1,
        uncertainty=0.02,
        by_phase={"rollout": 0.125, "backward": -0.01},
    )
    answer = json.loads(
        json.dumps(document(case.job, replace(case.answer, disturbance=disturbance), []))
    )
    text = " ".join(_read(render(answer)).seen)
    assert "10.0% ± 2.0% slower beside 3 others on its machine than alone" in text
    assert "rollout +12.5%, backward -1.0%" in text
    assert "Probes ran at the same time" not in " ".join(_read(render(of_a_search())).seen)


def test_the_answer_is_first() -> None:
    document = of_a_real_run()
    text = " ".join(_read(render(document)).seen)
    best = document["recommendation"]
    speed, peak = (
        f"{best['tokens_per_second']['worst']:,.0f}",
        format_bytes(best["peak_memory_bytes"]),
    )
    assert (
        f"Measured: {speed} tokens/s at a peak of {peak}, of {format_bytes(best['limit_bytes'])}"
        " allowed" in text
    )
    for change in document["changes"]:
        assert change["name"] in text


def test_measured_speeds_have_their_intervals_in_the_chart() -> None:
    """A quarter of 212 tokens/s is a bar of 53 to both sides; a speed without a spread has none."""
    answer = of_a_search()
    for trial in answer["trials"]:
        trial["spread"] = {"worst": None, "typical": None}
    measured = next(trial for trial in answer["trials"] if trial["outcome"] == "ok")
    measured["tokens_per_second"] = {"worst": 212.0, "typical": None}
    measured["spread"] = {"worst": 0.25, "typical": None}
    answer["recommendation"] = None
    drawing = speed_against_memory(read_answer(answer))
    bars = {}
    for points in drawing.figure.data:
        if points.name == "fits":
            bars = dict(zip(points.y, points.error_y.array, strict=True))
    assert bars.pop(212.0) == 53.0
    assert bars and set(bars.values()) == {0.0}
    assert "Bars are the 95 % intervals of measured speeds." in drawing.says


def test_the_page_lists_model_tensors_by_rank() -> None:
    answer = of_a_search()
    certificate = answer["recommendation"]["certificate"]
    assert 'id="models"' not in render(answer)
    certificate["models"] = [
        {"rank": 0, "bytes": {"weights": 2**30, "reference_weights": 3 * 2**29}},
        {"rank": 1, "bytes": {"weights<b>": 2**28}},
    ]
    page = render(answer)
    cells = re.findall(
        r"<tr><td>(\d)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", page.partition('id="models"')[2]
    )
    assert cells == [
        ("0", "weights", "1 GiB"),
        ("0", "reference weights", "1.5 GiB"),
        ("1", "weights&lt;b&gt;", "256 MiB"),
    ]
    certificate["models"] = [{"rank": 0, "bytes": {"weights": "many"}}]
    with pytest.raises(BadInput):
        render(answer)


def test_the_page_lists_every_certificate_item() -> None:
    document = of_a_search()
    items = document["recommendation"]["certificate"]["items"]
    assert items
    text = " ".join(_read(render(document)).seen)
    for item in items:
        assert item["name"] in text and item["says"] in text


def test_a_certificate_written_by_somebody_else_is_shown_with_the_types_of_its_fields() -> None:
    document = json.loads(json.dumps(of_a_search()))
    certificate = document["recommendation"]["certificate"]
    certificate["items"] = [{"name": "tokens", "state": "complete"}]
    certificate |= {"peak_bytes": "1048576", "odd_bytes": "many"}
    page = render(document)
    assert "<b>tokens</b>: complete</li>" in page and format_bytes(2**20) in page and "many" in page


def test_every_failure_is_listed_with_its_evidence() -> None:
    document = of_a_search()
    failed = [row for row in document["trials"] if row["outcome"] != "ok"]
    assert failed, "this search should meet a failure"
    text = " ".join(_read(render(document)).seen)
    for row in failed:
        assert row["outcome"] in text


def test_nothing_is_fetched() -> None:
    for _, attributes in _read(render(of_a_real_run())).tags:
        for name in attributes.keys() & {"src", "href"}:
            assert (attributes[name] or "").startswith("data:")


def test_the_page_is_small_enough_to_send() -> None:
    assert len(render(of_a_real_run()).encode()) < 150_000


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "</script><img src=x onerror=alert(1)>",
        "a & b \" ' `",
        "${{7*7}}{{7*7}}",
    ],
)
def test_whatever_a_model_is_called_it_stays_text(hostile: str) -> None:
    document = of_a_search()
    document["question"]["model"] = hostile
    document["warnings"] = [hostile]
    for row in document["trials"]:
        row["knobs"][hostile] = hostile
        row["why"] = hostile
    page = render(document)
    parsed = _read(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    for _, attributes in parsed.tags:
        for name in attributes:
            assert not name.startswith("on")
    assert hostile in " ".join(parsed.seen)
    assert hostile not in _figures(page) or "<" not in hostile


def _figures(page: str) -> str:
    match = re.search(r"const FIGURES = (\{.*?\});\n", page, flags=re.DOTALL)
    assert match
    return match[1]


def test_figures_are_json_in_a_script() -> None:
    body = re.sub(r",\s*\}$", "}", _figures(render(of_a_real_run())))
    assert set(json.loads(body)) >= {"speed-against-memory", "memory-by-phase", "seconds-by-phase"}


def test_nothing_fits_is_an_answer_too() -> None:
    text = " ".join(_read(render(of_a_search(limit_mib=100))).seen)
    assert "Nothing fits into 100 MiB." in text
    assert "Measured:" not in text


def test_changes_that_make_the_baseline_fit_are_listed() -> None:
    way = {
        "change": {"use_peft<b>": True},
        "learning": True,
        "margin_bytes": {"value": 2**30, "low": 2**29, "high": 2**30},
    }
    page = render(
        {**of_a_search(), "recommendation": None, "status": "nothing_fits", "ways_to_fit": [way]}
    )
    row = page.partition('id="ways"')[2].partition("</tbody>")[0]
    assert (
        "use_peft&lt;b&gt;=true" in row
        and "1 GiB, at least 512 MiB" in row
        and "not comparable" in row
        and ">yes<" in row
    )
    assert 'id="ways"' not in render(of_a_search())


def test_predictions_are_never_shown_as_measured() -> None:
    text = " ".join(_read(render(with_predictions())).seen)
    assert "Coloured bars are predicted, part by part." in text
    assert "predicted peak GiB" in text


def test_a_predicted_answer_is_marked_everywhere() -> None:
    answer = of_a_search()
    answer.update(
        basis="predicted",
        trials=[],
        confirm_with="autotune run --mode probe",
    )
    answer["recommendation"]["certificate"] = None
    text = " ".join(_read(render(answer)).seen)
    assert "Predicted:" in text
    assert "Nothing was measured: every figure on this page is a prediction." in text
    assert "autotune run --mode probe" in text
    assert "Measured:" not in text


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, "schema"),
        ({"schema": 2}, "schema"),
        ({"schema": 1}, "not one of autotune's"),
        ({"schema": 1, "status": 3}, "not one of"),
    ],
)
def test_other_documents_are_refused(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_answer(broken)


def test_the_frontier_holds_only_what_no_other_beats() -> None:
    def row(peak: float, speed: float) -> CandidateRow:
        return CandidateRow(
            knobs={},
            peak_memory_bytes=peak,
            tokens_per_second=speed,
        )

    small, fast, beaten, alike = row(1, 10), row(3, 30), row(2, 9), row(3, 29)
    assert frontier([beaten, fast, alike, small]) == [small, fast]


def test_the_note_holds_the_settings_as_yaml() -> None:
    import yaml

    document = of_a_real_run()
    body = markdown(document)
    block = re.search(r"```yaml\n(.*?)```", body, flags=re.DOTALL)
    assert block
    knobs = document["recommendation"]["knobs"]
    stated = {name: value for name, value in knobs.items() if value is not None}
    assert yaml.safe_load(block[1]) == stated


def test_the_dashboards_figures_carry_their_titles() -> None:
    titles = {
        json.loads(figure)["layout"]["title"]["text"]
        for figure in figures_of(of_a_real_run()).values()
    }
    assert "Speed against memory" in titles


def test_a_panel_of_the_dashboard_names_candidates_without_their_settings() -> None:
    figures = figures_of(of_a_real_run())
    for name in ("memory-by-phase", "seconds-by-phase"):
        names = set()
        for points in json.loads(figures[name])["data"]:
            names.update(points["y"][0])
        assert names == {"recommended", "baseline", "runner-up 1"}


def test_a_prediction_at_given_lengths_shows_both_peaks() -> None:
    answer = of_a_search()
    assert "two-peaks" not in render(answer)
    answer["recommendation"]["prediction"] = _peaks(10, True, 6, True)
    answer["baseline"] |= {"prediction": _peaks(50, False, 9, True)}
    answer["nearest_miss"] = {"knobs": {"use_vllm": True}, "prediction": _peaks(40, None, 30, True)}
    answer["question"]["completion_lengths"] = {
        "source": "<lengths>.jsonl",
        "mean": 300.0,
        "p95": 1700,
    }
    answer["question"]["prompt_lengths"] = {
        "source": "lognormal:100,200",
        "mean": 100.0,
        "p95": 200,
    }
    text = " ".join(" ".join(_read(render(answer)).seen).split())
    assert (
        "completions of 300 tokens on average, 95% up to 1,700 (<lengths>.jsonl); prompts of 100"
        " tokens" in text
    )
    assert "recommended fits: 10 GiB (9 GiB to 11 GiB) fits: 6 GiB (5 GiB to 7 GiB)" in text
    assert "baseline does not fit: 50 GiB (49 GiB to 51 GiB) fits: 9 GiB (8 GiB to 10 GiB)" in text
    assert (
        "nearest miss can't be decided: 40 GiB (39 GiB to 41 GiB) fits: 30 GiB (29 GiB to 31 GiB)"
        in text
    )


def test_predicted_speeds_are_compared_at_the_same_lengths() -> None:
    answer = of_a_search()
    speed = {"value": 500.0, "low": 400.0, "high": 600.0}
    answer |= {"basis": "predicted", "trials": [], "advantage": None}
    answer["baseline"] = {
        "knobs": answer["baseline"]["knobs"],
        "basis": "predicted",
        "fits": True,
        "tokens_per_second": 2000.0,
        "peak_memory_bytes": 2**30,
        "prediction": {"tokens_per_second_at_lengths": speed},
    }
    answer["recommendation"] |= {
        "tokens_per_second": {"worst": 4000.0, "typical": 1100.0},
        "changed_learning_knobs": {},
    }
    answer["question"]["typical_completion_length"] = 300
    page = render(answer)
    assert "1,100 tokens/s at a peak of" in page and "2.20 times the baseline&#39;s speed" in page
    assert "memory at the longest lengths, speed at typical ones" in page


def _peaks(
    longest: int,
    fits: bool | None,
    at_lengths: int,
    fits_at_lengths: bool | None,
) -> dict[str, Any]:
    def around(gib: int) -> dict[str, int]:
        return {"value": gib * 2**30, "low": (gib - 1) * 2**30, "high": (gib + 1) * 2**30}

    return {
        "peak_memory_bytes": around(longest),
        "fits": fits,
        "peak_memory_bytes_at_lengths": around(at_lengths),
        "fits_at_lengths": fits_at_lengths,
    }
