"""`autotune study export` and `import`: what comes out is what went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from tests.cli.command import autotune

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def _made(folder: Path) -> str:
    """Study with a fitting trial, one out of memory, and an unfinished one."""
    url = f"sqlite:///{folder}/one.db"
    study = optuna.create_study(
        study_name="one",
        storage=url,
        direction="maximize",
    )
    study.set_user_attr("autotune:question", {"model": {"hidden_size": 8}})
    study.set_metric_names(["completion tokens per second"])
    distributions = {
        "batch": IntDistribution(1, 64, log=True),
        "share": FloatDistribution(0.1, 0.9),
        "on": CategoricalDistribution([True, None]),
    }
    params = {"batch": 4, "share": 0.5, "on": None}
    study.add_trial(
        create_trial(
            params=params,
            distributions=distributions,
            value=12.5,
            constraints={"memory over the limit": -0.2},
        )
    )
    study.add_trial(
        create_trial(
            state=TrialState.PRUNED,
            params={"batch": 8},
            distributions={"batch": distributions["batch"]},
            user_attrs={"why": "ünïcode \n <script>"},
            constraints={"memory over the limit": 0.3},
        )
    )
    study.ask()
    return url


def _content(url: str, name: str) -> Any:
    study = optuna.load_study(study_name=name, storage=url)
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    facts = [
        (
            t.state,
            t.values,
            t.params,
            t.distributions,
            t.user_attrs,
            t.constraints,
            t.datetime_start,
            t.datetime_complete,
        )
        for t in finished
    ]
    return study.user_attrs, study.metric_names, study.directions, facts


def test_there_and_back(tmp_path: Path) -> None:
    url = _made(tmp_path)
    out = autotune("study", "export", "--storage", url, "moved.json", cwd=tmp_path)
    assert (out.code, out.out) == (0, "Written: moved.json (2 trials of study 'one')\n")
    target = f"sqlite:///{tmp_path}/two.db"
    back = autotune("study", "import", "--storage", target, "moved.json", "--json", cwd=tmp_path)
    assert back.document == {"schema": 1, "study": "one", "trials": 2}
    assert _content(target, "one") == _content(url, "one")


def test_the_url_comes_from_a_file_too(tmp_path: Path) -> None:
    url = _made(tmp_path)
    (tmp_path / "from").write_text(f"{url}\n")
    (tmp_path / "into").write_text(f"sqlite:///{tmp_path}/two.db\n")
    assert (
        autotune("study", "export", "--storage-file", "from", "moved.json", cwd=tmp_path).code == 0
    )
    assert (
        autotune("study", "import", "--storage-file", "into", "moved.json", cwd=tmp_path).code == 0
    )
    assert _content(f"sqlite:///{tmp_path}/two.db", "one") == _content(url, "one")
    for options in (
        (),
        ("--storage", url, "--storage-file", "from"),
        ("--storage-file", "missing"),
    ):
        refused = autotune("study", "export", *options, "again.json", cwd=tmp_path)
        assert refused.code == 2 and "--storage" in refused.err and "Traceback" not in refused.err
    served = autotune("dashboard", "--storage-file", "missing", cwd=tmp_path)
    assert served.code == 2 and "--storage-file missing is no file" in served.err


def test_nothing_is_written_over(tmp_path: Path) -> None:
    url = _made(tmp_path)
    autotune("study", "export", "--storage", url, "moved.json", cwd=tmp_path)
    before = _content(url, "one")
    again = autotune("study", "import", "--storage", url, "moved.json", cwd=tmp_path)
    assert again.code == 2
    assert "already holds a study 'one'" in again.err
    assert _content(url, "one") == before
    renamed = autotune(
        "study", "import", "--storage", url, "moved.json", "--study", "another", cwd=tmp_path
    )
    assert renamed.code == 0
    assert _content(url, "another") == before


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exported")
    autotune("study", "export", "--storage", _made(folder), "moved.json", cwd=folder)
    return (folder / "moved.json").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(schema=7), "schema 7"),
        (lambda document: document.pop("trials"), "unexpected content"),
        (lambda document: document["trials"][0].update(state="HAPPY"), "is invalid"),
        (lambda document: document["trials"][0]["params"].update(batch=1000), "is invalid"),
        (lambda document: document["trials"][0]["distributions"].update(batch="{}"), "is invalid"),
    ],
)
def test_a_broken_file_leaves_no_study_behind(
    tmp_path: Path,
    change: Any,
    message: str,
    exported: str,
) -> None:
    document = json.loads(exported)
    change(document)
    (tmp_path / "broken.json").write_text(json.dumps(document))
    storage_url = "sqlite:///three.db"
    done = autotune("study", "import", "--storage", storage_url, "broken.json", cwd=tmp_path)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    storage = (
        optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/three.db")
        if (tmp_path / "three.db").exists()
        else None
    )
    assert storage is None or storage.get_all_studies() == []


def test_a_storage_with_several_studies_requires_a_name(tmp_path: Path) -> None:
    url = _made(tmp_path)
    optuna.create_study(study_name="two", storage=url)
    unnamed = autotune("study", "export", "--storage", url, "moved.json", cwd=tmp_path)
    assert unnamed.code == 2
    assert "--study: one, two" in unnamed.err
    wrong = autotune(
        "study", "export", "--storage", url, "--study", "three", "moved.json", cwd=tmp_path
    )
    assert wrong.code == 2
    assert "no study 'three'" in wrong.err


@pytest.mark.parametrize(
    "broken",
    [
        {"metric_names": ["one", "two"]},
        {
            "trials": [
                {
                    "state": "COMPLETE",
                    "params": {},
                    "distributions": {},
                    "user_attrs": {},
                    "values": [1.0, 2.0],
                }
            ]
        },
        {"user_attrs": {"nested": "DEEP"}},
    ],
    ids=["metrics", "values", "depth"],
)
def test_a_failed_import_leaves_no_study(broken: dict[str, Any], tmp_path: Path) -> None:
    content = {
        "schema": 1,
        "name": "one",
        "metric_names": [],
        "user_attrs": {},
        "trials": [],
        **broken,
    }
    (tmp_path / "moved.json").write_text(
        json.dumps(content).replace('"DEEP"', "[" * 900 + "]" * 900)
    )
    url = f"sqlite:///{tmp_path}/two.db"
    done = autotune("study", "import", "--storage", url, "moved.json", cwd=tmp_path)
    assert done.code == 2 and "Traceback" not in done.err and ".." not in done.err
    assert optuna.get_all_study_names(storage=url) == []
