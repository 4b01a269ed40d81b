"""`autotune run --mode emulate`: real probes on emulated GPUs, with predicted speed, and marked
so.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.answer import Recommendation, Trial
from autotune.core.job import Hardware, Job
from autotune.core.measurement import Speed
from autotune.core.prediction import Estimate
from autotune.report.answer_document import document
from autotune.report.html.render import render
from autotune.report.terminal import show_answer
from autotune.search.measured_trial import with_predicted_speed
from autotune.search.record import circumstances
from tests.cli.command import autotune, shape_only
from tests.emulator.test_incidents_on_cards import empty_model, rehearsed
from tests.report.answers import answered
from tests.report.test_forecast import PREDICTION

DOUBT = "Emulated, not measured: for a test."
TIMED = Speed(
    completion_tokens=64,
    cycle_seconds=(9.0, 8.0),
    cycle_loss_tokens=(400, 500),
    prompt_tokens=10,
    phase_seconds={"other": 17.0},
)


def on(job: Job, *, emulated: bool) -> Job:
    hardware = Hardware(
        kind="cuda",
        name="A100-40G",
        count=2,
        memory_bytes=40 * 2**30,
        here=True,
        emulated=emulated,
    )
    return replace(
        job, task=replace(job.task, hardware=hardware), mode="emulate" if emulated else "probe"
    )


def emulated_answer() -> tuple[Job, Recommendation]:
    def mark(trial: Trial) -> Trial:
        return replace(
            trial, measurement=replace(trial.measurement, emulated=True, caveats=(DOUBT,))
        )

    case = answered(900)
    answer = case.answer
    assert (
        answer.winner is not None and answer.certificate is not None and answer.baseline is not None
    )
    marked = {
        name: tuple(map(mark, getattr(answer, name)))
        for name in ("runner_ups", "trade_offs", "refuted", "trials")
    }
    single = {name: mark(getattr(answer, name)) for name in ("winner", "certificate", "baseline")}
    return on(case.job, emulated=True), replace(answer, **marked, **single)


def test_the_timed_speed_gives_place_to_the_predicted_one() -> None:
    measured = replace(answered(900).answer.trials[0].measurement, worst=TIMED, typical=TIMED)
    predicted = replace(
        PREDICTION,
        tokens_per_second=Estimate(
            value=1000.0,
            low=500.0,
            high=2000.0,
        ),
    )
    measurement = with_predicted_speed(measured, predicted)
    assert measurement.worst is not None
    assert measurement.worst.tokens_per_second == 1000.0 and measurement.typical is None
    assert sum(measurement.worst.phase_seconds.values()) == pytest.approx(
        sum(measurement.worst.cycle_seconds)
    )


def test_the_speed_at_the_lengths_that_occur_is_predicted_too() -> None:
    measured = replace(answered(900).answer.trials[0].measurement, worst=TIMED)
    rate, seconds = (
        Estimate(
            value=800.0,
            low=500.0,
            high=2000.0,
        ),
        {"rollout": Estimate.exactly(3), "forward": Estimate.exactly(1)},
    )
    predicted = replace(PREDICTION, tokens_per_second_at_lengths=rate, seconds_at_lengths=seconds)
    measurement = with_predicted_speed(measured, predicted)
    assert measurement.typical is not None and measurement.ranking_speed is measurement.typical
    assert measurement.typical.tokens_per_second == pytest.approx(800.0)
    assert measurement.typical.phase_seconds["rollout"] == pytest.approx(
        0.75 * measurement.typical.cycle_seconds[0]
    )


def test_a_speed_that_cannot_be_predicted_is_unknown() -> None:
    measured = replace(answered(900).answer.trials[0].measurement, worst=TIMED)
    assert with_predicted_speed(measured, None).worst is None
    assert with_predicted_speed(measured, replace(PREDICTION, tokens_per_second=None)).worst is None


def test_emulated_and_measured_figures_are_never_in_one_record_or_study() -> None:
    real, emulated = (on(answered(900).job, emulated=is_emulated) for is_emulated in (False, True))
    assert circumstances(real, {}).key != circumstances(emulated, {}).key
    assert real.identity != emulated.identity
    assert str(emulated.task.hardware) == "emulated 2xA100-40G"


def test_every_candidate_of_the_document_is_marked() -> None:
    job, answer = emulated_answer()
    answer_document = document(job, answer, [], confirm_with="autotune run --mode probe")
    assert (
        answer_document["basis"],
        answer_document["recommendation"]["basis"],
        answer_document["baseline"]["basis"],
    ) == ("emulated",) * 3
    rows = [
        *answer_document["trials"],
        *answer_document["runner_ups"],
        *answer_document["trade_offs"],
        *answer_document["refuted"],
    ]
    assert {row["basis"] for row in rows} == {"emulated"}
    assert (
        answer_document["caveats"] == [DOUBT]
        and answer_document["confirm_with"] == "autotune run --mode probe"
    )


def test_neither_terminal_nor_page_calls_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    job, answer = emulated_answer()
    show_answer(Console(width=200), job, answer, [], "autotune run --mode probe")
    output = capsys.readouterr().out
    assert (
        "emulated peak memory" in output
        and "predicted tokens/s" in output
        and "Certified" not in output
    )
    assert "easurabl" not in output and "±" not in output
    assert (
        f"Note: {DOUBT}" in output
        and "Confirm it on the target: autotune run --mode probe" in output
    )
    page = render(document(job, answer, [], confirm_with="autotune run --mode probe"))
    head = page[: page.index("<script>")]
    assert "Nothing was measured: memory is of emulated GPUs" in head and DOUBT in head
    assert "Emulated: " in head and "measured peak" not in page and "measured tokens/s" not in page


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--gpus", "local"],
            "'local' names no card that could be emulated. Name one, like --gpus 2xA100-40G.",
        ),
        (
            ["--gpus", "2xA100"],
            "'A100' comes with different amounts of memory. Say which: A100-40G or A100-80G.",
        ),
        (
            ["--gpus", "L4", "--slots", "2"],
            "One probe at a time runs on emulated GPUs. Leave --slots out.",
        ),
        (
            ["--gpus", "L4", "--executor", "ray"],
            "GPUs are emulated on this machine only, not on a cluster. Leave --executor out.",
        ),
    ],
)
def test_bad_use_is_one_sentence_with_the_way_out(
    arguments: list[str],
    error: str,
    tmp_path: Path,
) -> None:
    done = autotune(
        "run",
        "--model",
        str(shape_only(tmp_path / "m")),
        "--mode",
        "emulate",
        *arguments,
        cwd=tmp_path,
    )
    assert (done.code, done.out, done.err) == (2, "", f"Error: {error}\n")


def test_a_torch_without_cuda_is_one_sentence(tmp_path: Path) -> None:
    if importlib.import_module("torch").version.cuda is not None:
        pytest.skip("torch has CUDA in this environment; make test-all runs this in one without")
    model = str(shape_only(tmp_path / "m"))
    command = [
        "run",
        "--model",
        model,
        "--gpus",
        "L4",
        "--mode",
        "emulate",
        "--hold",
        "use_vllm=false",
    ]
    done = autotune(*command, cwd=tmp_path)
    assert (
        done.code == 4 and "which is no CUDA build, and only those can be emulated" in done.err
    ), done.err
    assert str(Path(sys.executable)) in done.err


def test_a_shortened_rollout_has_its_full_length_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    from autotune.emulator.inject import emulator_rollouts

    class Model(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
        """The patched methods stay in this class."""

    monkeypatch.setattr(emulator_rollouts, "ROLLOUT_STRIDE", 8)
    module = SimpleNamespace(GenerationMixin=Model)
    emulator_rollouts.shorten_transformers(module)  # type: ignore[arg-type]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = Model(transformers.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=64))
    cache_lengths: list[int] = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(
        lambda module, args, kwargs, out: cache_lengths.append(
            kwargs["past_key_values"].get_seq_length()
        ),
        with_kwargs=True,
    )
    config = transformers.GenerationConfig(
        max_new_tokens=32,
        min_new_tokens=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    ids = torch.full((2, 5), 7)
    completions = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
    )
    assert completions.shape == (2, 5 + 32)
    assert cache_lengths == [5, 13, 21, 29]  # the prompt, then a token in eight


SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 151936,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_on_emulated_cards_and_the_run_that_it_recommends(
    python: str, tmp_path: Path
) -> None:
    """The run that launch.sh starts has the certificate's peak."""
    shape = json.loads((shape_only(tmp_path / "shape", **SHAPE) / "config.json").read_text())
    model = empty_model(tmp_path / "m", shape)
    (tmp_path / "rows").mkdir()
    longest = 12 * "word " + "word"  # 64 tokens, one for each byte
    (tmp_path / "rows" / "train.jsonl").write_text(64 * (json.dumps({"prompt": longest}) + "\n"))
    command = [
        "run",
        "--model",
        model,
        "--gpus",
        "A100-40G",
        "--mode",
        "emulate",
        "--python",
        python,
        "--hold",
        "use_vllm=false",
        "--dataset",
        str(tmp_path / "rows"),
        "--max-completion-length",
        "192",
        "--global-batch",
        "16",
        "--num-generations",
        "8",
        "--search",
        "per_device_train_batch_size=2,16",
        "--search",
        "gradient_checkpointing=false",
        "--max-probes",
        "2",
        "--budget",
        "8m",
        "--out",
        "out",
        "--json",
    ]
    done = autotune(
        *command,
        cwd=tmp_path,
        timeout=590,
        XDG_DATA_HOME=str(tmp_path / "data"),
    )
    assert done.code == 0, done.err
    answer = done.document
    assert answer["basis"] == "emulated" and answer["question"]["hardware"] == "emulated A100-40G"
    best = answer["recommendation"]
    trial = next(row for row in answer["trials"] if row["knobs"] == best["knobs"])
    interval = trial["prediction"]["peak_memory_bytes"]
    assert interval["low"] <= best["peak_memory_bytes"] <= interval["high"]
    assert best["tokens_per_second"]["worst"] == pytest.approx(
        trial["prediction"]["tokens_per_second"]["value"], rel=0.01
    )
    assert any("docs/emulated-gpus.md" in caveat for caveat in answer["caveats"])
    assert "--mode probe" in answer["confirm_with"] and json.dumps(answer)

    steps = [
        "--max_steps",
        "3",
        "--save_strategy",
        "no",
        "--report_to",
        "none",
        "--output_dir",
        str(tmp_path / "trained"),
    ]
    code, trained = rehearsed(
        "A100-40G", python, tmp_path, "bash", "out/launch.sh", *steps, PYTHON=python
    )
    assert code == 0, trained["error"]
    assert len(trained["processes"]) == 1
    assert trained["processes"][0]["peak_bytes"] == pytest.approx(
        best["peak_memory_bytes"], rel=0.02
    )
