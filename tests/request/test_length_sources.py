"""Sources of `--lengths`: every kind of file that it reads, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from autotune.core.dataset import TokenLengths
from autotune.core.errors import BadInput
from autotune.request.flags import Flags
from autotune.request.notes import lengths_note
from autotune.request.request_parser import parse_request
from autotune.request.sources.length_sources import STAGES, read, read_prompts

TRL = (
    "{'loss': 0.01, 'completions/mean_length': %d.5, 'completions/max_length': 900.0,"
    " 'completions/clipped_ratio': 0.0}"
)
VERL = (
    "step:%d - actor/entropy:0.3 - response_length/mean:412.5 - response_length/max:900.0 -"
    " response_length/clip_ratio:0.25"
)
WANDB = (
    '"Step","run - train/completions/mean_length","run - train/completions/mean_length__MIN","run -'
    ' train/completions/max_length"'
)


def read_lines(folder: Path, *lines: str) -> TokenLengths:
    file = folder / "source"
    file.write_text("\n".join(lines))
    return read(str(file))


def test_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    assert read_lines(tmp_path, "10\n 30.0\n\n20\n").sample == (10, 20, 30)


def test_a_log_of_trl_gives_its_means_with_a_tail_up_to_the_longest(tmp_path: Path) -> None:
    lengths = read_lines(tmp_path, "loading", TRL % 300, TRL % 400, "done in 3 s")
    assert lengths.mean == pytest.approx(350.5, rel=0.03)
    assert 700 < max(lengths.sample) <= 900 and lengths.quantile(0.5) < lengths.mean


def test_a_log_of_verl_has_the_share_that_was_cut_off(tmp_path: Path) -> None:
    lengths = read_lines(tmp_path, VERL % 0, VERL % 1, VERL % 2)
    assert lengths.sample.count(900) / len(lengths.sample) == pytest.approx(0.25, abs=0.02)
    assert lengths.mean == pytest.approx(412.5, rel=0.03)


def test_a_wandb_export_is_read_by_its_header(tmp_path: Path) -> None:
    rows = '"0","200","1","600"', '"1","","",""', '"2","400","1","800"'
    lengths = read_lines(tmp_path, WANDB, *rows)
    assert lengths.mean == pytest.approx(300, rel=0.03) and max(lengths.sample) <= 800


def test_tables_of_trl_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    texts = ["x" * 400, "y" * 800]
    (tmp_path / "completions").mkdir()
    parquet.write_table(
        pyarrow.table({"step": [1, 1], "completion": texts}),
        tmp_path / "completions/completions_00001.parquet",
    )
    assert read(str(tmp_path)).sample == (100, 200)


def test_a_distribution() -> None:
    lengths = read("lognormal:600,1500")
    assert fmean(lengths.sample) == pytest.approx(600, rel=0.02)
    assert "mean 60" in lengths_note(lengths) or "mean 59" in lengths_note(lengths)


@pytest.mark.parametrize(
    "source",
    ["lognormal:600", "lognormal:a,b", "lognormal:-1,5", "lognormal:600,100", "lognormal:nan,nan"],
)
def test_a_wrong_distribution_is_refused_with_an_example(source: str) -> None:
    with pytest.raises(BadInput, match=r"lognormal:600,1500|--lengths"):
        read(source)


@pytest.mark.parametrize("text", ["", "nothing of lengths here", "a,b\n1,2\n", "nan\n"])
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="no completion lengths"):
        read_lines(tmp_path, text)


def test_an_empty_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BadInput):
            read(str(source))


def state(folder: Path, *means: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "completions/mean_length": mean, "completions/max_length": 4 * mean}
        for step, mean in enumerate(means)
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}, indent=2))
    return folder


def test_an_output_folder_has_the_steps_of_its_longest_trainer_state(tmp_path: Path) -> None:
    state(tmp_path / "checkpoint-2", 10, 10)
    state(tmp_path / "checkpoint-4", 100, 100, 200, 200)
    assert read(str(tmp_path)).mean == pytest.approx(150, rel=0.1)


def test_an_earlier_study_passes_on_the_lengths_that_it_was_given(tmp_path: Path) -> None:
    def study(**question: Any) -> str:
        (tmp_path / "recommendation.json").write_text(json.dumps({"question": question}))
        return str(tmp_path)

    answered = study(completion_lengths={"source": "x", "mean": 300.0, "p95": 700.0})
    lengths = read(answered)
    assert lengths.mean == pytest.approx(300, rel=0.02)
    assert lengths.quantile(0.95) == pytest.approx(700, rel=0.02)
    with pytest.raises(BadInput, match="that study knew no completion lengths"):
        read(study())


def test_lengths_change_over_training_as_in_the_log(tmp_path: Path) -> None:
    lengths = read(f"growing:{state(tmp_path, *range(100, 500, 10))}")
    means = [part.mean for part in lengths.stages]
    assert len(means) == STAGES
    assert means == sorted(means) and means[-1] > 2 * means[0]
    assert "over training" in lengths_note(lengths)


def test_lengths_change_from_one_distribution_to_another() -> None:
    lengths = read("growing:lognormal:100,200,1600,3200")
    assert [part.mean for part in lengths.stages] == pytest.approx([141, 283, 566, 1131], rel=0.05)


@pytest.mark.parametrize(
    "source",
    ["growing:lognormal:100,200", "growing:lognormal:100,200,0,10", "growing:lognormal:a,b,c,d"],
)
def test_a_wrong_change_is_refused_with_an_example(source: str) -> None:
    with pytest.raises(BadInput) as refused:
        read(source)
    assert source in refused.value.what


def test_too_short_a_log_does_not_change(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2 steps with completion lengths"):
        read(f"growing:{state(tmp_path, 1, 2)}")


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_methods_without_completions_refuse_lengths(method: str) -> None:
    flags = Flags(
        model="Qwen2.5-0.5B",
        gpus="A100-80G",
        method=method,
        lengths="lognormal:100,200",
    )
    with pytest.raises(BadInput, match="trains on given rows"):
        parse_request(flags)


def test_prompt_lengths_are_a_distribution_or_numbers(tmp_path: Path) -> None:
    numbers = tmp_path / "prompts.txt"
    numbers.write_text("90\n100\n110\n")
    assert read_prompts(str(numbers)).mean == 100
    assert abs(read_prompts("lognormal:105,150").mean - 105) < 1
    with pytest.raises(BadInput, match=r"--prompt-lengths lognormal:1"):
        read_prompts("lognormal:1")
    flags = Flags(
        model="Qwen2.5-0.5B",
        gpus="A100-80G",
        prompt_lengths=str(numbers),
    )
    with pytest.raises(BadInput, match="without --lengths they change nothing"):
        parse_request(flags)
