"""A real study in a hostile environment: secrets everywhere, a model named like markup and shell
code, a reward that prints them.
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command import Done, autotune, environment
from tests.e2e.demo import demo_model
from tests.search.postgres import PASSWORD, installed, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRETS = {
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLzXcVbNm",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_SERVICE_PASSWORD": "tr0ub4dor&3-and-more",
}
NAME = "<script>alert('x')</script> \"$(touch gone)\"\nmodel"
REWARD = (Path(__file__).parent / "programs/reward.py.txt").read_text()


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Files and output that a study left behind."""

    folder: Path
    done: Done
    failed: Done
    exported: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    if installed("initdb") is None:
        pytest.skip(
            "PostgreSQL's server is not installed: the password in a storage's address is part of"
            " this"
        )
    folder = tmp_path_factory.mktemp("hostile")
    with server() as database:
        (folder / "rewards_that_tell.py").write_text(REWARD)
        model = demo_model(folder / NAME)
        (folder / "train.yaml").write_text(
            json.dumps(
                {
                    "model_name_or_path": str(model),
                    "reward_funcs": ["rewards_that_tell.telling"],
                    "max_completion_length": 128,
                }
            )
        )
        arguments = [
            "--config",
            "train.yaml",
            "--gpus",
            "cpu",
            "--space",
            "demo",
            "--memory-limit",
            "2G",
            "--budget",
            "120s",
            "--max-probes",
            "3",
            "--hold",
            "use_vllm=false",
            "--hold",
            "trust_remote_code=true",
            "--storage",
            database.url,
        ]
        places = {
            "XDG_DATA_HOME": str(folder / "xdg_data_home"),
            "XDG_CACHE_HOME": str(folder / "xdg_cache_home"),
            "TMPDIR": str(folder / "tmpdir"),
        }
        Path(places["TMPDIR"]).mkdir()
        variables = {**SECRETS, **places, "PYTHONPATH": str(folder)}
        done = autotune(
            "run",
            *arguments,
            "--study",
            "well",
            "--out",
            "out",
            cwd=folder,
            timeout=400,
            **variables,
        )
        failing = [*arguments, "--study", "ill", "--out", "ill", "--fresh", "--json"]
        failed = autotune(
            "run",
            *failing,
            cwd=folder,
            timeout=200,
            RAISE="1",
            **variables,
        )
        exporting = ["study", "export", "--storage", database.url, "--study", "ill", "moved.json"]
        moved = autotune(*exporting, cwd=folder, **variables)
        assert moved.code == 0, moved.err
        yield Ran(
            folder=folder,
            done=done,
            failed=failed,
            exported=(folder / "moved.json").read_text() + moved.out + moved.err,
        )


def test_it_is_measured_all_the_same(ran: Ran) -> None:
    assert ran.done.code == 0, ran.done.err
    assert "fits: " in ran.done.err + ran.done.out
    assert not (ran.folder / "gone").exists(), "a part of the model's name was run as a command"


def test_a_reward_that_fails_is_named_and_what_it_told_is_not(ran: Ran) -> None:
    assert ran.failed.code != 0, ran.failed.err
    assert "could not log in with *** and ***" in ran.failed.out + ran.failed.err + ran.exported


@pytest.mark.parametrize("secret", [*SECRETS, "the password of the storage"])
def test_nothing_secret_is_told_or_written_anywhere(ran: Ran, secret: str) -> None:
    value = SECRETS.get(secret, PASSWORD)
    outputs = {
        "stdout": ran.done.out + ran.failed.out,
        "stderr": ran.done.err + ran.failed.err,
        "the exported study": ran.exported,
    }
    assert [place for place, text in outputs.items() if value in text] == []
    files = [file for file in ran.folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [
        str(file.relative_to(ran.folder)) for file in files if value.encode() in file.read_bytes()
    ] == []


def test_code_that_comes_with_a_model_is_run_only_if_asked_for_and_that_is_shown(ran: Ran) -> None:
    assert "trust_remote_code=true" in ran.done.out + ran.done.err
    document = json.loads((ran.folder / "out" / "recommendation.json").read_text())
    assert "trust_remote_code: true" in (ran.folder / "out" / "recommended.yaml").read_text(), (
        document["recommendation"]
    )


def test_the_report_shows_the_name_and_does_not_run_it(ran: Ran) -> None:
    page = (ran.folder / "out" / "report.html").read_text()
    assert "<script>alert(" not in page and "&lt;script&gt;alert(" in page


def test_files_are_the_users_own_and_like_any_other_of_theirs(ran: Ran) -> None:
    out = ran.folder / "out"
    script, page = (
        stat.S_IMODE((out / "launch.sh").stat().st_mode),
        stat.S_IMODE((out / "report.html").stat().st_mode),
    )
    (out / "mine").touch()
    assert page == stat.S_IMODE((out / "mine").stat().st_mode)
    assert script == page | 0o111 & ~_taken_away()
    files = [file for file in (ran.folder / "xdg_data_home").rglob("*") if file.is_file()]
    assert files and all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in files)


def test_the_launch_script_takes_the_name_as_it_is(ran: Ran) -> None:
    """The shell reads it without running anything, and nothing is left in the scratch folder."""
    script = ran.folder / "out" / "launch.sh"
    read = subprocess.run(
        ["bash", "-n", str(script)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert read.returncode == 0, read.stderr
    assert list((ran.folder / "tmpdir").glob("autotune*")) == []


def _taken_away() -> int:
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.umask(0))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(process.stdout)
