"""`autotune diagnose` as it is typed: its exit codes, its document, its words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autotune.failures import CAUSES
from tests.cli.command import PROGRAM, Done, autotune, environment
from tests.diagnose.logs import FRAMES, SHAPES, sample


def diagnosed(folder: Path, log: str | bytes, *more: str) -> Done:
    (folder / "train.log").write_bytes(log if isinstance(log, bytes) else log.encode())
    done = autotune("diagnose", "train.log", *more, cwd=folder)
    assert done.err == ""
    return done


def test_a_known_failure_is_0_and_one_document(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["on_rank_1"](sample("vllm_kv_too_small.earlier")), "--json")
    assert done.code == 0
    told = done.document
    assert set(told) == {"schema", "known", "is_memory", "cause", "phase", "rank", "evidence", "numbers", "remedies"}
    assert (told["schema"], told["known"], told["is_memory"], told["cause"]) == (1, True, True, "kv_cache")
    assert (told["phase"], told["rank"], told["numbers"]["longest_length"]) == ("load", 1, 34736)
    assert told["evidence"].startswith("ValueError: To serve at least one request")
    assert told["remedies"] and all(set(each) == {"change", "why", "predicted"} for each in told["remedies"])
    assert all(each["predicted"] is None for each in told["remedies"]), "nothing is predicted yet"


def test_the_words_say_what_where_by_which_line_and_what_helps(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["on_rank_1"](sample("vllm_kv_too_small.earlier")))
    assert done.code == 0
    words = " ".join(done.out.split())
    assert "memory ran out, on rank 1, while loading: the KV cache (kv_cache)." in words
    assert "line ValueError: To serve at least one request" in words
    assert "numbers asked 24 GiB, free 3.18 GiB, longest length 34736 tokens" in words
    assert "try vllm_max_model_length: lower, to at most 34736 (" in words
    assert "vllm_gpu_memory_utilization: raise (" in words
    assert max(len(line) for line in done.out.splitlines()) <= 120 and "\x1b" not in done.out


def test_not_memory_is_said_in_so_many_words(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["alone"](sample("disk")))
    assert done.code == 0 and "not out of memory: the disk" in done.out


def test_a_clean_log_is_0(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, "clip_grad_norm_(error_if_nonfinite=False)\n{'train_runtime': 12.5}\n")
    assert done.code == 0 and "no failure: the training finished." in done.out
    assert diagnosed(tmp_path, "{'train_runtime': 12.5}\n", "--json").document["cause"] == "none"


def test_an_unknown_failure_is_5_and_a_document_too(tmp_path: Path) -> None:
    log = FRAMES + "ZeroDivisionError: division by zero\n"
    done = diagnosed(tmp_path, log)
    assert done.code == 5 and "unknown" in done.out and "ZeroDivisionError" in done.out and "try" not in done.out.split()
    done = diagnosed(tmp_path, log, "--json")
    assert done.code == 5
    told = done.document
    assert (told["known"], told["is_memory"], told["cause"], told["remedies"]) == (False, None, None, [])


def test_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "diagnose", "-", "--json"],
        input=(FRAMES + sample("disk") + "\n").encode() + b"\xff\xfe",
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        env=environment(),
    )
    assert done.returncode == 0 and b'"disk_or_permission"' in done.stdout and done.stderr == b""


@pytest.mark.parametrize("terminal", ["40", "60", "200"])
def test_narrow_and_wide_terminals_and_an_ascii_one(tmp_path: Path, terminal: str) -> None:
    (tmp_path / "train.log").write_text(FRAMES + sample("peer_gone").removeprefix("[rank0]: "))
    done = autotune("diagnose", "train.log", cwd=tmp_path, COLUMNS=terminal, PYTHONIOENCODING="ascii")
    assert done.code == 0 and "Traceback" not in done.err
    assert max(len(line) for line in done.out.splitlines()) <= max(60, min(120, int(terminal)))


def test_bad_input_is_2_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "blank.log").write_text(" \n\r\n\t\n")
    (tmp_path / "folder").mkdir()
    for log, says in (
        ("missing.log", "'missing.log' can't be read: No such file"),
        ("empty.log", "'empty.log' holds no text"),
        ("blank.log", "'blank.log' holds no text"),
        ("folder", "'folder' can't be read: Is a directory"),
    ):
        done = autotune("diagnose", log, cwd=tmp_path)
        assert done.code == 2 and says in done.err and done.out == "", done
        assert done.err.count("\n") == 1 and "Traceback" not in done.err
        failed = autotune("diagnose", log, "--json", cwd=tmp_path)
        assert failed.code == 2 and failed.document["error"]["exit_code"] == 2
    assert autotune("diagnose", cwd=tmp_path).code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("x")
    (tmp_path / "train.log").chmod(0)
    done = autotune("diagnose", "train.log", cwd=tmp_path)
    assert done.code == 2 and "Permission denied" in done.err


def test_every_cause_has_words() -> None:
    from autotune.cli.diagnose import _CAUSES

    assert set(_CAUSES) == set(CAUSES) - {"none"}
