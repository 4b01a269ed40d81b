"""`autotune diagnose` as it is typed: its exit codes, its document, its words."""

from __future__ import annotations

import gzip
import os
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from autotune.core.measurement import Phase
from autotune.failures.table import CAUSES, MEANINGS
from tests.cli.command import PROGRAM, Done, autotune, bound_by_permissions, environment
from tests.diagnosis.around import FORWARD, FRAMES, SHAPES, sample


def diagnosed(folder: Path, log: str | bytes, *arguments: str) -> Done:
    (folder / "train.log").write_bytes(log if isinstance(log, bytes) else log.encode())
    done = autotune("diagnose", "train.log", *arguments, cwd=folder)
    assert done.err == ""
    return done


def test_a_known_failure_is_0_and_one_document(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["on_rank_1"](sample("vllm_kv_too_small.earlier")), "--json")
    assert done.code == 0
    document = done.document
    assert set(document) == {
        "schema",
        "known",
        "is_memory",
        "cause",
        "phase",
        "rank",
        "evidence",
        "numbers",
        "remedies",
        "remarks",
        "configured",
        "framework",
        "row",
    }
    assert (document["schema"], document["known"], document["is_memory"], document["cause"]) == (
        1,
        True,
        True,
        "kv_cache",
    )
    assert (document["phase"], document["rank"], document["numbers"]["longest_length"]) == (
        "load",
        1,
        34736,
    )
    assert document["evidence"].startswith("ValueError: To serve at least one request")
    assert document["remedies"] and all(
        set(remedy) == {"change", "why", "predicted"} for remedy in document["remedies"]
    )
    assert all(remedy["predicted"] is None for remedy in document["remedies"]), (
        "without a configuration nothing can be"
    )


def test_text_names_cause_place_line_and_remedy(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["on_rank_1"](sample("vllm_kv_too_small.earlier")))
    assert done.code == 0
    text = " ".join(done.out.split())
    assert "memory ran out, on rank 1, while loading: the KV cache (kv_cache)." in text
    assert "line ValueError: To serve at least one request" in text
    assert (
        "numbers requested 24 GiB, free 3.18 GiB, length requested 262144 tokens, longest length"
        " 34736 tokens" in text
    )
    assert "try Lower vllm_max_model_length to at most 34736: one whole sequence" in text
    assert "Raise vllm_gpu_memory_utilization: " in text
    assert max(len(line) for line in done.out.splitlines()) <= 120 and "\x1b" not in done.out


def test_other_failures_are_reported_as_not_memory(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, SHAPES["alone"](sample("disk")))
    assert done.code == 0 and "not out of memory: the disk" in done.out


def test_a_clean_log_is_0(tmp_path: Path) -> None:
    done = diagnosed(
        tmp_path, "clip_grad_norm_(error_if_nonfinite=False)\n{'train_runtime': 12.5}\n"
    )
    assert done.code == 0 and "no failure: the training finished." in done.out
    assert diagnosed(tmp_path, "{'train_runtime': 12.5}\n", "--json").document["cause"] == "none"


def test_an_unknown_failure_is_5_and_a_document_too(tmp_path: Path) -> None:
    log = FRAMES + "ZeroDivisionError: division by zero\n"
    done = diagnosed(tmp_path, log)
    assert (
        done.code == 5
        and "unknown" in done.out
        and "ZeroDivisionError" in done.out
        and "try" not in done.out.split()
    )
    done = diagnosed(tmp_path, log, "--json")
    assert done.code == 5
    document = done.document
    assert (document["known"], document["is_memory"], document["cause"], document["remedies"]) == (
        False,
        None,
        None,
        [],
    )


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
    done = autotune(
        "diagnose",
        "train.log",
        cwd=tmp_path,
        COLUMNS=terminal,
        PYTHONIOENCODING="ascii",
    )
    assert done.code == 0 and "Traceback" not in done.err
    assert max(len(line) for line in done.out.splitlines()) <= max(60, min(120, int(terminal)))


def test_bad_input_is_2_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "blank.log").write_text(" \n\r\n\t\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "packed.log").write_bytes(gzip.compress(b"loss"))
    (tmp_path / "model.bin").write_bytes(b"\x00" * 5000 + b"x" * 3000)
    (tmp_path / "wide.log").write_text("{'train_runtime': 1}", encoding="utf-16")
    with (tmp_path / "huge.log").open("wb") as huge:
        huge.truncate(5 * 2**30)
    for log, says in (
        ("missing.log", "'missing.log' can't be read: No such file"),
        ("empty.log", "'empty.log' holds no text"),
        ("blank.log", "'blank.log' holds no text"),
        ("folder", "'folder' is a folder, and a log is a file"),
        ("pipe", "'pipe' is a pipe, and a log is a file. Read it: autotune diagnose - < pipe"),
        (
            "packed.log",
            (
                "'packed.log' is compressed, and a log is text. Unpack it: gzip -dc packed.log |"
                " autotune diagnose -"
            ),
        ),
        ("model.bin", "'model.bin' is binary: 5000 of its first 8000 bytes are no text"),
        ("wide.log", "'wide.log' is text in UTF-16, and logs are read as UTF-8. Convert it: iconv"),
        (
            "huge.log",
            (
                "'huge.log' has 5 GiB, and files of up to 4 GiB are read. Read its end: tail -c"
                " 500M huge.log"
            ),
        ),
    ):
        done = autotune("diagnose", log, cwd=tmp_path)
        assert done.code == 2 and says in done.err and done.out == "", done
        assert done.err.count("\n") == 1 and "Traceback" not in done.err
        failed = autotune("diagnose", log, "--json", cwd=tmp_path)
        assert failed.code == 2 and failed.document["error"]["exit_code"] == 2
    for arguments, says in (
        ((), "No log was named. Name a log file"),
        (("train.log", "--gpus", "A100-40G"), "--gpus needs a configuration, and none was given"),
        (("--check", "--config", "train.yaml"), "--config is about a log, and none was named"),
    ):
        done = autotune("diagnose", *arguments, cwd=tmp_path)
        assert done.code == 2 and says in done.err and done.out == "", done


def test_stray_bytes_and_bars_are_no_reason_to_refuse_a_log(tmp_path: Path) -> None:
    log = (
        b"\x1b[32m 50%|#####     |\x1b[A\r" * 50 + b"\x00\x00" + (FRAMES + sample("disk")).encode()
    )
    assert diagnosed(tmp_path, log).code == 0


def test_a_configuration_that_cannot_be_predicted_leaves_the_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(FRAMES + sample("cuda_out_of_memory.container"))
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size:"
        " 3\nnum_generations: 2\n"
    )
    done = autotune(
        "diagnose",
        "train.log",
        "--config",
        "train.yaml",
        "--gpus",
        "A100-40G",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 0 and done.document["configured"] is None
    assert "nothing could be predicted for train.yaml" in done.document["remarks"][0]
    missing = autotune(
        "diagnose", "train.log", "--config", "none.yaml", "--gpus", "A100-40G", cwd=tmp_path
    )
    assert missing.code == 2 and "--config none.yaml is no file" in missing.err


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_a_configuration_gives_each_remedy_its_predicted_effect(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(FRAMES + FORWARD + sample("cuda_out_of_memory.container"))
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size:"
        " 64\ngradient_accumulation_steps: 1\nnum_generations: 8\nmax_completion_length:"
        " 1024\ngradient_checkpointing: false\nbf16: true\n"
    )
    done = autotune(
        "diagnose",
        "train.log",
        "--config",
        "train.yaml",
        "--gpus",
        "RTX-4090",
        "--json",
        cwd=tmp_path,
        timeout=280,
    )
    assert done.code == 0, done
    document = done.document
    assert (
        document["configured"]["fits"] is False
        and document["configured"]["peak_memory_bytes"]["value"] > 24 * 2**30
    )
    smaller = document["remedies"][0]
    assert "per_device_train_batch_size" in smaller["change"]
    predicted = smaller["predicted"]
    change = predicted["change"]
    assert change["per_device_train_batch_size"] * change["gradient_accumulation_steps"] == 64
    assert predicted["saved_bytes"] > 0 and not predicted["changes_what_is_learned"]
    assert (
        predicted["peak_memory_bytes"]["value"]
        < document["configured"]["peak_memory_bytes"]["value"]
    )


def test_the_check_of_an_environment(tmp_path: Path) -> None:
    done = autotune("diagnose", "--check", "--json", cwd=tmp_path, CUDA_LAUNCH_BLOCKING="1")
    assert done.code == 0 and set(done.document) == {"schema", "traps"}
    trap = next(trap for trap in done.document["traps"] if trap["name"] == "launch_blocking")
    assert set(trap) == {"name", "says", "helps", "sources"} and trap["sources"][0].startswith(
        "https://"
    )
    check = autotune("diagnose", "--check", cwd=tmp_path, CUDA_LAUNCH_BLOCKING="1")
    assert (
        check.code == 0
        and "(launch_blocking)" in check.out
        and "https://docs.pytorch.org" in check.out
    )
    (tmp_path / "train.log").write_text(FRAMES + sample("disk"))
    combined = autotune(
        "diagnose", "train.log", "--check", "--json", cwd=tmp_path, CUDA_LAUNCH_BLOCKING="1"
    )
    assert combined.document["cause"] == "disk_or_permission" and combined.document["traps"]
    gone = autotune("diagnose", "--check", "--python", "no/such/python", cwd=tmp_path)
    assert gone.code == 4 and "--python no/such/python is no program" in gone.err


def test_a_log_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("x")
    (tmp_path / "train.log").chmod(0)
    done = autotune("diagnose", "train.log", cwd=tmp_path, launcher=bound_by_permissions())
    assert done.code == 2 and "Permission denied" in done.err


def test_every_cause_and_phase_has_words() -> None:
    assert all(CAUSES.values())
    assert set(MEANINGS.phases) == set(get_args(Phase))
