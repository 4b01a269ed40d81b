"""What the guard can't start: one sentence with a way out. Nothing is started, nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import autotune

CONFIG = "model_name_or_path: Qwen/Qwen2.5-0.5B\nreward_funcs: [accuracy_reward]\noutput_dir: out\n"
COMMAND = ("--", "bash", "-c", "touch started; trl grpo --config $AUTOTUNE_CONFIG")
ON_A_CPU = ("--gpus", "cpu", "--no-proof")


@pytest.mark.parametrize(
    "arguments, says, way_out",
    [
        (("none.yaml", *COMMAND), "none.yaml is no file", "Name the YAML file"),
        (("train.yaml",), "No command was given", "-- trl grpo --config train.yaml"),
        (("train.yaml", "--"), "No command was given", "-- trl grpo --config train.yaml"),
        (("--", "no-such-program"), "'no-such-program' is no program", "behind the two dashes"),
        (
            ("train.yaml", "--", "bash", "other.yaml"),
            "COMMAND does not name train.yaml",
            "$AUTOTUNE_CONFIG",
        ),
        (("train.yaml", "--restarts", "-1", *COMMAND), "'--restarts': -1", "autotune guard --help"),
        (
            ("train.yaml", *ON_A_CPU, "--may-change", "beat", *COMMAND),
            "--may-change beat: no setting",
            "Name one of beta,",
        ),
        (("train.yaml", *ON_A_CPU, "--out", "train.yaml", *COMMAND), "is a file", "Give a folder"),
        (("train.yaml", *ON_A_CPU, "--out", "/proc/none", *COMMAND), "/proc/none", "--out"),
        (
            ("train.yaml", "--gpus", "A100-40G", *COMMAND),
            "A100-40G is not on this machine",
            "Run this command on the machine that has it",
        ),
        (("--values", "micro", *COMMAND), "--values micro names no values", "micro=8,4,2"),
        (("--checkpoints", "out/x", *COMMAND), "its last part has no {step}", "'out/step_{step}'"),
    ],
)
def test_a_sentence_and_a_way_out(
    tmp_path: Path,
    arguments: tuple[str, ...],
    says: str,
    way_out: str,
) -> None:
    (tmp_path / "train.yaml").write_text(CONFIG)
    done = autotune("guard", *arguments, cwd=tmp_path)
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.startswith("Error: ") and done.err.count("\n") == 1, done.err
    assert says in done.err and way_out in done.err, done.err
    remaining = [path.name for path in tmp_path.iterdir()]
    assert remaining == ["train.yaml"], "something was started or left behind"


def test_without_a_gpu_the_way_out_is_one_that_the_guard_takes(tmp_path: Path) -> None:
    """Names of GPUs are refused where they are not, so they are no way out."""
    (tmp_path / "train.yaml").write_text(CONFIG)
    without = autotune("guard", "train.yaml", *COMMAND, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert without.code == 2
    assert "Type --gpus cpu" in without.err and "`guard` and `preflight` run where" in without.err
    ends = ("--", "bash", "-c", "test -f $AUTOTUNE_CONFIG && exit 7")
    followed = autotune("guard", "train.yaml", *ON_A_CPU, *ends, cwd=tmp_path)
    assert followed.code == 7, followed.err
