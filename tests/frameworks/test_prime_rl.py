"""prime-rl's settings, rules and files, against its own configuration package, and its published
memory table.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.measurement import ProbePlan
from autotune.frameworks.launched_run import OUT
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.worker.launched_output import MetricReader
from tests.frameworks.stand_ins import GIB, case_of, refusal

MODEL = "trainer.model"
CHECKOUT = Path(os.environ.get("AUTOTUNE_FRAMEWORKS") or "absent") / "prime-rl"
"""`bin/python` with prime-rl's configuration dependencies (Python 3.12), `repo` a clone at
v0.8.0.
"""

needs_checkout = pytest.mark.skipif(
    not CHECKOUT.is_dir(), reason="needs Python 3.12 and a clone in .venvs/frameworks/prime-rl/repo"
)
ACCEPTS = Path(__file__).parent / "accepts"
RENDERER = ["--orchestrator.renderer.name", "default"]


def files(plan: ProbePlan | None = None, **about: Any) -> dict[str, str]:
    trainer, candidate, task = case_of("prime-rl", **about)
    assert trainer.why_illegal(candidate, task) is None
    return dict(trainer.launch(candidate, task, plan).files)  # type: ignore[attr-defined]


def test_trainer_and_engine_share_the_gpus_out() -> None:
    trainer, candidate, task = case_of("prime-rl", settings={"deployment.num_infer_gpus": 2})
    composition = trainer.compose(candidate, task)
    assert (composition.ranks, composition.engine, composition.generation) == (6, None, "server")
    assert (
        not composition.syncs_adapter_only
        and case_of("prime-rl", tuning="lora")[0]
        .compose(*case_of("prime-rl", tuning="lora")[1:])
        .syncs_adapter_only
    )


def test_whole_weights_reach_the_servers_by_a_file_where_it_is_stated() -> None:
    def by_file(**settings: Any) -> bool:
        trainer, candidate, task = case_of("prime-rl", settings=settings)
        return trainer.compose(candidate, task).syncs_by_file

    assert not by_file()
    assert by_file(**{"weight_broadcast.type": "filesystem"})
    written = files(settings={"weight_broadcast.type": "filesystem"})["recommended.toml"]
    assert tomllib.loads(written)["weight_broadcast"] == {"type": "filesystem"}


def test_the_written_file_is_toml_and_an_absent_part_has_prime_rls_word() -> None:
    written = tomllib.loads(files(settings={f"{MODEL}.ac_offloading": False})["recommended.toml"])
    assert (
        written["trainer"]["model"]["ac"] == {}
        and written["trainer"]["model"]["ac_offloading"] == "None"
    )
    assert written["deployment"] == {"gpus_per_node": 8, "num_infer_gpus": 4, "num_train_gpus": 4}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in written and "lora" not in written["trainer"]["model"]
    odd = tomllib.loads(files(model="Qwen2.5-7B", tuning="lora")["recommended.toml"])
    assert (
        odd["trainer"]["model"]["lora"] == {"rank": 16} and odd["inference"]["enable_lora"] is True
    )


def test_a_probe_is_the_trainers_benchmark_on_full_micro_batches() -> None:
    trainer, candidate, task = case_of("prime-rl")
    launch = trainer.launch(candidate, task, ProbePlan())  # type: ignore[attr-defined]
    assert "--nproc-per-node=4" in launch.argv and launch.argv[-1] == f"{OUT}/trainer.toml"
    written = tomllib.loads(launch.files["trainer.toml"])
    assert (
        written["bench"]["output_json"] == f"{OUT}/bench.json"
        and written["model"]["name"] == "Qwen/Qwen2.5-7B"
    )


def test_a_micro_batch_is_full_whatever_the_rows() -> None:
    trainer, candidate, task = case_of(
        "prime-rl", settings={f"{MODEL}.seq_len": 16384, f"{MODEL}.cp": 2}
    )
    spec: Any = trainer.trace_request(candidate, task)
    rows = spec["settings"]["per_device_train_batch_size"]
    assert rows * sum(spec["lengths"][part] for part in ("prompt", "completion")) == 8192
    assert trainer.lower_bound_candidate(candidate, task) is None
    assert spec["settings"]["activations_in_flight"] == 5 and spec["settings"]["offloads_optimizer"]


def test_a_head_that_is_not_fused_has_logits_of_all_tokens() -> None:
    def loss(**settings: Any) -> Any:
        trainer, candidate, task = case_of("prime-rl", settings=settings)
        request: Any = trainer.trace_request(candidate, task)
        return request["settings"]["loss"], request["settings"]["loss_options"]

    tokens = f"{MODEL}.fused_lm_head_token_chunk_size"
    assert loss(**{tokens: 2048}) == ("logprobs_fused", {"chunk": 2048})
    kind, options = loss(**{tokens: "disabled"})
    assert kind == "logprobs_kernel"
    assert options["widened"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{MODEL}.seq_len": 1024}, "is less than orchestrator.seq_len=2048"),
        ({"deployment.num_infer_gpus": 8}, "GPUs of their own"),
        (
            {
                f"{MODEL}.fsdp_cpu_offload": False,
                f"{MODEL}.ac": False,
                f"{MODEL}.ac_offloading": True,
            },
            "requires trainer.model.ac",
        ),
        ({"orchestrator.batch_size": 100}, "whole groups"),
        ({f"{MODEL}.cp": 3}, "not divisible by trainer.model.cp=3"),
        ({"inference.parallel.tp": 3}, "not divisible by inference.parallel.tp=3"),
    ],
)
def test_what_it_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], message: str
) -> None:
    reason = refusal("prime-rl", settings=settings)
    assert reason is not None and message in reason


def test_speed_is_read_from_the_trainers_line() -> None:
    trainer, candidate, task = case_of("prime-rl")
    request = trainer.probe_request(candidate, task, ProbePlan())
    reader = MetricReader(json.loads(json.dumps(request))["figures"])
    line = (
        "20:01:02 SUCCESS Step 2 |    4.9s | Loss 0.0 | LR 1.00e-06 | Throughput 26025 tokens/s |"
        " MFU 13.9% | Peak Mem. 17.1 GiB"
    )
    assert reader.read("Starting step 2", 0.0) is None
    reader.read(line, 1.0)
    figure = reader.read(line, 6.0)
    assert figure is not None and (figure.tokens, figure.seconds) == (130125, 5.0)


def understood(tmp_path: Path, kind: str, text: str, *arguments: str) -> Any:
    path = tmp_path / "given.toml"
    path.write_text(text.replace(OUT, str(tmp_path)))
    return own_reading(tmp_path, kind, "@", str(path), *arguments)


def own_reading(tmp_path: Path, kind: str, *arguments: str) -> Any:
    """Return what prime-rl's own parser makes of these arguments."""
    done = subprocess.run(
        [str(CHECKOUT / "bin" / "python"), str(ACCEPTS / "prime_rl_config.py"), kind, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT / "repo" / "packages" / "prime-rl-configs" / "src"),
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@needs_checkout
@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_its_parser_takes_what_is_written(tuning: str, tmp_path: Path) -> None:
    parsed = understood(
        tmp_path,
        "rl",
        files(tuning=tuning, settings={f"{MODEL}.ac_offloading": False})["recommended.toml"],
        *RENDERER,
    )
    model = parsed["trainer"]["model"]
    assert model["name"] == parsed["orchestrator"]["model"]["name"] == "Qwen/Qwen2.5-7B"
    assert model["ac"]["mode"] == "full" and model["ac_offloading"] is None
    assert (model["lora"] is None) is (tuning == "full") and parsed["orchestrator"][
        "group_size"
    ] == 16


@needs_checkout
@pytest.mark.slow
def test_its_parser_takes_the_probe(tmp_path: Path) -> None:
    parsed = understood(tmp_path, "trainer", files(ProbePlan())["trainer.toml"])
    assert (
        parsed["bench"] is not None
        and parsed["max_steps"] == 4
        and parsed["data"]["fake"] is not None
    )


ROWS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("prime_rl_table.yaml").read_text()
)


def reserved(row: dict[str, Any]) -> tuple[float, float, float]:
    """Low, value and high of torch's reserved memory, in GiB."""
    settings = {
        f"{MODEL}.seq_len": row["seq_len"],
        "orchestrator.seq_len": row["seq_len"],
        f"{MODEL}.ac_offloading": row["offload"],
        f"{MODEL}.optim_cpu_offload": row.get("optimizer_offload", False),
        "deployment.num_infer_gpus": 1,
        "orchestrator.batch_size": 32 * row["gpus"],
    }
    request = parse_request(
        Flags(
            framework="prime-rl",
            tuning="lora" if row["lora"] else "full",
            model=row["model"],
            gpus=f"{row['gpus'] + 1}xH100",
            mode="predict",
            set=tuple(f"{name}={json.dumps(value)}" for name, value in settings.items()),
        )
    )
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        estimate = service.predict(candidate_of_job(request)).torch_peak_reserved_bytes
    return estimate.low / GIB, estimate.value / GIB, estimate.high / GIB


def test_every_row_of_the_table_is_complete() -> None:
    assert sum(row["runs"] for row in ROWS) == 29
    assert all(row["gib"][0] <= row["gib"][1] for row in ROWS)


@pytest.mark.slow
def test_the_published_memory_is_foreseen() -> None:
    """The rows of the smallest model on one GPU; docs/frameworks.md has all."""
    errors = []
    for row in ROWS:
        if row["gpus"] > 1 or not row["model"].endswith("0.6B") or row["seq_len"] > 16384:
            continue
        low, value, high = reserved(row)
        assert low <= row["gib"][1] <= high, row
        errors.append(abs(value / row["gib"][1] - 1))
    assert len(errors) == 2 and statistics.median(errors) < 0.1


@pytest.mark.slow
def test_todays_defaults_are_foreseen_by_the_rows_of_june() -> None:
    """On one GPU the optimizer's state decides, which is back for its step. On four the value is
    a third high, inside its interval.
    """
    june = [row for row in ROWS if row.get("optimizer_offload")]
    assert [row["gpus"] for row in june] == [1, 4]
    values = []
    for row in june:
        low, value, high = reserved(row)
        assert low <= row["gib"][1] <= high, row
        values.append(value)
    assert values[0] == pytest.approx(june[0]["gib"][1], rel=0.03)


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_mixture_alone_weights_its_experts_in_float32(method: str) -> None:
    def is_weighted(model: str) -> bool:
        trainer, candidate, task = case_of(
            "prime-rl",
            method,
            model=model,
        )
        request: Any = trainer.trace_request(candidate, task)
        return bool(request["settings"].get("float32_expert_weights"))

    assert is_weighted("Qwen3-30B-A3B")
    assert not is_weighted("Qwen2.5-7B")


# `sft`.


def test_sft_trains_full_rows_on_all_gpus() -> None:
    """128 rows on 8 GPUs, 2 at a time: 8 micro-steps of 4,096 tokens."""
    settings = {
        "data.batch_size": 128,
        "data.micro_batch_size": 2,
        "data.seq_len": 2048,
    }
    trainer, candidate, task = case_of(
        "prime-rl",
        "sft",
        settings=settings,
    )
    composition = trainer.compose(candidate, task)
    assert (composition.ranks, composition.accumulation, composition.generation) == (8, 8, "none")
    assert composition.split is None
    request: Any = trainer.trace_request(candidate, task)
    assert request["settings"]["per_device_train_batch_size"] == 2
    assert sum(request["lengths"][part] for part in ("prompt", "completion")) == 2048
    assert request["settings"]["score"] is None


def test_sft_without_a_fused_head_has_the_logits_of_a_causal_model() -> None:
    def loss(chunk: Any) -> str:
        settings = {"model.fused_lm_head_token_chunk_size": chunk}
        trainer, candidate, task = case_of(
            "prime-rl",
            "sft",
            settings=settings,
        )
        request: Any = trainer.trace_request(candidate, task)
        return str(request["settings"]["loss"])

    assert (loss(1024), loss("disabled")) == ("logprobs_fused", "causal_lm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.batch_size": 12}, "must be a multiple of GPUs x data.micro_batch_size, 8"),
        ({"model.cp": 3}, "not divisible by model.cp=3"),
        ({"model.cp": 2, "data.micro_batch_size": 2}, "must be 1 when model.cp is above 1"),
        ({"deployment.num_gpus": 4}, "is not the 8 of the request"),
        ({"model.ac": False, "model.ac_offloading": True}, "requires model.ac"),
    ],
)
def test_sft_refuses_what_its_trainer_refuses(settings: dict[str, Any], message: str) -> None:
    reason = refusal("prime-rl", "sft", settings=settings)
    assert reason is not None and message in reason


def test_a_probe_of_sft_is_its_benchmark_on_synthetic_rows() -> None:
    trainer, candidate, task = case_of(
        "prime-rl",
        "sft",
        tuning="lora",
    )
    launch = trainer.launch(candidate, task, ProbePlan())  # type: ignore[attr-defined]
    assert "--nproc-per-node=8" in launch.argv and "prime_rl.trainer.sft.train" in launch.argv
    written = tomllib.loads(launch.files["trainer.toml"])
    assert (written["data"]["type"], written["model"]["name"]) == ("fake", "Qwen/Qwen2.5-7B")
    assert written["model"]["lora"] == {"rank": 16}
    assert written["bench"]["output_json"] == f"{OUT}/bench.json"


@needs_checkout
@pytest.mark.slow
def test_its_parser_takes_the_probe_and_the_final_run_of_sft(tmp_path: Path) -> None:
    for plan in (None, ProbePlan()):
        trainer, candidate, task = case_of("prime-rl", "sft")
        [text] = trainer.launch(candidate, task, plan).files.values()  # type: ignore[attr-defined]
        parsed = understood(tmp_path, "sft", text)
        assert parsed["model"]["name"] == "Qwen/Qwen2.5-7B"
        assert (parsed["bench"] is None) is (plan is None)
