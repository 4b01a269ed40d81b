"""Another micro-batch at the same global batch: which samples each optimizer step takes, counted by
hand and by transformers' own trainer on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import BadInput
from autotune.diagnosis import diagnose
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.guard.command_reading import check_learning, known_training
from autotune.guard.smaller import Evidence
from autotune.guard.training import KnownTraining
from autotune.request.flags import Flags
from tests.guard.test_learned import OUT_OF_MEMORY

ROWS = 10
GLOBAL_BATCH = 4
EPOCHS = 2


def _trained(
    folder: Path,
    *,
    micro: int,
    drop_last: bool = False,
    checkpoint: Path | None = None,
    stop_after: int | None = None,
) -> list[list[int]]:
    """Train on ten rows; return the rows of each optimizer step."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps: list[list[int]] = [[]]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
            steps[-1] += [int(number) for number in row.flatten()]
            return {"loss": self.layer(row).pow(2).mean()}

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append([])
            if state.global_step == stop_after:
                control.should_save = control.should_training_stop = True

    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=GLOBAL_BATCH // micro,
            num_train_epochs=EPOCHS,
            dataloader_drop_last=drop_last,
            learning_rate=1e-6,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"row": torch.tensor([float(row)])} for row in range(ROWS)],
        callbacks=[Steps()],
    )
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return [step for step in steps if step]


@pytest.mark.parametrize(
    "stop_after", [2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 3, 4))]
)
def test_a_restart_with_half_of_the_micro_batch_takes_the_same_samples(
    tmp_path: Path, stop_after: int
) -> None:
    uninterrupted = _trained(tmp_path / "whole", micro=4)
    # Ten rows by four: steps of 4, 4 and 2 rows, twice.
    assert [len(step) for step in uninterrupted] == [4, 4, 2, 4, 4, 2]
    before = _trained(tmp_path / "out", micro=4, stop_after=stop_after)
    checkpoint = tmp_path / "out" / f"checkpoint-{stop_after}"
    after = _trained(tmp_path / "out", micro=2, checkpoint=checkpoint)
    assert before + after == uninterrupted


def test_dropping_the_last_batch_makes_the_steps_depend_on_the_micro_batch(tmp_path: Path) -> None:
    # Two whole batches of four of ten rows: 2 steps. Five of two: 3 steps, the last one of 2 rows.
    uninterrupted = _trained(tmp_path / "four", micro=4, drop_last=True)
    halves = _trained(tmp_path / "two", micro=2, drop_last=True)
    assert [len(step) for step in uninterrupted] == [4, 4, 4, 4]
    assert [len(step) for step in halves] == [4, 4, 2, 4, 4, 2]


SFT = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: rows
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
output_dir: out
"""


def _sft(folder: Path, extra_lines: str) -> KnownTraining:
    config = folder / "train.yaml"
    config.write_text(SFT + extra_lines)
    training = known_training(
        str(config),
        ("trl", "sft", "--config", str(config)),
        Flags(config=None, gpus="cpu"),
        folder,
    )
    assert training is not None
    return training


def _next_batches(training: KnownTraining) -> tuple[object, object] | None:
    """Return micro-batch and accumulation of the next configuration."""
    evidence = Evidence(
        diagnosis=diagnose(OUT_OF_MEMORY),
        peak_bytes=None,
        refuted=frozenset({training.key}),
        may_change=frozenset(),
    )
    following = training.smaller(evidence)
    if following is None:
        return None
    settings = following[0].candidate.settings
    return settings[MICRO_BATCH], settings[ACCUMULATION]


@pytest.mark.parametrize(
    "extra_lines, is_changed",
    [
        ("", True),
        ("dataloader_drop_last: true", False),
        ("dataloader_drop_last: true\nmax_steps: 100", True),
    ],
)
def test_the_micro_batch_stays_where_it_would_change_the_steps(
    tmp_path: Path, extra_lines: str, is_changed: bool
) -> None:
    training = _sft(tmp_path, extra_lines)
    assert training.keeps_batches is not is_changed


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize(
    "extra_lines, is_changed",
    [("", True), ("dataloader_drop_last: true", False)],
)
def test_the_next_configuration_keeps_the_steps(
    tmp_path: Path, extra_lines: str, is_changed: bool
) -> None:
    batches = _next_batches(_sft(tmp_path, extra_lines))
    if is_changed:
        micro, steps = batches or (None, None)
        assert isinstance(micro, int) and isinstance(steps, int)
        assert micro < 8 and micro * steps == 16
    else:
        assert batches in (None, (8, 2))


def test_a_trainer_that_halves_its_own_batch_is_refused(tmp_path: Path) -> None:
    training = _sft(tmp_path, "auto_find_batch_size: true")
    with pytest.raises(BadInput, match="another global batch is learned"):
        check_learning(training, frozenset())
    check_learning(training, frozenset({"auto_find_batch_size"}))
    check_learning(_sft(tmp_path, "auto_find_batch_size: false"), frozenset())


def test_a_misspelt_setting_of_may_change_is_refused(tmp_path: Path) -> None:
    training = _sft(tmp_path, "")
    with pytest.raises(BadInput, match="max_lenght") as refusal:
        check_learning(training, frozenset({"max_lenght"}))
    assert "max_length" in str(refusal.value.way_out)
    check_learning(training, frozenset({"max_length"}))
