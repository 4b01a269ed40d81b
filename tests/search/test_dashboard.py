"""Study through optuna-dashboard's own application."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.core.errors import BadInput
from autotune.core.measurement import Measurement, MemorySample, ProbePlan
from autotune.core.space import Candidate
from autotune.report.html.render import figures_of
from autotune.search.dashboard_server import Extras, application, may_be_addressed, serve
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.browser import needs_browser, tab
from tests.inline_executor import InlineExecutor
from tests.report.html.documents import of_a_real_run
from tests.simulated import MIB, Machine, ToyTrainer, stored_toy_job, toy_space


class Telling(Machine):
    """Machine with printed output and a memory timeline."""

    def measure(
        self,
        candidate: Candidate,
        plan: ProbePlan,
    ) -> Measurement:
        measured = super().measure(candidate, plan)
        course = (
            MemorySample(
                seconds=1.0,
                peak_bytes=5,
                phase="load",
            ),
            MemorySample(
                seconds=2.5,
                peak_bytes=7,
                phase=None,
            ),
        )
        return replace(
            measured, printed="step 1\nstep 2\n", memory=replace(measured.memory, timeline=course)
        )


@pytest.fixture
def searched(tmp_path: Path) -> Any:
    """A whole search of the toy space, some of which ran out of memory."""
    return _search(tmp_path, Telling(limit_bytes=900 * MIB))


def _search(tmp_path: Path, machine: Machine) -> Any:
    job = stored_toy_job(tmp_path, toy_space(num_generations=(8, 4)), 900 * MIB)
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(machine.measure),
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert answer.counts.out_of_memory > 0
    return job, answer


@contextlib.contextmanager
def _served(job: Any, extras: Extras | None = None) -> Iterator[str]:
    app = application(job.storage, job.study_name, extras)
    with serve(app, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _numbered(trials: list[Any], number: int) -> Any:
    return next(trial for trial in trials if trial["number"] == number)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def test_the_best_trial_is_the_best_that_fits(searched: Any) -> None:
    job, answer = searched
    recommended = answer.certificate.number
    with _served(job, Extras(best_trial=recommended)) as url:
        study = _get(f"{url}/api/studies/1")
    assert [trial["number"] for trial in study["best_trials"]] == [recommended]
    by_number = {trial["number"]: trial for trial in study["trials"]}
    for trial in answer.trials:
        shown = by_number[trial.number]["constraints"]
        if trial.measurement.outcome.is_out_of_memory:
            assert shown
            assert max(shown) > 0
        elif trial.verdict.fits:
            assert shown
            assert max(shown) <= 0


def test_notes_and_artifacts_are_made_from_the_records(searched: Any) -> None:
    job, answer = searched
    failed = next(trial for trial in answer.trials if trial.measurement.outcome.is_out_of_memory)
    with _served(job, Extras(note="**the recommendation**")) as url:
        study = _get(f"{url}/api/studies/1")
        shown = _numbered(study["trials"], failed.number)
        contents = {}
        for artifact in shown["artifacts"]:
            with urllib.request.urlopen(
                f"{url}/artifacts/1/{shown['trial_id']}/{artifact['artifact_id']}"
            ) as answered:
                contents[artifact["filename"].split("-", 2)[2]] = answered.read().decode()
    assert study["note"]["body"] == "**the recommendation**"
    assert str(failed.measurement.outcome) in shown["note"]["body"]
    assert failed.measurement.failure.evidence in contents["failure.log"]
    assert json.loads(contents["memory.json"])["limit_bytes"] == job.memory_limit_bytes
    assert "checkpointing: " in contents["settings.yaml"]
    assert contents["output.log"] == "step 1\nstep 2\n"
    assert contents["memory.csv"].splitlines() == [
        "seconds,peak_bytes,phase",
        "1.0,5,load",
        "2.5,7,",
    ]


def test_an_artifact_without_content_is_not_offered(tmp_path: Path) -> None:
    """Records of a study by an older version."""
    job, answer = _search(tmp_path, Machine(limit_bytes=900 * MIB))
    fitting = next(trial for trial in answer.trials if trial.verdict.fits)
    with _served(job) as url:
        shown = _numbered(_get(f"{url}/api/studies/1")["trials"], fitting.number)
    assert {artifact["filename"].split("-", 2)[2] for artifact in shown["artifacts"]} == {
        "settings.yaml",
        "memory.json",
    }


def test_looking_changes_nothing(searched: Any) -> None:
    job, _ = searched
    before = _dump(job)
    with _served(job) as url:
        _get(f"{url}/api/studies/1")
        request = urllib.request.Request(f"{url}/api/studies/1", method="DELETE")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=20)
    assert _dump(job) == before


def _dump(job: Any) -> list[Any]:
    study = optuna.load_study(study_name=job.study_name, storage=job.storage)
    return [
        study.user_attrs,
        *[(t.user_attrs, t.system_attrs, t.state, t.values) for t in study.trials],
    ]


def _status(
    url: str,
    method: str = "GET",
    body: Any = None,
    **headers: str,
) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url,
        data=data,
        method=method,
        headers={"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_every_write_of_the_real_server_is_refused(searched: Any) -> None:
    import optuna_dashboard._app

    job, _ = searched
    before = _dump(job)
    routes = optuna_dashboard._app.create_app(optuna.storages.InMemoryStorage()).routes
    writes = {(route.method, route.rule) for route in routes if route.method not in ("GET", "HEAD")}
    assert ("PUT", "/api/studies/<study_id:int>/note") in writes
    assert len(writes) > 8
    with _served(job, Extras(note="made")) as url:
        for method, rule in sorted(writes):
            path = re.sub(r"<(\w+)(?::\w+)?>", "1", rule)
            body = {
                "body": "by hand",
                "version": 5,
                "study_name": "another",
                "directions": ["maximize"],
                "state": "Fail",
            }
            assert _status(f"{url}{path}", method, body) == 405, (method, rule)
        assert _get(f"{url}/api/studies/1")["note"]["body"] == "made"
    assert _dump(job) == before


def test_only_names_of_this_machine_are_answered(searched: Any) -> None:
    job, _ = searched
    with _served(job) as url:
        port = url.rpartition(":")[2]
        for host in (
            f"localhost:{port}",
            "127.0.0.1",
            f"127.0.0.1:{port}",
            "LOCALHOST.",
            "[::1]:80",
        ):
            assert _status(f"{url}/api/studies", Host=host) == 200, host
        for host in (
            "attacker.example",
            f"attacker.example:{port}",
            "127.0.0.1.attacker.example",
            "localhost.attacker.example",
            "10.0.0.1",
        ):
            assert _status(f"{url}/api/studies", Host=host) == 403, host


@pytest.mark.parametrize(
    ("host", "bound", "answered"),
    [
        ("gpu7:8080", "gpu7", True),
        ("gpu8:8080", "gpu7", False),
        ("10.1.2.3:80", "0.0.0.0", True),
        ("[fe80::1]", "::", True),
        ("evil.example", "0.0.0.0", False),
        (socket.gethostname(), "0.0.0.0", True),
        ("", "127.0.0.1", False),
        ("", "", False),
        ("10.1.2.3", "127.0.0.1", False),
        ("[::1]", "127.0.0.1", True),
    ],
)
def test_names_by_the_bound_address(
    host: str,
    bound: str,
    answered: bool,
) -> None:
    assert may_be_addressed(host, bound) is answered


def test_a_long_failure_is_an_excerpt_in_the_note_and_whole_in_its_artifact(tmp_path: Path) -> None:
    deep = "\n".join(
        [
            *(f'  File "/a/very/long/path/{"x" * 200}.py", line {n}, in step' for n in range(40)),
            "MemoryError: why",
        ]
    )

    class Deep(Machine):
        def measure(
            self,
            candidate: Candidate,
            plan: ProbePlan,
        ) -> Measurement:
            measured = super().measure(candidate, plan)
            return (
                measured
                if measured.failure is None
                else replace(measured, failure=replace(measured.failure, excerpt=deep))
            )

    job, _ = _search(tmp_path, Deep(limit_bytes=900 * MIB))
    with _served(job) as url:
        shown = next(
            trial
            for trial in _get(f"{url}/api/studies/1")["trials"]
            if "MemoryError: why" in trial["note"]["body"]
        )
        artifact = next(
            artifact
            for artifact in shown["artifacts"]
            if artifact["filename"].endswith("failure.log")
        )
        with urllib.request.urlopen(
            f"{url}/artifacts/1/{shown['trial_id']}/{artifact['artifact_id']}"
        ) as answered:
            assert answered.read().decode() == deep
    excerpt = shown["note"]["body"].split("```")[1].strip().splitlines()
    for attribute in shown["user_attrs"]:
        assert len(str(attribute["value"])) <= 100, "a long line would widen the whole page"
    assert 5 < len(excerpt) < 20
    assert max(map(len, excerpt)) <= 80
    assert excerpt[-1] == "MemoryError: why"


def test_a_missing_study_is_reported(searched: Any, tmp_path: Path) -> None:
    job, _ = searched
    with pytest.raises(BadInput, match="holds no study 'other'"):
        application(job.storage, "other")
    with pytest.raises(BadInput, match="holds 0 studies"):
        application(f"sqlite:///{tmp_path}/empty.db", None)


def test_a_port_in_use_is_reported(searched: Any) -> None:
    job, _ = searched
    app = application(job.storage, None)
    with serve(app, "127.0.0.1", 0) as first, pytest.raises(BadInput, match="can't be used"):
        serve(app, "127.0.0.1", first.server_port)


@pytest.mark.slow
@needs_browser
def test_the_pages_open_in_a_browser(searched: Any) -> None:
    job, answer = searched
    with _served(
        job, Extras(note="**the recommendation**", best_trial=answer.certificate.number)
    ) as url:
        with tab(f"{url}/dashboard/studies/1") as opened:
            opened.page.get_by_text(f"Best Trial (number={answer.certificate.number})").wait_for(
                timeout=20000
            )
            assert opened.complaints == []
        with tab(f"{url}/dashboard/studies/1/note") as opened:
            opened.page.get_by_text("the recommendation").wait_for(timeout=20000)


FIGURES = (Path(__file__).parent / "programs/figures.js").read_text()


@pytest.mark.slow
@needs_browser
def test_no_legend_covers_a_title_and_no_figure_is_cut_off(searched: Any) -> None:
    job, _ = searched
    figures = figures_of(of_a_real_run())
    with _served(job, Extras(figures=figures)) as url, tab(f"{url}/dashboard/studies/1") as opened:
        opened.page.wait_for_function(
            f"document.querySelectorAll('.gtitle').length >= {len(figures)}", timeout=60000
        )
        opened.page.wait_for_timeout(1000)
        shown = opened.page.evaluate(FIGURES)
    assert {"Seconds of one generation cycle", "Memory by phase"} <= {
        figure["name"] for figure in shown
    }
    assert len([figure for figure in shown if figure["legend"] is not None]) >= 3
    for figure in shown:
        assert figure["legend"] is None or figure["legend"] >= figure["title"]
        assert figure["beyond"] <= 1


def test_a_connection_that_sends_nothing_keeps_nobody_waiting(searched: Any) -> None:
    job, _ = searched
    with _served(job) as url:
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((str(address.hostname), int(address.port or 0))):
            assert _get(f"{url}/api/studies")["study_summaries"]
