"""verl's settings, rules and models, against what its own configuration and workers say."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.core.measurement import ProbePlan
from autotune.core.units import MIB
from autotune.frameworks.launched_run import OUT
from autotune.frameworks.stand_in import StandIn
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from tests.frameworks.stand_ins import case_of, refusal

ACTOR, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


def request(**about: Any) -> Any:
    trainer, candidate, task = case_of("verl", **about)
    return trainer.trace_request(candidate, task)


def test_the_defaults_are_verls_own_where_it_has_one() -> None:
    _, candidate, _ = case_of("verl")
    assert candidate.settings["data.train_batch_size"] == 1024
    assert candidate.settings[f"{ROLLOUT}.gpu_memory_utilization"] == 0.5
    assert candidate.settings[f"{ROLLOUT}.tensor_model_parallel_size"] == 2
    assert candidate.settings[MICRO] == 1  # mandatory, and verl has none


def test_autotunes_flags_are_its_settings_under_other_names() -> None:
    _, candidate, _ = case_of(
        "verl",
        max_prompt_length=300,
        max_completion_length=700,
        num_generations=4,
    )
    assert (
        candidate.settings["data.max_prompt_length"],
        candidate.settings["data.max_response_length"],
    ) == (300, 700)
    assert candidate.settings[f"{ROLLOUT}.n"] == 4


def test_one_gpu_takes_no_tensor_parallel_engine() -> None:
    trainer, candidate, task = case_of("verl", gpus=1)
    assert candidate.settings[f"{ROLLOUT}.tensor_model_parallel_size"] == 1
    assert trainer.why_illegal(candidate, task) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({MICRO: 3}, "not divisible by"),
        ({f"{ACTOR}.ppo_mini_batch_size": 2048}, "data.train_batch_size=1024 is less than"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "8 GPUs are not divisible"),
        (
            {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000},
            "longest sequence, 1024 tokens",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{MODEL}.use_remove_padding": False},
            "needs",
        ),
        ({"data.train_batch_size": 1001, f"{ROLLOUT}.n": 3}, "is not divisible by 8 GPUs"),
        ({f"{ROLLOUT}.gpu_memory_utilization": "much"}, "is not a number"),
        ({f"{MODEL}.lora_rank": 16}, "add --tuning lora"),
        ({"sharding": "zero3"}, "sharding belongs to TRL"),
    ],
)
def test_what_verl_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], message: str
) -> None:
    reason = refusal("verl", settings=settings)
    assert reason is not None and message in reason


def test_the_older_micro_batch_counts_over_all_gpus_and_excludes_the_newer() -> None:
    older = {f"{ACTOR}.ppo_micro_batch_size": 64, f"{ROLLOUT}.log_prob_micro_batch_size": 64}
    assert request(settings=older)["settings"]["per_device_train_batch_size"] == 8
    assert "both set" in str(refusal("verl", settings={**older, MICRO: 8}))


def test_a_token_budget_is_filled_with_whole_rows_and_not_a_token_less() -> None:
    spec = request(
        settings={f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 5000}
    )
    rows, length = (
        spec["settings"]["per_device_train_batch_size"],
        sum(spec["lengths"][part] for part in ("prompt", "completion")),
    )
    assert rows == 4 and 5000 <= rows * length < 5000 + rows


def test_sequence_parallel_cuts_the_tokens_of_a_gpu() -> None:
    unsplit, half = (
        request(settings={MICRO: 4, f"{ACTOR}.ulysses_sequence_parallel_size": ranks})
        for ranks in (1, 2)
    )
    tokens = [
        spec["settings"]["per_device_train_batch_size"]
        * sum(spec["lengths"][p] for p in ("prompt", "completion"))
        for spec in (unsplit, half)
    ]
    assert tokens == [4096, 2048]


def test_weights_are_kept_in_float32_and_computed_with_in_bfloat16() -> None:
    spec = request()
    assert spec["sharding"] == {
        "kind": "fsdp1",
        "ranks": 8,
        "options": {
            "sharding_strategy": "FULL_SHARD",
            "master_bytes": 4,
            "frozen_master_bytes": 4,
            "reduce_bytes": 4,
        },
    }
    assert spec["model"]["dtype"] == "bfloat16"


def test_fsdp2_shards_layers_with_their_adapters() -> None:
    spec = request(tuning="lora", settings={f"{ACTOR}.strategy": "fsdp2"})
    assert spec["sharding"]["kind"] == "fsdp2" and spec["sharding"]["options"]["units"] == "layers"


def test_an_adapter_alone_is_sent_unless_it_is_merged() -> None:
    def sends_adapter(**about: Any) -> bool:
        trainer, candidate, task = case_of("verl", **about)
        return trainer.compose(candidate, task).syncs_adapter_only

    assert sends_adapter(tuning="lora") and not sends_adapter()
    assert not sends_adapter(tuning="lora", settings={f"{MODEL}.lora.merge": True})


def test_entropies_cost_the_gradient_its_place() -> None:
    def losses(**settings: Any) -> tuple[Any, Any]:
        step_settings = request(
            settings={f"{ACTOR}.{name}": value for name, value in settings.items()}
        )["settings"]
        return step_settings["loss_options"], step_settings["score"]["loss_options"]

    kernel = {"kernel_package": "flash_attn", "kernel_user": "verl"}
    assert losses() == ({"in_place": True, **kernel}, {"entropy": "compiled"})
    assert losses(entropy_coeff=0.001)[0] == {"in_place": False, "entropy": "compiled", **kernel}
    eager = {"fsdp_config.use_torch_compile": False, "entropy_from_logits_with_chunking": True}
    assert losses(**eager)[1] == {
        "entropy": "softmax",
        "entropy_widened": True,
        "entropy_chunk": 2048,
    }


def test_padded_rows_are_cut_out_of_their_logits_which_copies_them() -> None:
    step_settings = request(settings={f"{MODEL}.use_remove_padding": False})["settings"]
    assert step_settings["loss_options"]["copied"] is True
    assert step_settings["score"]["loss_options"] == {"entropy": "softmax", "entropy_widened": True}


@pytest.mark.parametrize(
    ("tuning", "settings", "gathers"),
    [
        ("full", {}, "shards"),
        ("full", {f"{ACTOR}.strategy": "fsdp2"}, "parameter"),
        ("lora", {}, "model"),
        ("lora", {f"{ROLLOUT}.layered_summon": True}, "layer"),
        ("lora", {f"{MODEL}.lora.merge": True}, "shards"),
        ("lora", {f"{ACTOR}.strategy": "fsdp2"}, "parameter"),
    ],
)
def test_weights_pass_through_a_buffer(
    tuning: str,
    settings: dict[str, Any],
    gathers: str,
) -> None:
    trainer, candidate, task = case_of("verl", tuning=tuning, settings=settings)
    composition = trainer.compose(candidate, task)
    assert (composition.sync_gathers, composition.sync_buffer_bytes) == (gathers, 2048 * MIB)


def test_nccl_needs_a_second_buffer() -> None:
    bucket = {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 512}
    trainer, candidate, task = case_of("verl", **{**SPLIT, **bucket, "trainer.n_gpus_per_node": 4})
    assert trainer.compose(candidate, task).sync_buffer_bytes == 2 * 512 * MIB


@pytest.mark.parametrize(("backend", "head"), [("torch", "tokens"), ("triton", "kernel")])
def test_fused_kernels_take_the_place_of_the_logits(backend: str, head: str) -> None:
    fused = {
        f"{MODEL}.use_fused_kernels": True,
        f"{MODEL}.fused_kernel_options.impl_backend": backend,
    }
    step_settings = request(settings=fused)["settings"]
    assert (step_settings["loss"], step_settings["loss_options"]) == (
        "logprobs_fused",
        {"head": head},
    )


def test_log_probabilities_of_the_engine_spare_a_pass_unless_a_reference_needs_one() -> None:
    bypass = {
        "algorithm.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.actor.use_kl_loss": False,
    }

    def scored(settings: dict[str, Any]) -> Any:
        trainer, candidate, task = case_of("verl", settings=settings)
        return trainer.trace_request(candidate, task)["settings"]["score"]

    assert scored(bypass) is None
    assert scored({**bypass, "actor_rollout_ref.actor.use_kl_loss": True})
    assert scored({"actor_rollout_ref.actor.use_kl_loss": False})


def test_what_is_offloaded_leaves_for_the_rollout_alone() -> None:
    fsdp = f"{ACTOR}.fsdp_config"
    trainer, candidate, task = case_of(
        "verl", settings={f"{fsdp}.param_offload": True, f"{fsdp}.optimizer_offload": True}
    )
    composition = trainer.compose(candidate, task)
    assert composition.offloaded_in_rollout == ("weights", "adapters", "optimizer")
    assert (
        composition.processes == 2
        and composition.engine is not None
        and composition.engine.apart
        and composition.engine.sleep
    )


def test_ppo_brings_a_critic_that_stays_unless_all_is_offloaded() -> None:
    trainer, candidate, task = case_of("verl", "ppo")
    critic = trainer.compose(candidate, task)["critic"]
    assert critic.trains and critic.awake is None and critic.dtype == "float32"
    everything = {
        f"{part}.{state}_offload": True
        for part in (f"{ACTOR}.fsdp_config", "critic.fsdp")
        for state in ("param", "optimizer")
    }
    trainer, candidate, task = case_of("verl", "ppo", settings=everything)
    critic = trainer.compose(candidate, task)["critic"]
    assert critic.offloads_weights and critic.state_bytes_per_weight == 0
    assert "critic" not in case_of("verl")[0].compose(*case_of("verl")[1:])


def test_packed_rows_may_be_as_few_as_one() -> None:
    trainer, candidate, task = case_of("verl", settings={MICRO: 8})
    least = trainer.lower_bound_candidate(candidate, task)
    assert least is not None
    spec: Any = trainer.trace_request(least, task)
    assert spec["settings"]["per_device_train_batch_size"] == 1
    padded = case_of("verl", settings={MICRO: 8, f"{MODEL}.use_remove_padding": False})
    assert padded[0].lower_bound_candidate(*padded[1:]) is None


def test_untraceable_settings_are_refused() -> None:
    with pytest.raises(CannotPredict, match="impl_backend=liger is Liger's own kernel"):
        case_of("verl", settings={f"{MODEL}.fused_kernel_options.impl_backend": "liger"})
    with pytest.raises(CannotPredict, match="trtllm is neither vLLM nor SGLang"):
        case_of("verl", settings={f"{ROLLOUT}.name": "trtllm"})


def test_a_probe_has_hydra_write_into_its_own_folder_and_is_read_there() -> None:
    trainer, candidate, task = case_of("verl")
    assert isinstance(trainer, StandIn)
    probe, final = trainer.launch(candidate, task, ProbePlan()), trainer.launch(candidate, task)
    (folder,) = [word.partition("=")[2] for word in probe.argv if word.startswith("hydra.run.dir=")]
    assert probe.effective is not None and probe.effective.file == f"{folder}/.hydra/config.yaml"
    assert folder.startswith(OUT) and final.effective is None
    assert not any(word.startswith("hydra.") for word in final.argv), (
        "where the user's own run writes is the user's"
    )


SPLIT = {
    "trainer.v1.trainer_mode": "separate_async",
    f"{ROLLOUT}.n_gpus_per_node": 3,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
}


def test_separate_async_splits_the_gpus() -> None:
    trainer, candidate, task = case_of("verl", **{**SPLIT, "trainer.n_gpus_per_node": 4})
    composition = trainer.compose(candidate, task)
    assert trainer.why_illegal(candidate, task) is None
    assert (
        composition.ranks,
        composition.generation,
        composition.engine,
        composition.processes,
    ) == (4, "server", None, 1)
    split = composition.split
    assert (split.gpus, split.overlap, split.at_sync, split.engine.sleep) == (
        3,
        "stream",
        "recompute",
        False,
    )
    line = trainer.launch(candidate, task).argv
    assert (
        f"{ROLLOUT}.checkpoint_engine.backend=nccl" in line and "trainer.n_gpus_per_node=4" in line
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.train_batch_size": 512},
            "must be trainer.v1.separate_async.parameter_sync_step=4 x",
        ),
        ({f"{ROLLOUT}.n_gpus_per_node": 8}, "need GPUs of their own"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "3 GPUs are not divisible by"),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "naive"}, "backend=nccl"),
    ],
)
def test_a_split_that_verl_refuses_is_refused(settings: dict[str, Any], message: str) -> None:
    assert message in refusal("verl", **{**SPLIT, "trainer.n_gpus_per_node": 4, **settings})


def test_sglang_is_an_engine_besides_vllm() -> None:
    trainer, candidate, task = case_of("verl", settings={f"{ROLLOUT}.name": "sglang"})
    composition = trainer.compose(candidate, task)
    assert (
        trainer.why_illegal(candidate, task) is None
        and composition.engine is not None
        and composition.engine.kind == "sglang"
    )
    assert any("free at its start" in note for note in composition.notes)
    assert any(
        "actor_rollout_ref.rollout.name=sglang" in word
        for word in trainer.launch(candidate, task).argv
    )  # type: ignore[attr-defined]
    vllm = case_of("verl")
    on_vllm = vllm[0].compose(*vllm[1:])
    assert (
        on_vllm.engine is not None
        and on_vllm.engine.kind == "vllm"
        and not any("SGLang" in note for note in on_vllm.notes)
    )


@pytest.mark.parametrize(("strategy", "tuning"), [("fsdp", "lora"), ("fsdp2", "full")])
@pytest.mark.slow
def test_the_engine_starts_beside_the_loaded_weights_alone(strategy: str, tuning: str) -> None:
    """`init_model` ends by emptying torch's cache: what loading left there is not beside vLLM,
    and the interval is narrow.
    """
    typed = (f"{ACTOR}.strategy={strategy}",)
    flags = Flags(
        framework="verl",
        model="Qwen2.5-1.5B",
        gpus="4xH100",
        tuning=tuning,
        set=typed,
        mode="predict",
    )
    understood = parse_request(flags)
    with contextlib.closing(open_prediction_service(understood.job, understood.trainer)) as service:
        prediction = service.predict(candidate_of_job(understood))
    by_phase = {phase.name: phase.peak_bytes for phase in prediction.phases}
    assert by_phase["load"].high < by_phase["rollout"].low
    assert prediction.peak_memory_bytes.high <= 1.25 * prediction.peak_memory_bytes.low
