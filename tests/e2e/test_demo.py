"""The demo as its users see it: real TRL, real vLLM, a limit that bites."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import needs_browser, tab
from tests.cli.command import autotune, environment
from tests.e2e.demo import ROOT, demo_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`make demo` itself, once; the environment is the one that runs this."""
    folder = tmp_path_factory.mktemp("demo")
    set_up = {
        "VENV": sys.prefix,
        "DEMO_MODEL": str(folder / "model"),
        "DEMO_OUT": str(folder / "out"),
    }
    variables = [f"{name}={value}" for name, value in set_up.items()]
    command = ["make", "-C", str(ROOT), f"--old-file={sys.prefix}/.ready", "demo", *variables]
    done = subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {
        "folder": folder,
        "model": folder / "model",
        "told": json.loads((folder / "out" / "recommendation.json").read_text()),
    }


@needs_browser
def test_its_report_opens_in_a_browser(demo: dict[str, Any]) -> None:
    with tab((demo["folder"] / "out" / "report.html").as_uri()) as opened:
        opened.page.wait_for_selector("body[data-drawn]")
        speed = demo["told"]["recommendation"]["tokens_per_second"]["worst"]
        assert f"{speed:,.0f} tokens/s" in opened.page.locator(".headline").inner_text()
        assert opened.complaints == []


def test_it_measures_what_it_promises(demo: dict[str, Any]) -> None:
    trials = [trial for trial in demo["told"]["trials"] if trial["purpose"] != "confirm"]
    with_engine = [trial for trial in trials if trial["knobs"].get("use_vllm")]
    assert len(trials) >= 6 and "ok" in outcomes_of(with_engine)
    assert demo["told"]["counts"]["loads"] < len(trials), "candidates share what was loaded"
    assert demo["told"]["elapsed_seconds"] < 240


def test_memory_really_runs_out_in_more_than_one_phase(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    """The search avoids candidates that must fail; with no others in the space, it measures
    them.
    """
    arguments = [
        "--gpus",
        "cpu",
        "--space",
        "demo",
        "--memory-limit",
        "700M",
        "--global-batch",
        "64",
        "--budget",
        "90s",
        "--out",
        "tight",
        "--json",
        "--hold",
        "use_vllm=false",
        "--hold",
        "max_completion_length=64",
        "--hold",
        "per_device_train_batch_size=64",
        "--hold",
        "gradient_checkpointing=false",
    ]
    tight = autotune("run", "--model", str(demo["model"]), *arguments, cwd=tmp_path, timeout=200)
    assert tight.code == 3, tight.err
    met = outcomes_of(demo["told"]["trials"]) | outcomes_of(tight.document["trials"])
    assert sum(outcome.startswith("oom_") for outcome in met) >= 2, met


def outcomes_of(trials: list[dict[str, Any]]) -> set[str]:
    return {trial["outcome"] for trial in trials}


def test_the_recommendation_is_confirmed_within_the_limit_and_written_down(
    demo: dict[str, Any],
) -> None:
    recommendation = demo["told"]["recommendation"]
    assert recommendation["certificate"]["outcome"] == "ok"
    assert recommendation["certificate"]["optimizer_steps"] >= 4
    assert 0 < recommendation["peak_memory_bytes"] <= recommendation["limit_bytes"]
    assert (
        recommendation["certificate"]["effective"]["per_device_train_batch_size"]
        == recommendation["knobs"]["per_device_train_batch_size"]
    )
    out = demo["folder"] / "out"
    for name in ("recommended.yaml", "accelerate.yaml", "launch.sh"):
        assert (out / name).exists()


@pytest.mark.parametrize("phase", ["oom_load", "oom_backward", "oom_forward", "oom_rollout"])
def test_what_ran_out_of_memory_fits_under_a_higher_limit(demo: dict[str, Any], phase: str) -> None:
    out = [trial for trial in demo["told"]["trials"] if trial["outcome"] == phase]
    if not out:
        return
    knobs = {**out[0]["knobs"]}
    if knobs.get("vllm_gpu_memory_utilization"):
        # A share of what there is: of six times as much, the same share leaves the trainer as
        # little again.
        knobs["vllm_gpu_memory_utilization"] = round(knobs["vllm_gpu_memory_utilization"] / 5, 3)
    flags_held = []
    for name, value in knobs.items():
        if value is not None:
            flags_held.append(f"--hold={name}={_typed(value)}")
    flags = re.sub(r"--memory-limit \S+", "--memory-limit 6G", " ".join(demo_flags())).split()
    folder = demo["folder"] / phase
    folder.mkdir()
    done = autotune(
        "run",
        "--model",
        str(demo["model"]),
        *flags,
        *flags_held,
        "--out",
        "out",
        "--json",
        cwd=folder,
        timeout=200,
    )
    assert done.code == 0, done.err
    trial = next(trial for trial in done.document["trials"] if trial["knobs"] == knobs)
    assert trial["outcome"] == "ok"
    assert trial["peak_memory_bytes"] > demo["told"]["recommendation"]["limit_bytes"] * 0.9


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_nothing_was_written_beside_the_output_folder(demo: dict[str, Any]) -> None:
    expected = {"model", "out", "oom_load", "oom_backward", "oom_forward", "oom_rollout"}
    assert {path.name for path in Path(demo["folder"]).iterdir()} <= expected
